"""Where batches wait other than in the durable queue, or do not wait at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    CircuitOpen,
    DiskFull,
    PermanentExportError,
    QueueFull,
    TransientExportError,
)
from penstock.export import (
    BreakerConfig,
    FailoverConfig,
    SendQueue,
)
from penstock.spool import FastQueue, FullBehavior, MemoryQueue
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.quick import DOWN, numbered, quick


class TestMemory:
    """The same over a queue that is in memory only."""

    def test_everything_arrives_and_close_empties_it(self) -> None:
        exporter = FailingExporter([DOWN, None, DOWN])
        sender = SendQueue(MemoryQueue(), exporter, quick()).start()
        for batch in numbered(50):
            sender.push(batch)
        sender.close()
        assert sorted(exporter.batches) == numbered(50)
        assert sender.stats().data_loss == 0

    def test_what_is_lost_at_the_end_is_counted(self) -> None:
        exporter = FailingExporter()
        exporter.fail_with(DOWN)
        sender = SendQueue(MemoryQueue(), exporter, quick()).start()
        sender.push(b"one")
        sender.close(timeout=0.1)
        assert sender.stats().data_loss == 1

    def test_drop_newest_refuses_and_block_waits(self) -> None:
        exporter = MemoryExporter()
        exporter.hold()
        refusing = SendQueue(MemoryQueue(max_size=2), exporter, quick(full_behavior="drop_newest"))
        refusing.push(b"1")
        refusing.push(b"2")
        with pytest.raises(QueueFull):
            refusing.push(b"3")
        assert refusing.stats().queue.dropped["newest"] == 1
        waiting = SendQueue(MemoryQueue(max_size=1), exporter, quick(full_behavior="block", block_timeout=0.01))
        waiting.push(b"1")
        with pytest.raises(QueueFull):
            waiting.push(b"2")
        assert waiting.stats().queue.dropped["timeout"] == 1

    def test_a_refused_batch_is_kept_with_its_reason(self) -> None:
        exporter = FailingExporter([PermanentExportError("400")])
        with SendQueue(MemoryQueue(), exporter, quick()) as sender:
            sender.push(b"bad")
            wait_until(lambda: not len(sender))
            assert sender.stats().queue.dead_lettered == 1


class TestFailover:
    """When the durable queue's own disk refuses."""

    @pytest.fixture
    def full(self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        push = queue.push
        state = {"full": True}

        def refuse(block: bytes, **options: Any) -> int:
            if state["full"]:
                raise DiskFull("no room on the disk")
            return push(block, **options)

        monkeypatch.setattr(queue, "push", refuse)

        def set_full(value: bool) -> None:
            state["full"] = value

        return set_full

    def test_batches_wait_in_memory_and_are_sent_from_there(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = FailingExporter([DOWN])
        with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=0.02, drain_batch=10))) as sender:
            for batch in numbered(25):
                sender.push(batch)
            assert sender.stats().failover_size > 0
            assert sender.stats().failover_bytes > 0
            wait_until(lambda: not len(sender))
        assert sorted(exporter.batches) == numbered(25)

    def test_its_oldest_go_when_there_is_no_room_and_that_is_data_loss(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = FailingExporter()
        exporter.fail_with(DOWN)
        config = quick(failover=FailoverConfig(max_size=3, drain_interval=60.0))
        sender = SendQueue(queue, exporter, config).start()
        for batch in numbered(5):
            sender.push(batch)
        assert sender.stats().failover_evicted == 2
        assert sender.stats().data_loss == 2
        full(False)
        sender.close()
        assert sender.stats().data_loss == 2
        left: list[bytes] = []
        while len(left) < 3:
            left += [lease.data for lease in queue.lease(10, timeout=5)]
        assert sorted(left) == numbered(5)[2:]

    def test_what_could_never_fit_it_is_refused_with_the_disks_error(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        sender = SendQueue(queue, MemoryExporter(), quick(failover=FailoverConfig(max_bytes=3)))
        with pytest.raises(DiskFull):
            sender.push(b"four")
        assert sender.stats().data_loss == 1

    def test_without_failover_the_disks_error_is_the_pushers(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        sender = SendQueue(queue, MemoryExporter(), quick(failover=FailoverConfig(enabled=False)))
        with pytest.raises(DiskFull):
            sender.push(b"one")

    def test_what_the_failover_holds_at_the_end_is_counted_as_lost(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = FailingExporter()
        exporter.fail_with(DOWN)
        sender = SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=60.0))).start()
        sender.push(b"one")
        sender.close(timeout=0.2)
        assert sender.stats().data_loss == 1


class TestDirect:
    """Without always-queue, and without a queue at all."""

    def test_try_direct_sends_on_the_callers_thread_and_queues_what_failed(self, queue: FastQueue) -> None:
        exporter = FailingExporter([None, DOWN])
        sender = SendQueue(queue, exporter, quick(always_queue=False))
        sender.push(b"direct")
        assert exporter.batches == [b"direct"]
        assert not len(sender)
        sender.push(b"queued")
        assert len(sender) == 1
        sender.start()
        wait_until(lambda: not len(sender))
        sender.close()
        assert exporter.batches == [b"direct", b"queued"]

    def test_without_a_queue_the_pusher_gets_the_error(self, queue: FastQueue) -> None:
        exporter = FailingExporter([None, DOWN, PermanentExportError("400")])
        config = quick(enabled=False, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=60.0))
        with SendQueue(queue, exporter, config) as sender:
            sender.push(b"one")
            with pytest.raises(TransientExportError, match="nobody listens"):
                sender.push(b"two")
            with pytest.raises(CircuitOpen):
                sender.push(b"three")
        assert len(queue) == 0


class TestLimits:
    """The adaptive limit of blocks."""

    @pytest.mark.parametrize(("behavior", "kept"), [("drop_oldest", 80), ("drop_newest", 80)])
    def test_the_limit_of_blocks_follows_their_size(self, tmp_path: Path, behavior: str, kept: int) -> None:
        full = FullBehavior(behavior)
        config = quick(type="disk", path=tmp_path / "queue", max_bytes=100_000, full_behavior=full,
                       target_utilization=0.8)  # fmt: skip
        sender = SendQueue.open(MemoryExporter(), config)
        refused = 0
        for _ in range(150):
            try:
                sender.push(bytes(1000))
            except QueueFull:
                refused += 1
        stats = sender.stats()
        assert stats.queue.size <= 100
        assert stats.queue.max_size == kept
        dropped = stats.dropped_oldest if full is FullBehavior.DROP_OLDEST else stats.dropped_newest
        assert dropped > 0
        assert (refused > 0) is (full is FullBehavior.DROP_NEWEST)
        sender.close()

    def test_without_it_max_size_holds(self, tmp_path: Path) -> None:
        config = quick(path=tmp_path / "queue", max_size=10, adaptive_enabled=False)
        sender = SendQueue.open(MemoryExporter(), config)
        for _ in range(150):
            sender.push(bytes(10))
        assert sender.stats().queue.size == 10
        sender.close()
