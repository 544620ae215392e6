"""Kills of every process at any moment: make soak PART=kills ARGS="--seed 7 --seconds 600"."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.campaigns.campaign import Campaign, Fault
from tests.service.running import Running
from tests.service.test_end_to_end import ONE_CORE

pytestmark = pytest.mark.server

APPEARING = 240.0  # seconds until a process is there that was killed before
Found = Callable[[psutil.Process], bool]


def is_module(name: str) -> Found:
    return lambda one: name in " ".join(one.cmdline())


def is_java(one: psutil.Process) -> bool:
    return one.name() == "java"


def is_python_worker(one: psutil.Process) -> bool:
    """Spark starts those under Java: they plan batches, read segments and write tables."""
    return one.name().startswith("python") and any(parent.name() == "java" for parent in one.parents())


class Killer:
    """Kills processes of one service, and starts the service where that ended with them."""

    def __init__(self, service: Running) -> None:
        self._service = service

    def all_at_once(self, _: Random) -> None:
        assert self._service.process is not None
        main = psutil.Process(self._service.process.pid)
        for one in [main, *main.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
                one.kill()
        self._service.process.wait()
        self._service.start()

    def main(self, _: Random) -> None:
        """The others are orphans then, and let go."""
        assert self._service.process is not None
        os.kill(self._service.process.pid, signal.SIGKILL)
        self._service.process.wait()
        self._service.start()

    def one_that(self, found: Found) -> Fault:
        def kill(rng: Random) -> None:
            deadline, never = time.monotonic() + APPEARING, threading.Event()
            while not self._kill_one(found, rng):
                assert time.monotonic() < deadline, f"there is none to kill after {APPEARING} s"
                never.wait(0.1)

        return kill

    def _kill_one(self, found: Found, rng: Random) -> bool:
        assert self._service.process is not None
        candidates = []
        for one in psutil.Process(self._service.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                candidates += [one] if found(one) else []
        if candidates:
            rng.choice(candidates).kill()
        return bool(candidates)

    def faults(self, *, spark: bool) -> dict[str, Fault]:
        edge: dict[str, Fault] = {
            "all": self.all_at_once,
            "main": self.main,
            "receiver": self.one_that(is_module("penstock.service.receiver_process")),
        }
        jobs: dict[str, Fault] = {
            "Spark driver": self.one_that(is_module("penstock.service.spark_process")),
            "Java": self.one_that(is_java),
            "Python worker": self.one_that(is_python_worker),
        }
        return edge | jobs if spark else edge


def run(folder: Path, seed: int, seconds: float, *, spark: bool) -> str:
    service = Running(folder, ONE_CORE if spark else "", processes="2")
    tables = str(folder / "tables") if spark else None
    with Campaign(service, seed, tables=tables) as campaign:
        campaign.strike(Killer(service).faults(spark=spark), seconds)
        campaign.settle()
        return campaign.report("kills")


@pytest.mark.timeout(300)
def test_receiving_processes_that_are_killed_lose_and_repeat_no_point(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 0.0, spark=False)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(0)
def test_every_process_is_killed_at_any_moment_and_the_tables_are_exact(
    tmp_path: Path, seed: int, seconds: float
) -> None:
    print(run(tmp_path, seed, seconds, spark=True))  # noqa: T201 - the campaign's report
