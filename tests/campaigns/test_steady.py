"""Steady load with flat memory, threads and descriptors: make soak PART=steady ARGS="--seconds 7200"."""

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.campaigns.campaign import Campaign
from tests.campaigns.ledger import Point
from tests.campaigns.senders import JSON, Request, Sender
from tests.service.running import Running
from tests.service.test_end_to_end import ONE_CORE

pytestmark = pytest.mark.server

EVERY = 2.0  # seconds between two looks
# What the second half may have more than the first, whose median says what is usual: pools fill, and a heap breathes.
MORE_BYTES, MORE_THREADS, MORE_FILES = 48 << 20, 8, 16
# Java touches all of its heap before it collects, so its memory says nothing below this: the heap of ONE_CORE, and what
# classes, compiled code and threads take beside it.
JAVA_BYTES = (512 << 20) + (384 << 20)


class Look(NamedTuple):
    """At one process, or at all of a name."""

    bytes: float
    threads: float
    files: float


class NotNumbers(Sender):
    """Sends what is answered with success, counted, and in no table."""

    def make(self) -> Request:
        self._number += 1
        now = time.time_ns()
        point = Point("campaign.nan", "nan", now // 1000, 0.0)
        return Request("/v1/metrics", JSON, NAN % (now, self._number), [point])


NAN = (
    b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"campaign.nan","gauge":{"dataPoints":'
    b'[{"timeUnixNano":"%d","startTimeUnixNano":"%d","asDouble":"NaN"}]}}]}]}]}'
)


def look_at(service: Running) -> Iterator[tuple[str, Look]]:
    """By name: Spark's Python processes come and go."""
    assert service.process is not None
    main = psutil.Process(service.process.pid)
    found: dict[str, list[Look]] = defaultdict(list)
    for one in [main, *main.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found[name_of(one, main)].append(Look(one.memory_info().rss, one.num_threads(), one.num_fds()))
    for name, looks in found.items():
        yield name, Look(*(sum(column) for column in zip(*looks)))


def name_of(one: psutil.Process, main: psutil.Process) -> str:
    words = " ".join(one.cmdline())
    if one == main:
        return "main"
    for name in ("receiver_process", "spark_process"):
        if name in words:
            return name
    return "Java" if one.name() == "java" else "Spark's Python"


def growth_of(looks: list[Look]) -> tuple[Look, Look]:
    """The medians of the first and of the second half, after a quarter to warm up."""
    warm = looks[len(looks) // 4 :]
    halves = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    first, second = (Look(*map(statistics.median, zip(*half))) for half in halves)
    return first, second


def assert_flat(name: str, first: Look, second: Look) -> None:
    most = Look(first.bytes + MORE_BYTES, first.threads + MORE_THREADS, first.files + MORE_FILES)
    if name == "Java":
        most = most._replace(bytes=JAVA_BYTES)
    assert all(seen <= limit for seen, limit in zip(second, most)), f"{name} grew from {first} to {second}"


def counted(service: Running, name: str) -> int:
    lines = service.ask("/metrics")[1].splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")))


def run(folder: Path, seed: int, seconds: float, *, spark: bool) -> None:
    service = Running(folder, ONE_CORE if spark else "", processes="2")
    with Campaign(service, seed, tables=str(folder / "tables") if spark else None) as campaign:
        campaign.add(NotNumbers(service.port, "nan", campaign.ledger, seed))
        campaign.wait_for_requests(100)
        looks: dict[str, list[Look]] = defaultdict(list)
        ends, never = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < ends:
            for name, look in look_at(service):
                looks[name].append(look)
            never.wait(min(EVERY, seconds / 16))
        campaign.stop_senders()
        dropped = counted(service, "penstock_points_not_numbers_total")
        assert dropped
        campaign.settle(lost_and_counted=dropped)
        restarts = [line for line in service.log() if line["level"] == "error" or "died" in line["message"]]
        assert not restarts, restarts[:3]
        growths = {name: growth_of(seen) for name, seen in sorted(looks.items()) if len(seen) >= 12}
        print(campaign.report("steady"))  # noqa: T201 - the campaign's report, also of one that fails
        print(f"  {dropped} of the points dropped as no numbers, and counted")  # noqa: T201
        for name, (first, second) in growths.items():
            print(  # noqa: T201
                f"  {name}: {first.bytes / 1e6:.0f} -> {second.bytes / 1e6:.0f} MB, {first.threads:.0f} -> "
                f"{second.threads:.0f} threads, {first.files:.0f} -> {second.files:.0f} descriptors"
            )
        for name, (first, second) in growths.items():
            assert_flat(name, first, second)


@pytest.mark.timeout(300)
def test_steady_load_for_a_moment_is_exact_and_flat(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 4.0, spark=False)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(0)
def test_steady_load_is_exact_and_memory_threads_and_descriptors_are_flat(
    tmp_path: Path, seed: int, seconds: float
) -> None:
    run(tmp_path, seed, seconds, spark=True)
