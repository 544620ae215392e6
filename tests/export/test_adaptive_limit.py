"""The limit of blocks follows their size."""

from pathlib import Path

import pytest

from penstock.errors import QueueFull
from penstock.export import (
    SendQueue,
)
from penstock.export.adaptive_limit import AdaptiveLimit
from penstock.spool import FastQueue, FastQueueConfig, FullBehavior
from penstock.testing import MemoryExporter
from tests.export.quick import numbered, push_all, quick


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize(
    ("behavior", "reason"), [("drop_oldest", "oldest"), ("drop_newest", "newest"), ("block", "timeout")]
)
def test_the_limit_of_blocks_follows_their_size(tmp_path: Path, kind: str, behavior: str, reason: str) -> None:
    config = quick(type=kind, path=tmp_path / "queue", max_bytes=100_000, full_behavior=behavior,
                   target_utilization=0.8, block_timeout=0.0)  # fmt: skip
    sender = SendQueue.open(MemoryExporter(), config)
    refused = 0
    for _ in range(250):
        try:
            sender.push(bytes(1000))
        except QueueFull:
            refused += 1
    stats = sender.stats()
    assert stats.queue.max_size == 80
    assert stats.queue.size == (80 if behavior == "drop_oldest" else 99)  # what came before the first mean
    assert stats.queue.dropped[reason] == 250 - stats.queue.size
    assert refused == (0 if behavior == "drop_oldest" else 151)
    sender.close(timeout=0.0)


def test_freshest_first_still_drops_the_oldest(tmp_path: Path) -> None:
    exporter = MemoryExporter()
    config = quick(path=tmp_path / "queue", max_bytes=100_000, target_utilization=0.5, order="freshest", workers=1)
    with SendQueue.open(exporter, config) as sender:
        exporter.hold()
        for number in range(200):
            sender.push(b"%04d" % number + bytes(996))
        exporter.release()
        assert sender.flush()
    assert {int(batch[:4]) for batch in exporter.batches} >= set(range(151, 200))
    assert len(exporter.batches) <= 52


def test_the_limit_looks_back_on_the_last_blocks_and_not_on_all() -> None:
    limit = AdaptiveLimit(max_bytes=1_000_000, target=1.0)
    for _ in range(100_000):
        limit.record(10)
    found = [limit.record(1000) for _ in range(20_000)]
    assert 1000 <= (found[-1] or 0) <= 1500


def test_a_queue_of_yours_keeps_its_own_limits(tmp_path: Path) -> None:
    own = FastQueueConfig(max_size=20_000, full_behavior=FullBehavior.DROP_NEWEST)
    with FastQueue(tmp_path / "queue", own) as queue:
        sender = SendQueue(queue, MemoryExporter(), quick(max_size=10))
        push_all(sender, numbered(200))
        assert len(queue) == 200
        assert queue.stats().max_size == 20_000


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_max_size_that_is_set_holds(tmp_path: Path, kind: str, is_adaptive: bool) -> None:
    config = quick(type=kind, path=tmp_path / "queue", max_size=10, adaptive_enabled=is_adaptive)
    sender = SendQueue.open(MemoryExporter(), config)
    for _ in range(150):
        sender.push(bytes(10))
    assert sender.stats().queue.size == 10
    sender.close()
