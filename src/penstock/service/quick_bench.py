"""A quick look at what this machine does: some seconds, in a folder that is removed again, no server needed.

Not the figures of record: those come from `bench/` in a checkout, beside peers, on a machine that does nothing else.
"""

import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.spool import Durability, FastQueue, FastQueueConfig

BLOCK = 50 * 1024
POINTS = 1000  # of one request
SERIES = 10_000


@dataclass(frozen=True, slots=True)
class QuickBenchResult:
    """One measurement: how many of what in how long, and what it cost."""

    name: str
    count: int
    unit: str
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def cpu_per_million(self) -> float:
        return self.cpu_seconds / self.count * 1e6


def quick_bench_measurements(
    seconds: float, *, has_receivers: bool
) -> list[tuple[str, Callable[[], QuickBenchResult]]]:
    """What can be measured here, by name; each takes about so many seconds."""
    found: list[tuple[str, Callable[[], QuickBenchResult]]] = [
        (f"queue, {level.value}", lambda level=level: quick_bench_queue(level, seconds))  # type: ignore[misc]
        for level in Durability
    ]
    if has_receivers:
        found.append(("ingest, disk", lambda: quick_bench_ingest(seconds)))
    return found


def quick_bench_queue(durability: Durability, seconds: float) -> QuickBenchResult:
    """Blocks of 50 KiB pushed, leased and acked, by one thread."""
    block = bytes(range(256)) * (BLOCK // 256)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        queue = FastQueue(folder, FastQueueConfig(durability=durability))

        def work() -> int:
            queue.push(block)
            queue.ack(queue.lease())
            return 1

        result = _measure(f"queue, {durability.value}", "blocks", seconds, work)
        queue.close()
    return result


def quick_bench_ingest(seconds: float) -> QuickBenchResult:
    """OTLP requests of 1 000 points, 10 000 series, from the request to the durable queue."""
    from penstock.aggregate.config import L1Config
    from penstock.aggregate.l1 import L1
    from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format
    from penstock.receive.bodies import Encoding
    from penstock.receive.intake import Intake
    from penstock.receive.request_group import ReceivedRequest

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        queue = FastQueue(Path(folder), FastQueueConfig(durability=Durability.DISK))
        l1 = L1.with_own_queue("bench", queue.push_many, L1Config(durability=Durability.DISK))
        intake = Intake(l1)
        intake.start()
        bodies = list(_requests())
        answered = threading.Semaphore(0)
        bad: list[DecodeAnswer] = []

        def deliver(answers: list[tuple[object, DecodeAnswer]]) -> None:
            bad.extend(answer for _, answer in answers if answer.status is not DecodeStatus.TAKEN)
            answered.release(len(answers))

        def work() -> int:
            for body in bodies:
                intake.submit(ReceivedRequest(Format.OTLP, body, Encoding.IDENTITY, 2**26, None, deliver))
            for _ in bodies:
                answered.acquire()
            queue.ack(queue.lease(1000))
            return POINTS * len(bodies)

        result = _measure("ingest, disk", "points", seconds, work)
        intake.close()
        l1.close()
        queue.close()
    if bad:
        raise RuntimeError(f"{len(bad)} requests were refused: {bad[0].message}")
    return result


def _requests() -> Iterator[bytes]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    now = time.time_ns()
    for number in range(SERIES // POINTS):
        request = ExportMetricsServiceRequest()
        scope = request.resource_metrics.add().scope_metrics.add()
        for which in range(20):
            metric = scope.metrics.add(name=f"bench.metric.{which}")
            for place in range(POINTS // 20):
                point = metric.gauge.data_points.add(as_double=float(place), time_unix_nano=now)
                point.attributes.add(key="host").value.string_value = f"host-{number}"
                point.attributes.add(key="path").value.string_value = f"/path/{place}"
        yield bytes(request.SerializeToString())


def _measure(name: str, unit: str, seconds: float, work: Callable[[], int]) -> QuickBenchResult:
    work()  # what is made once is not part of it
    cpu, began, count = _cpu(), time.monotonic(), 0
    spent = 0.0
    while spent < seconds:  # at least once, however late a busy machine lets us look
        count += work()
        spent = time.monotonic() - began
    return QuickBenchResult(name, count, unit, spent, _cpu() - cpu)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
