"""Every metric that a user of the system we follow knows is here under its name, and moves."""

import errno
import os
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ErrorClass, PermanentExportError, QueueFull, TransientExportError
from penstock.export import BreakerConfig, FailoverConfig, PartialSuccess, PipelineSplitConfig, Prepared, SendQueue
from penstock.spool import FastQueue, FastQueueConfig, FullBehavior
from penstock.spool.files import OsSpoolFiles
from penstock.telemetry import DECLARATIONS, Telemetry
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.quick import DOWN, numbered, push_all, quick

SEED_METRICS = [
    "queue_size",
    "queue_bytes",
    "queue_max_size",
    "queue_max_bytes",
    "queue_utilization_ratio",
    "queue_disk_available_bytes",
    "queue_push_total",
    "queue_dropped_total",
    "queue_retry_total",
    "queue_retry_success_total",
    "queue_retry_failure_total",
    "queue_disk_full_total",
    "fastqueue_inmemory_blocks",
    "fastqueue_disk_bytes",
    "fastqueue_meta_sync_total",
    "fastqueue_chunk_rotations",
    "fastqueue_inmemory_flushes",
    "queue_workers_active",
    "queue_workers_total",
    "queue_preparers_active",
    "queue_senders_active",
    "queue_sends_inflight",
    "queue_export_latency_ewma_seconds",
    "circuit_breaker_state",
    "circuit_breaker_open_total",
    "circuit_breaker_rejected_total",
    "queue_backoff_seconds",
    "export_data_loss_total",
]
OWN_METRICS = ["export_batches_total", "export_bytes_total", "export_splits_total", "export_partial_rejected_total",
               "failover_size", "failover_bytes", "failover_evicted_total", "queue_dead_letter_total", "queue_leased",
               "queue_ack_total", "queue_redelivered_total"]  # fmt: skip
pytestmark = pytest.mark.xdist_group("export metrics")  # what is seen takes two seconds: once, in one process
CONFIGURED = {"penstock_queue_max_size", "penstock_queue_max_bytes", "penstock_queue_disk_available_bytes"}


