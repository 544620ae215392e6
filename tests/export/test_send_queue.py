"""The send queue: always-queue, in place, once acknowledged, never lost."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    CircuitOpen,
    ConfigError,
    DiskFull,
    ErrorClass,
    PermanentExportError,
    QueueClosed,
    QueueFull,
    TransientExportError,
)
from penstock.export import (
    AdaptiveWorkersConfig,
    BackoffConfig,
    BreakerConfig,
    CircuitState,
    FailoverConfig,
    PipelineSplitConfig,
    SendQueue,
    SendQueueConfig,
)
from penstock.spool import FastQueue, FastQueueConfig, FullBehavior, Lease, MemoryQueue
from penstock.spool.dead_letters import unpack
from penstock.testing import FailingExporter, MemoryExporter, wait_until

DOWN = ConnectionRefusedError("nobody listens")
SPLIT = PipelineSplitConfig(enabled=True, preparer_count=1, sender_count=1)


def quick(**settings: Any) -> SendQueueConfig:
    """Delays short enough to wait for, in the order of their real ones."""
    defaults: dict[str, Any] = {
        "retry_interval": 0.01,
        "max_retry_delay": 0.04,
        "circuit_breaker": BreakerConfig(reset_timeout=0.05),
        "failover": FailoverConfig(drain_interval=0.02),
        "workers": 2,
    }
    return SendQueueConfig(**{**defaults, **settings})


def numbered(count: int) -> list[bytes]:
    return [b"batch %06d" % number for number in range(count)]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FastQueue]:
    with FastQueue(tmp_path / "queue") as opened:
        yield opened


def dead_letters(path: Path) -> list[tuple[bytes, str]]:
    with FastQueue(path / "queue" / "dead-letters") as letters:
        found = [unpack(lease.data) for lease in letters.lease(1000)]
    return [(letter.data, letter.reason) for letter in found]


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_everything_pushed_arrives_once_and_is_acknowledged(queue: FastQueue, split: PipelineSplitConfig) -> None:
    exporter = MemoryExporter()
    with SendQueue(queue, exporter, quick(pipeline_split=split)) as sender:
        for batch in numbered(500):
            sender.push(batch)
        wait_until(lambda: not len(sender))
        assert sender.stats().exported_batches == 500
    assert sorted(exporter.batches) == numbered(500)


@pytest.mark.parametrize("split", [PipelineSplitConfig(), PipelineSplitConfig(enabled=True)])
def test_an_exporter_that_wants_order_gets_it_also_through_failures(
    queue: FastQueue, split: PipelineSplitConfig
) -> None:
    exporter = FailingExporter([None, DOWN, DOWN, None, DOWN, None, TimeoutError(), DOWN], in_order=True)
    for batch in numbered(50):
        queue.push(batch)
    with SendQueue(queue, exporter, quick(workers=0, pipeline_split=split)) as sender:
        wait_until(lambda: not len(sender))
        assert sender.stats().workers_total == 1
    assert exporter.batches == numbered(50)


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_a_batch_that_failed_goes_to_its_place_and_not_to_the_tail(
    queue: FastQueue, split: PipelineSplitConfig
) -> None:
    exporter = FailingExporter([DOWN])
    for batch in numbered(2000):
        queue.push(batch)
    config = quick(workers=1, pipeline_split=split, max_concurrent_sends=1, retry_interval=0.001)
    with SendQueue(queue, exporter, config) as sender:
        wait_until(lambda: not len(sender))
    failed = exporter.attempts[0]
    assert exporter.batches.index(failed) < 1000
    assert [batch for batch in exporter.batches if batch != failed] == numbered(2000)[1:]


def test_while_the_destination_is_down_the_oldest_batch_is_the_one_that_is_tried(queue: FastQueue) -> None:
    exporter = FailingExporter()
    exporter.fail_with(DOWN)
    for batch in numbered(10):
        queue.push(batch)
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        wait_until(lambda: sender.stats().circuit_opened >= 3)
        probes = exporter.attempts[-1]
        exporter.recover()
        wait_until(lambda: not len(sender))
    assert probes == numbered(1)[0]
    assert exporter.batches == numbered(10)


def test_an_open_circuit_is_asked_before_a_batch_is_leased(queue: FastQueue) -> None:
    exporter = FailingExporter()
    exporter.fail_with(DOWN)
    config = quick(circuit_breaker=BreakerConfig(threshold=1, reset_timeout=60.0))
    with SendQueue(queue, exporter, config) as sender:
        sender.push(b"first")
        wait_until(lambda: sender.stats().circuit is CircuitState.OPEN)
        for batch in numbered(20):
            sender.push(batch)
        wait_until(lambda: sender.stats().circuit_rejected >= 2)
        stats = sender.stats()
    assert stats.queue.leased <= 1  # one worker may have waited for a batch when the circuit opened
    assert len(exporter.attempts) <= 2
    assert 0 < stats.backoff <= 60.0


def test_after_its_rest_exactly_one_probe_goes_out(queue: FastQueue) -> None:
    exporter = FailingExporter()
    exporter.fail_with(DOWN)
    config = quick(workers=8, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=0.05))
    with SendQueue(queue, exporter, config) as sender:
        for batch in numbered(50):
            sender.push(batch)
        wait_until(lambda: sender.stats().circuit is CircuitState.OPEN)
        wait_until(lambda: not exporter.at_once)
        exporter.hold()
        exporter.most_at_once = 0
        wait_until(lambda: exporter.at_once)
        assert sender.stats().circuit is CircuitState.HALF_OPEN
        assert exporter.at_once == 1
        exporter.recover()
        exporter.release()
        wait_until(lambda: not len(sender))
        assert sender.stats().circuit is CircuitState.CLOSED
    assert exporter.most_at_once <= 8


def test_a_probe_on_a_batch_that_cannot_be_prepared_gives_its_place_back(queue: FastQueue, tmp_path: Path) -> None:
    class Picky(FailingExporter):
        def prepare(self, batch: bytes) -> Any:
            if batch == b"undecodable":
                raise ValueError("cannot be decoded")
            return super().prepare(batch)

    exporter = Picky([DOWN])
    config = quick(workers=1, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=0.05))
    queue.push(b"first")
    queue.push(b"undecodable")
    with SendQueue(queue, exporter, config) as sender:
        wait_until(lambda: not len(sender))
        assert sender.stats().circuit is CircuitState.CLOSED
    queue.close()
    assert exporter.batches == [b"first"]
    assert [letter[0] for letter in dead_letters(tmp_path)] == [b"undecodable"]


def test_bad_data_is_a_dead_letter_and_does_not_open_the_circuit(queue: FastQueue, tmp_path: Path) -> None:
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400 Bad Request: no such field")))
    with SendQueue(queue, exporter, quick(circuit_breaker=BreakerConfig(threshold=1))) as sender:
        for number in range(20):
            sender.push(b"bad %d" % number)
        sender.push(b"good")
        wait_until(lambda: not len(sender))
        stats = sender.stats()
    queue.close()
    assert stats.circuit_opened == 0
    assert stats.errors["client_error"] == 20
    assert stats.queue.dead_lettered == 20
    assert exporter.batches == [b"good"]
    letters = dead_letters(tmp_path)
    assert len(letters) == 20
    assert {reason for _, reason in letters} == {"400 Bad Request: no such field"}


def test_a_batch_that_always_meets_a_server_error_does_not_hold_up_the_others(queue: FastQueue) -> None:
    exporter = FailingExporter(poison=(b"bad", TransientExportError("500", ErrorClass.SERVER_ERROR)))
    config = quick(workers=1, max_retry_delay=30.0, circuit_breaker=BreakerConfig(threshold=2, reset_timeout=0.01))
    queue.push(b"bad")
    for batch in numbered(50):
        queue.push(batch)
    with SendQueue(queue, exporter, config) as sender:
        wait_until(lambda: len(sender) == 1)
    assert sorted(exporter.batches) == numbered(50)
    assert len(queue) == 1


def test_retry_after_holds_everything_back_and_does_not_count_as_a_failure(queue: FastQueue) -> None:
    busy = TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=0.2)
    exporter = FailingExporter([busy])
    config = quick(workers=1, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=60.0))
    with SendQueue(queue, exporter, config) as sender:
        sender.push(b"one")
        wait_until(lambda: sender.stats().backoff > 0)
        for batch in numbered(5):
            sender.push(batch)
        assert exporter.batches == []
        wait_until(lambda: not len(sender))
        assert sender.stats().circuit_opened == 0
    assert exporter.batches == [b"one", *numbered(5)]


def test_what_is_too_large_is_sent_in_halves(queue: FastQueue) -> None:
    exporter = MemoryExporter(max_bytes=3)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"0123456789")
        wait_until(lambda: not len(sender))
        assert sender.stats().splits == 3
        assert sender.stats().exported_batches == 1
    assert b"".join(exporter.batches) == b"0123456789"


def test_parts_that_were_taken_are_not_sent_again_when_a_later_one_fails(queue: FastQueue) -> None:
    exporter = FailingExporter([None, None, DOWN, DOWN], max_bytes=5)
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        sender.push(b"0123456789")
        wait_until(lambda: not len(sender))
    assert exporter.batches == [b"01234", b"56789"]
    assert exporter.attempts.count(b"01234") == 1


def test_a_refused_part_alone_is_the_dead_letter(queue: FastQueue, tmp_path: Path) -> None:
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")), max_bytes=8)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"good....bad.....")
        wait_until(lambda: not len(sender))
    queue.close()
    assert exporter.batches == [b"good...."]
    assert dead_letters(tmp_path) == [(b"bad.....", "400")]


def test_what_is_too_large_and_cannot_be_split_is_a_dead_letter(queue: FastQueue, tmp_path: Path) -> None:
    exporter = MemoryExporter(max_bytes=0)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"ab")
        wait_until(lambda: not len(sender))
    queue.close()
    assert exporter.batches == []
    assert [letter[0] for letter in dead_letters(tmp_path)] == [b"ab"]


def test_after_max_attempts_a_batch_is_a_dead_letter(tmp_path: Path) -> None:
    exporter = FailingExporter(poison=(b"bad", TransientExportError("500", ErrorClass.SERVER_ERROR)))
    with (
        FastQueue(tmp_path / "queue", FastQueueConfig(max_attempts=3)) as queue,
        SendQueue(queue, exporter, quick()) as sender,
    ):
        sender.push(b"bad")
        wait_until(lambda: not len(sender))
    assert exporter.attempts == [b"bad"] * 3
    assert dead_letters(tmp_path) == [(b"bad", "too many attempts")]


def test_push_is_not_slower_because_the_destination_hangs(queue: FastQueue) -> None:
    exporter = MemoryExporter()
    exporter.hold()
    with SendQueue(queue, exporter, quick()) as sender:
        for batch in numbered(1000):
            sender.push(batch)
        assert len(sender) == 1000
        exporter.release()
        wait_until(lambda: not len(sender))


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_close_finishes_what_is_under_way_and_leaves_the_rest_durable(
    tmp_path: Path, split: PipelineSplitConfig
) -> None:
    exporter = MemoryExporter()
    exporter.hold()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(pipeline_split=split, max_concurrent_sends=1)).start()
        for batch in numbered(100):
            sender.push(batch)
        wait_until(lambda: exporter.at_once)
        closing = threading.Thread(target=sender.close)
        closing.start()
        wait_until(lambda: sender.is_closing)
        with pytest.raises(QueueClosed):
            sender.push(b"late")
        exporter.release()
        closing.join()
    with FastQueue(tmp_path / "queue") as queue:
        left = [lease.data for lease in queue.lease(1000)]
    assert sorted(exporter.batches + left) == numbered(100)
    assert left == sorted(left)


def test_a_send_that_hangs_does_not_keep_close_beyond_its_deadline(tmp_path: Path) -> None:
    class Deaf(MemoryExporter):
        def close(self) -> None:
            """Does not cut anything off."""

    exporter = Deaf()
    exporter.hold()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(workers=1)).start()
        sender.push(b"one")
        wait_until(lambda: exporter.at_once)
        late = sender.close(timeout=0.1)
        assert late == ["penstock-worker-0"]
        assert len(queue) == 1
        exporter.release()


def test_close_cuts_a_hanging_send_off_and_its_batch_stays(tmp_path: Path) -> None:
    exporter = MemoryExporter()
    exporter.hold()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(workers=1)).start()
        sender.push(b"one")
        wait_until(lambda: exporter.at_once)
        assert sender.close(timeout=0.6) == []
        assert len(queue) == 1


def test_a_worker_that_meets_the_unforeseen_goes_on(queue: FastQueue) -> None:
    class Surprising(FailingExporter):
        def split(self, batch: bytes) -> Any:
            raise RuntimeError("split failed")

    exporter = Surprising(max_bytes=4)
    with SendQueue(queue, exporter, quick(workers=2)) as sender:
        sender.push(b"too large")
        sender.push(b"fine")
        wait_until(lambda: exporter.batches == [b"fine"])


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


class TestWorkers:
    """How many, and how many at once."""

    def test_as_many_as_configured_send_at_once(self, queue: FastQueue) -> None:
        exporter = MemoryExporter()
        exporter.hold()
        with SendQueue(queue, exporter, quick(workers=3)) as sender:
            for batch in numbered(10):
                sender.push(batch)
            wait_until(lambda: exporter.at_once == 3)
            stats = sender.stats()
            assert (stats.workers_active, stats.workers_total, stats.sends_inflight) == (3, 3, 3)
            exporter.release()
            wait_until(lambda: not len(sender))
        assert exporter.most_at_once == 3

    def test_the_global_limit_holds_for_all_of_them(self, queue: FastQueue) -> None:
        exporter = MemoryExporter()
        exporter.hold()
        with SendQueue(queue, exporter, quick(workers=4, global_send_limit=2)) as sender:
            for batch in numbered(10):
                sender.push(batch)
            wait_until(lambda: sender.stats().workers_active == 4)
            assert exporter.at_once == 2
            exporter.release()
            wait_until(lambda: not len(sender))
        assert exporter.most_at_once == 2

    def test_a_sender_of_the_split_has_several_sends_under_way(self, queue: FastQueue) -> None:
        exporter = MemoryExporter()
        exporter.hold()
        split = PipelineSplitConfig(enabled=True, preparer_count=2, sender_count=2, channel_size=3)
        with SendQueue(queue, exporter, quick(pipeline_split=split, max_concurrent_sends=2)) as sender:
            for batch in numbered(30):
                sender.push(batch)
            wait_until(lambda: exporter.at_once == 4)
            wait_until(lambda: sender.stats().queue.leased >= 7)
            stats = sender.stats()
            assert (stats.senders_active, stats.workers_total, stats.workers_active) == (2, 2, 0)
            # 4 under way, 3 in the channel, at most one more in the hands of each preparer
            assert stats.queue.leased <= 9
            exporter.release()
            wait_until(lambda: not len(sender))

    @pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
    def test_adaptive_workers_come_when_the_queue_is_deep(
        self, queue: FastQueue, split: PipelineSplitConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.send_queue.INTERVAL", 0.01)
        exporter = MemoryExporter()
        exporter.hold()
        adaptive = AdaptiveWorkersConfig(enabled=True, min_workers=1, max_workers=3)
        config = quick(adaptive_workers=adaptive, pipeline_split=split, max_concurrent_sends=1)
        with SendQueue(queue, exporter, config) as sender:
            for batch in numbered(100):
                sender.push(batch)
            wait_until(lambda: exporter.at_once == 3)
            assert sender.stats().workers_total == 3
            exporter.release()
            wait_until(lambda: not len(sender))
            assert sender.stats().latency_ewma > 0

    def test_adaptive_workers_go_when_there_is_nothing_to_do(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.send_queue.INTERVAL", 0.01)
        monkeypatch.setattr("penstock.export.scaler.IDLE_AFTER", 0.05)
        exporter = MemoryExporter()
        exporter.hold()
        adaptive = AdaptiveWorkersConfig(enabled=True, min_workers=1, max_workers=4)
        with SendQueue(queue, exporter, quick(adaptive_workers=adaptive)) as sender:
            for batch in numbered(100):
                sender.push(batch)
            wait_until(lambda: sender.stats().workers_total == 4)
            exporter.release()
            wait_until(lambda: sender.stats().workers_total == 1)


class TestGroups:
    """Exporters that take many blocks as one."""

    class Grouping:
        max_blocks = 8

        def __init__(self, errors: list[Exception | None]) -> None:
            self.errors = errors
            self.groups: list[list[bytes]] = []

        def send_group(self, leases: Any) -> list[tuple[Lease, str]]:
            error = self.errors.pop(0) if self.errors else None
            if error is not None:
                raise error
            self.groups.append([lease.data for lease in leases if lease.data != b"bad"])
            return [(lease, "cannot be read") for lease in leases if lease.data == b"bad"]

        def close(self) -> None: ...

    def test_groups_stay_in_order_through_failures_and_bad_blocks_are_dead_letters(
        self, queue: FastQueue, tmp_path: Path
    ) -> None:
        exporter = self.Grouping([None, OSError(28, "No space left"), OSError(28, "No space left")])
        for batch in [*numbered(10), b"bad", *numbered(20)[10:]]:
            queue.push(batch)
        with SendQueue(queue, exporter, quick()) as sender:
            wait_until(lambda: not len(sender))
            assert sender.stats().workers_total == 1
        queue.close()
        assert [block for group in exporter.groups for block in group] == numbered(20)
        assert dead_letters(tmp_path) == [(b"bad", "cannot be read")]

    def test_a_group_that_still_fails_at_the_end_stays_in_the_queue(self, queue: FastQueue) -> None:
        exporter = self.Grouping([OSError(28, "No space left")] * 1000)
        for batch in numbered(10):
            queue.push(batch)
        with SendQueue(queue, exporter, quick()) as sender:
            wait_until(lambda: sender.stats().errors["unknown"] >= 2)
        assert [lease.data for lease in queue.lease(100)] == numbered(10)

    def test_freshest_first_is_refused(self, tmp_path: Path) -> None:
        with (
            FastQueue(tmp_path / "fresh", FastQueueConfig(order="freshest")) as queue,
            pytest.raises(ConfigError, match="must be 'fifo'"),
        ):
            SendQueue(queue, self.Grouping([]), quick())


def test_backoff_without_jitter_is_what_the_configuration_says(queue: FastQueue) -> None:
    exporter = FailingExporter([DOWN, DOWN])
    config = quick(
        workers=1,
        retry_interval=20.0,
        max_retry_delay=40.0,
        backoff=BackoffConfig(jitter=0.0),
        circuit_breaker=BreakerConfig(enabled=False),
    )
    sender = SendQueue(queue, exporter, config).start()
    sender.push(b"one")
    sender.push(b"two")
    wait_until(lambda: len(exporter.attempts) == 2)
    wait_until(lambda: sender.stats().backoff > 0)
    assert 39.0 < sender.stats().backoff <= 40.0
    sender.close()
