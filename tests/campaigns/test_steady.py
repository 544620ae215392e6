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


def assert_flat(name: str, looks: list[Look]) -> str:
    """The second half is as the first, after a quarter to warm up; says what was seen."""
    warm = looks[len(looks) // 4 :]
    first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    for column, more in zip(Look._fields, (MORE_BYTES, MORE_THREADS, MORE_FILES), strict=True):
        usual = statistics.median(getattr(look, column) for look in first)
        later = statistics.median(getattr(look, column) for look in second)
        assert later <= usual + more, f"{column} of {name} grew from {usual:.0f} to {later:.0f}"
    begin, end = first[0], second[-1]
    return (
        f"  {name}: {begin.bytes / 1e6:.0f} -> {end.bytes / 1e6:.0f} MB, "
        f"{begin.threads:.0f} -> {end.threads:.0f} threads, {begin.files:.0f} -> {end.files:.0f} descriptors"
    )


def counted(service: Running, name: str) -> int:
    lines = service.ask("/metrics")[1].splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")))


def run(folder: Path, seed: int, seconds: float, *, spark: bool) -> str:
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
        seen = [assert_flat(name, seen) for name, seen in sorted(looks.items()) if len(seen) >= 12]
        return "\n".join([campaign.report("steady"), f"  {dropped} of them dropped as no numbers, and counted", *seen])


@pytest.mark.timeout(300)
def test_steady_load_for_a_moment_is_exact_and_flat(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 4.0, spark=False)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(0)
def test_steady_load_is_exact_and_memory_threads_and_descriptors_are_flat(
    tmp_path: Path, seed: int, seconds: float
) -> None:
    print(run(tmp_path, seed, seconds, spark=True))  # noqa: T201 - the campaign's report