class Seen:
    """Every value that each series has had, over any number of send queues."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], set[float]] = defaultdict(set)

    def look(self, sender: SendQueue) -> bool:
        for sample in sender.samples():
            self.values[sample.name, sample.labels].add(float(sample.value))
        return True

    def moved(self, name: str, *labels: str) -> bool:
        found = [values for key, values in self.values.items() if key[0] == name and key[1][: len(labels)] == labels]
        return any(max(values) > 0 and (len(values) > 1 or name in CONFIGURED) for values in found)


class FailingDisk(OsSpoolFiles):
    """A disk that takes nothing while it has an error."""

    def __init__(self) -> None:
        self.error = 0

    def pwritev(self, handle: int, buffers: Any, offset: int, /) -> int:  # type: ignore[override]
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().pwritev(handle, buffers, offset)


def an_outage(folder: Path, seen: Seen) -> None:
    exporter = FailingExporter()
    config = quick(path=folder, workers=2, circuit_breaker=BreakerConfig(threshold=2, reset_timeout=0.1))
    sender = SendQueue.open(exporter, config)
    seen.look(sender)
    sender.start()
    exporter.fail_with(DOWN)
    push_all(sender, numbered(5))
    wait_until(lambda: seen.look(sender) and sender.stats().circuit_rejected > 0)
    wait_until(lambda: seen.look(sender) and seen.moved("penstock_queue_retry_failure_total", "network"))
    wait_until(lambda: not exporter.at_once)
    exporter.hold()
    wait_until(lambda: seen.look(sender) and exporter.at_once == 1)
    exporter.recover()
    exporter.release()
    wait_until(lambda: seen.look(sender) and not len(sender))
    sender.close()


def a_split_pipeline(folder: Path, seen: Seen) -> None:
    preparing = threading.Event()

    class Slow(MemoryExporter):
        def prepare(self, batch: bytes) -> Prepared:
            preparing.wait(10)
            return super().prepare(batch)

    exporter = Slow()
    exporter.hold()
    split = PipelineSplitConfig(enabled=True, preparer_count=1, sender_count=1)
    with SendQueue.open(exporter, quick(path=folder, pipeline_split=split)) as sender:
        seen.look(sender)
        sender.push(b"one")
        wait_until(lambda: seen.look(sender) and seen.moved("penstock_queue_preparers_active"))
        preparing.set()
        wait_until(lambda: seen.look(sender) and seen.moved("penstock_queue_senders_active"))
        exporter.release()
        wait_until(lambda: seen.look(sender) and not len(sender))


def a_full_queue(folder: Path, seen: Seen) -> None:
    for behavior in FullBehavior:
        config = quick(
            path=folder / behavior.value, max_size=4, inmemory_blocks=2, chunk_size=64, full_behavior=behavior,
            adaptive_enabled=False, block_timeout=0.01, meta_sync_interval=0.01,
        )  # fmt: skip
        sender = SendQueue.open(MemoryExporter(), config)
        seen.look(sender)
        for batch in numbered(8):
            try:
                sender.push(batch)
            except QueueFull:
                pass
            seen.look(sender)
        wait_until(lambda sender=sender: seen.look(sender) and sender.stats().queue.meta_syncs > 1)  # type: ignore[misc]
        sender.close()


def a_full_disk(folder: Path, seen: Seen) -> None:
    files = FailingDisk()
    queue = FastQueue(folder, FastQueueConfig(inmemory_blocks=1), files=files)
    config = quick(failover=FailoverConfig(max_size=2, drain_interval=60.0))
    sender = SendQueue(queue, MemoryExporter(), config, owns_queue=True)
    seen.look(sender)
    for files.error in (errno.ENOSPC, errno.EIO):
        for batch in numbered(6):
            sender.push(batch)
            seen.look(sender)
    files.error = 0
    sender.close()
    seen.look(sender)


def answers_of_all_kinds(folder: Path, seen: Seen) -> None:
    class Partial(FailingExporter):
        def take(self, prepared: Prepared) -> PartialSuccess | None:
            super().take(prepared)
            return PartialSuccess(2, "too old")

    kinds = [TransientExportError(kind.value, kind) for kind in ErrorClass for _ in range(6)]
    exporter = Partial([*kinds, PermanentExportError("400")], max_bytes=50)
    config = quick(path=folder, workers=1, circuit_breaker=BreakerConfig(enabled=False), retry_interval=0.001)
    sender = SendQueue.open(exporter, config)
    seen.look(sender)
    sender.start()
    push_all(sender, [*numbered(3), bytes(80)])
    wait_until(lambda: seen.look(sender) and not len(sender))
    sender.close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("metrics")
    found = Seen()
    for scenario in (an_outage, a_split_pipeline, a_full_queue, a_full_disk, answers_of_all_kinds):
        scenario(folder / scenario.__name__, found)
    return found


@pytest.mark.parametrize("name", [*SEED_METRICS, *OWN_METRICS])
def test_every_metric_exists_and_moves(seen: Seen, name: str) -> None:
    assert f"penstock_{name}" in DECLARATIONS
    assert seen.moved(f"penstock_{name}"), seen.values


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *[("circuit_breaker_state", state) for state in ("closed", "open", "half_open")],
        *[("queue_dropped_total", reason) for reason in ("oldest", "newest", "timeout", "disk_full", "disk_failed")],
        *[("queue_retry_failure_total", kind.value) for kind in ErrorClass],
        *[("export_errors_total", kind.value) for kind in ErrorClass],
    ],
)
def test_every_label_of_a_metric_moves(seen: Seen, name: str, label: str) -> None:
    assert seen.moved(f"penstock_{name}", label)


def test_everything_renders_for_prometheus(tmp_path: Path) -> None:
    telemetry = Telemetry()
    with SendQueue.open(MemoryExporter(), quick(path=tmp_path / "queue")) as sender:
        telemetry.watch(sender.samples, queue="relay")
        text = telemetry.render().decode()
    for name in SEED_METRICS:
        assert re.search(rf"^penstock_{name}\{{", text, re.MULTILINE), name
