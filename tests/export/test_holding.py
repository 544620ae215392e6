"""Where batches wait other than in the durable queue, or do not wait at all."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    CircuitOpen,
    ConfigError,
    DiskFailed,
    DiskFull,
    ErrorClass,
    PermanentExportError,
    QueueClosed,
    QueueFull,
    TransientExportError,
)
from penstock.export import (
    BreakerConfig,
    CircuitState,
    FailoverConfig,
    PartialSuccess,
    PipelineSplitConfig,
    Prepared,
    SendQueue,
)
from penstock.export import (
    send_workers as workers,
)
from penstock.export.adaptive_limit import AdaptiveLimit
from penstock.export.leased_memory import LeasedMemory
from penstock.spool import DeadLetter, FastQueue, FastQueueConfig, FullBehavior, MemoryQueue
from penstock.testing import FailingExporter, FakeClock, MemoryExporter, wait_until
from tests.export.quick import DOWN, SPLIT, begun, dead_letters, numbered, quick


def _letter(data: bytes, reason: str) -> DeadLetter:
    return DeadLetter(sequence=0, attempts=1, enqueued_at=0.0, died_at=0.0, reason=reason, data=data)


class TestMemory:
    """The same over a queue that is in memory only."""

    def test_who_finds_it_full_waits_for_room_where_that_is_asked_for(self) -> None:
        memory = LeasedMemory(MemoryQueue(max_size=1), FullBehavior.BLOCK, 30.0)
        memory.push(b"one")
        (lease,) = memory.lease()
        waiting = threading.Thread(target=memory.push, args=(b"two",))
        waiting.start()
        wait_until(lambda: memory._not_full._waiters)  # type: ignore[attr-defined]
        memory.ack(lease)
        waiting.join(30)
        assert [lease.data for lease in memory.lease()] == [b"two"]
        assert memory.stats().dropped["timeout"] == 0

    def test_everything_arrives_and_close_empties_it(self) -> None:
        exporter = FailingExporter([DOWN, None, DOWN])
        sender = SendQueue(MemoryQueue(), exporter, quick()).start()
        for batch in numbered(50):
            sender.push(batch)
        sender.close()
        assert sorted(exporter.batches) == numbered(50)
        stats = sender.stats()
        assert stats.data_loss == 0
        assert stats.queue.acked == 50
        assert stats.queue.redelivered >= 2

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
            assert sender.flush()
            assert sender.stats().queue.dead_lettered == 1
            assert sender.replay_dead_letters("500") == 0
            assert sender.replay_dead_letters("400") == 1
            assert sender.flush()
        assert exporter.batches == [b"bad"]

    def test_dead_letters_beyond_the_latest_thousand_are_counted_as_dropped(self) -> None:
        memory = LeasedMemory(MemoryQueue())
        for number in range(1003):
            memory.bury(b"%d" % number, "400")
        assert (memory.stats().dead_lettered, memory.stats().dead_letters_dropped) == (1003, 3)
        assert memory.dead_letters[0].data == b"3"

    def test_what_is_on_lease_counts_toward_the_limits_and_the_oldest_goes(self) -> None:
        memory = LeasedMemory(MemoryQueue(max_size=3, max_bytes=100))
        for batch in (b"1", b"2", b"3"):
            memory.push(batch)
        first, second = memory.lease(2)
        assert memory.push(b"4") == 1  # 3 goes: the oldest that nobody has
        memory.nack(first, 60.0)
        assert memory.push(b"5") == 1  # now 1 is
        memory.nack(second)
        assert [lease.data for lease in memory.lease(10)] == [b"2", b"4", b"5"]
        assert memory.push(b"6") == 1  # all are on lease: 2 will not come again
        memory.nack(second)
        assert (len(memory), memory.size_bytes, memory.evicted) == (3, 3, 3)
        assert [lease.data for lease in memory.lease(10)] == [b"6"]

    def test_its_bytes_on_lease_are_bounded_too(self) -> None:
        memory = LeasedMemory(MemoryQueue(max_size=100, max_bytes=100))
        memory.push(bytes(60))
        memory.lease()
        memory.push(bytes(40))
        assert memory.size_bytes == 100
        memory.push(bytes(40))
        assert memory.size_bytes == 100

    def test_a_dead_letter_that_finds_no_room_stays_one(self) -> None:
        memory = LeasedMemory(MemoryQueue(max_size=2), FullBehavior.DROP_NEWEST)
        for reason in ("first", "second", "third"):
            memory.bury(reason.encode(), reason)
        with pytest.raises(QueueFull):
            memory.replay_dead_letters()
        assert [lease.data for lease in memory.lease(9)] == [b"first", b"second"]
        assert [letter.reason for letter in memory.dead_letters] == ["third"]

    def test_two_may_replay_dead_letters_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = LeasedMemory(MemoryQueue())
        for block in numbered(3):
            memory.bury(block, "400")
        push, others = memory.push, []

        def push_while_another_replays(block: bytes) -> int:
            monkeypatch.setattr(memory, "push", push)
            others.append(memory.replay_dead_letters())
            return push(block)

        monkeypatch.setattr(memory, "push", push_while_another_replays)
        assert memory.replay_dead_letters() == (3, 0)
        assert others == [(0, 0)]
        assert sorted(lease.data for lease in memory.lease(10)) == numbered(3)

    def test_the_age_of_what_waits_is_known(self) -> None:
        clock = FakeClock()
        memory = LeasedMemory(MemoryQueue(max_size=2, clock=clock), clock=clock)
        assert memory.stats().oldest_age == 0.0
        memory.push(b"1")
        clock.advance(7.0)
        assert memory.stats().oldest_age == 7.0
        (lease,) = memory.lease()
        assert lease.enqueued_at == clock.time() - 7.0
        memory.nack(lease)
        memory.push(b"2")
        clock.advance(1.0)
        assert memory.stats().oldest_age == 8.0
        memory.push(b"3")  # the first has to go
        assert memory.stats().oldest_age == 1.0

    def test_what_is_pushed_is_kept_as_it_was_and_has_to_be_bytes(self) -> None:
        exporter = MemoryExporter()
        sender = SendQueue(MemoryQueue(), exporter, quick())
        buffer = bytearray(b"one")
        sender.push(buffer)  # type: ignore[arg-type]
        buffer[:] = b"two"
        with pytest.raises(TypeError, match="a block is bytes, not str"):
            sender.push("text")  # type: ignore[arg-type]
        sender.start().close()
        assert exporter.batches == [b"one"]

    def test_after_max_attempts_a_batch_is_a_dead_letter(self) -> None:
        broken = TransientExportError("broken", ErrorClass.SERVER_ERROR)
        exporter = FailingExporter(poison=(b"bad", broken))
        with SendQueue(MemoryQueue(), exporter, quick(max_attempts=3)) as sender:
            for batch in (b"bad", b"good"):
                sender.push(batch)
            wait_until(lambda: not len(sender))
            assert sender.stats().queue.dead_lettered == 1
        assert exporter.batches == [b"good"]
        assert exporter.attempts.count(b"bad") == 3

    def test_an_outage_makes_no_batch_a_dead_letter(self) -> None:
        exporter = FailingExporter([DOWN] * 6)
        with SendQueue(MemoryQueue(), exporter, quick(max_attempts=2)) as sender:
            sender.push(b"one")
            wait_until(lambda: not len(sender))
            assert sender.stats().queue.dead_lettered == 0
        assert exporter.batches == [b"one"]

    def test_freshest_first_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="order must be 'fifo' for a queue in memory, got 'freshest'"):
            SendQueue(MemoryQueue(), MemoryExporter(), quick(order="freshest"))
        with pytest.raises(ConfigError, match="order must be 'fifo' where type is 'memory', got 'freshest'"):
            quick(order="freshest", type="memory")


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
        exporter.hold()
        with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=0.02, drain_batch=10))) as sender:
            for batch in numbered(25):
                sender.push(batch)
            assert sender.stats().failover_size > 0
            assert sender.stats().failover_bytes > 0
            exporter.release()
            wait_until(lambda: not len(sender))
        assert sorted(exporter.batches) == numbered(25)

    @pytest.fixture
    def threads(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        """Whether there are any for the failover."""
        start = threading.Thread.start
        state = {"any": True}

        def start_or_not(thread: threading.Thread) -> None:
            if thread.name == "penstock-failover" and not state["any"]:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_not)

        def set_any(value: bool) -> None:
            state["any"] = value

        return set_any

    def test_where_there_are_no_more_threads_a_batch_is_kept_and_the_next_one_tries_again(
        self, queue: FastQueue, full: Callable[[bool], None], threads: Callable[[bool], None]
    ) -> None:
        exporter = MemoryExporter()
        with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=0.01))) as sender:
            threads(False)
            sender.push(b"one")
            assert sender.stats().failover_size == 1
            threads(True)
            sender.push(b"two")
            wait_until(lambda: exporter.batches == [b"one", b"two"])

    def test_where_there_is_no_thread_to_the_end_it_is_in_the_queue_if_the_disk_has_recovered(
        self, queue: FastQueue, full: Callable[[bool], None], threads: Callable[[bool], None]
    ) -> None:
        threads(False)
        with SendQueue(queue, MemoryExporter(), quick()) as sender:
            sender.push(b"one")
            full(False)
        assert sender.stats().data_loss == 0
        assert [lease.data for lease in queue.lease()] == [b"one"]

    @pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
    def test_workers_that_have_nothing_to_send_do_not_keep_the_probe_from_it(
        self,
        queue: FastQueue,
        full: Callable[[bool], None],
        split: PipelineSplitConfig,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(
            workers, "IDLE_WAIT", 60.0
        )  # whoever waits for a batch while it has the probe has it for good
        exporter = FailingExporter([DOWN])
        breaker = BreakerConfig(threshold=1, reset_timeout=0.01)
        config = quick(circuit_breaker=breaker, failover=FailoverConfig(drain_interval=0.2), pipeline_split=split)
        sender = SendQueue(queue, exporter, config)
        sender.push(b"one")
        wait_until(lambda: sender.stats().circuit is CircuitState.OPEN)
        sender.start()
        wait_until(lambda: sender.stats().circuit is CircuitState.CLOSED)
        assert exporter.batches == [b"one"]
        sender.close(timeout=0.1)

    def test_nothing_of_it_goes_into_an_open_circuit(self, queue: FastQueue, full: Callable[[bool], None]) -> None:
        exporter = FailingExporter([DOWN])
        breaker = BreakerConfig(threshold=1, reset_timeout=60.0)
        sender = SendQueue(
            queue, exporter, quick(circuit_breaker=breaker, failover=FailoverConfig(drain_interval=60.0))
        )
        failover = sender._failover
        assert failover is not None
        for batch in numbered(3):
            sender.push(batch)
        assert failover.drain(10) == 1
        assert failover.drain(10) == 0
        assert exporter.attempts == numbered(1)
        full(False)
        sender.close()

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

    def test_so_many_of_it_are_sent_every_so_often(
        self, queue: FastQueue, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited: list[float] = []
        drained: list[int] = []
        sender = SendQueue(queue, MemoryExporter(), quick(failover=FailoverConfig(drain_interval="7s", drain_batch=3)))
        failover = sender._failover
        assert failover is not None

        def stops(seconds: float) -> bool:
            waited.append(seconds)
            return len(waited) == 3

        def drain(most: int) -> int:
            drained.append(most)
            return 0

        monkeypatch.setattr(failover._stopping, "wait", stops)
        monkeypatch.setattr(failover, "drain", drain)
        sender.push(b"one")
        wait_until(lambda: failover.join(0.0) == [])
        assert waited == [7.0] * 3
        assert drained == [3, 3, 1]  # and at the end as long as one is taken

    def test_what_a_full_disk_does_not_take_back_goes_to_the_destination_at_the_end(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = MemoryExporter()
        with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=60.0, drain_batch=1))) as sender:
            for batch in numbered(3):
                sender.push(batch)
        assert exporter.batches == numbered(3)
        assert sender.stats().data_loss == 0

    def test_what_the_destination_refuses_at_the_end_holds_up_none_of_the_others(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")))
        with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=60.0))) as sender:
            for batch in (b"one", b"bad", b"two", b"bad, too", b"three"):
                sender.push(batch)
        assert exporter.batches == [b"one", b"two", b"three"]
        assert sender.stats().data_loss == 0
        assert sender.stats().queue.dead_lettered == 2

    def test_what_fails_of_it_holds_up_none_of_the_others(self, queue: FastQueue, full: Callable[[bool], None]) -> None:
        exporter = FailingExporter([TimeoutError()])
        config = quick(retry_interval=60.0, max_retry_delay=60.0, failover=FailoverConfig(drain_interval=0.01))
        sender = SendQueue(queue, exporter, config)
        for batch in (b"one", b"two", b"three"):
            sender.push(batch)
        wait_until(lambda: exporter.batches == [b"two", b"three"])
        full(False)
        sender.close()
        assert sender.stats().data_loss == 0

    def test_at_the_end_it_waits_for_no_disk_where_a_push_would(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits: list[object] = []

        def refuse(block: bytes, *, timeout: float | None = None) -> int:
            waits.append(timeout)
            raise DiskFull("no room on the disk")

        monkeypatch.setattr(queue, "push", refuse)
        exporter = MemoryExporter()
        with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=60.0))) as sender:
            sender.push(b"one")
        assert waits == [None, 0.0]
        assert exporter.batches == [b"one"]

    def test_it_takes_nothing_that_comes_after_its_end(self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch) -> None:
        waits, closed = threading.Event(), threading.Event()

        def wait_for_room(block: bytes, **options: Any) -> int:
            waits.set()
            closed.wait(30)
            raise DiskFull("no room on the disk")

        monkeypatch.setattr(queue, "push", wait_for_room)
        sender = SendQueue(queue, MemoryExporter(), quick()).start()
        outcomes: list[object] = []

        def push() -> None:
            try:
                sender.push(b"one")
                outcomes.append("taken")
            except QueueClosed as error:
                outcomes.append(type(error))

        pushing = threading.Thread(target=push)
        pushing.start()
        waits.wait(30)
        sender.close()
        closed.set()
        pushing.join(30)
        assert outcomes == [QueueClosed]

    def test_where_order_matters_it_waits_for_what_is_in_the_queue(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        full(False)
        exporter = FailingExporter([DOWN] * 2, in_order=True)
        exporter.hold()
        with SendQueue(queue, exporter, quick(workers=0, failover=FailoverConfig(drain_interval=0.001))) as sender:
            for number, batch in enumerate(numbered(60)):
                full(number // 10 % 2 == 1)  # ten go to the disk, ten do not, and so on
                if number == 40:
                    exporter.release()
                sender.push(batch)
            full(True)
            assert sender.flush()
            assert sender.stats().data_loss == 0
        assert exporter.most_at_once == 1
        assert exporter.batches == numbered(60)

    def test_where_order_matters_nothing_passes_one_of_it_that_is_being_sent(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = MemoryExporter(in_order=True)
        exporter.hold()
        with SendQueue(queue, exporter, quick(workers=0, failover=FailoverConfig(drain_interval=0.001))) as sender:
            sender.push(b"one")
            wait_until(lambda: exporter.at_once)
            sender.push(b"two")
            full(False)
            sender.push(b"three")
            assert sender.stats().failover_size == 3
            exporter.release()
            assert sender.flush()
        assert exporter.most_at_once == 1
        assert exporter.batches == [b"one", b"two", b"three"]

    def test_where_order_matters_what_it_cannot_hold_goes_to_the_queue(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = MemoryExporter(in_order=True)
        exporter.hold()
        failover = FailoverConfig(max_bytes=10, drain_interval=0.001)
        with SendQueue(queue, exporter, quick(workers=0, failover=failover)) as sender:
            sender.push(b"one")
            wait_until(lambda: exporter.at_once)
            full(False)
            sender.push(b"larger than the failover")
            exporter.release()
            assert sender.flush()
            assert sender.stats().data_loss == 0
        assert sorted(exporter.batches) == [b"larger than the failover", b"one"]

    def test_a_probe_of_it_is_given_back_where_preparing_ends_as_nobody_foresaw(
        self, queue: FastQueue, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.batch_delivery.ERROR_PAUSE", 0.01)

        class Odd(FailingExporter):
            def prepare(self, batch: bytes) -> Prepared:
                if batch == b"bad":
                    raise ValueError("no batch")
                return super().prepare(batch)

        bury = queue.bury
        failures = iter([RuntimeError("can't start new thread")])

        def fail_once(block: bytes, reason: str) -> None:
            for failure in failures:
                raise failure
            bury(block, reason)

        monkeypatch.setattr(queue, "bury", fail_once)
        exporter = Odd()
        breaker = BreakerConfig(threshold=1, reset_timeout=0.0)
        config = quick(circuit_breaker=breaker, failover=FailoverConfig(drain_interval=0.01))
        sender = SendQueue(queue, exporter, config)
        sender._gate.failed(begun(sender._gate), TransientExportError("503"), attempts=1)
        sender.push(b"bad")
        sender.push(b"one")
        assert sender.flush()
        assert exporter.batches == [b"one"]
        sender.close()

    def test_a_disk_that_is_broken_is_as_good_as_a_full_one(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(block: bytes, **options: Any) -> int:
            raise DiskFailed("Input/output error")

        monkeypatch.setattr(queue, "push", refuse)
        sender = SendQueue(queue, MemoryExporter(), quick())
        sender.push(b"one")
        assert sender.stats().failover_size == 1
        sender.close()

    def test_what_waits_for_its_next_attempt_moves_to_a_disk_that_has_recovered(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        exporter = FailingExporter()
        exporter.fail_with(TimeoutError())
        config = quick(retry_interval=60.0, max_retry_delay=60.0, failover=FailoverConfig(drain_interval=0.01))
        sender = SendQueue(queue, exporter, config).start()
        sender.push(b"one")
        wait_until(lambda: exporter.attempts)
        full(False)
        sender.close()
        assert sender.stats().data_loss == 0
        assert len(queue) == 1

    def test_a_send_of_it_that_hangs_does_not_keep_close_beyond_its_deadline(
        self, queue: FastQueue, full: Callable[[bool], None]
    ) -> None:
        class Deaf(MemoryExporter):
            def close(self) -> None:
                """Does not cut anything off."""

        exporter = Deaf()
        exporter.hold()
        sender = SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=0.01))).start()
        sender.push(b"one")
        wait_until(lambda: exporter.at_once)
        assert sender.close(timeout=1.0) == ["penstock-failover"]  # time enough for the others to end
        exporter.release()

    def test_it_goes_on_after_what_nobody_foresaw(
        self, queue: FastQueue, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.batch_delivery.ERROR_PAUSE", 0.01)

        class Odd(MemoryExporter):
            def take(self, prepared: Prepared) -> Any:
                super().take(prepared)
                return PartialSuccess("no count", "") if len(self.batches) == 1 else None  # type: ignore[arg-type]

        exporter = Odd()
        with SendQueue(queue, exporter, quick()) as sender:
            sender.push(b"one")
            assert sender.flush()
        assert exporter.batches == [b"one", b"one"]

    def test_what_the_destination_refuses_of_it_is_a_dead_letter_of_the_queue(
        self, queue: FastQueue, full: Callable[[bool], None], tmp_path: Path
    ) -> None:
        exporter = FailingExporter([PermanentExportError("400")])
        with SendQueue(queue, exporter, quick()) as sender:
            sender.push(b"bad")
            assert sender.flush()
            assert sender.stats().queue.dead_lettered == 1
        assert sender.stats().data_loss == 0
        queue.close()
        assert dead_letters(tmp_path) == [(b"bad", "400")]

    def test_a_refused_part_of_it_is_a_dead_letter_of_the_queue_too(
        self, queue: FastQueue, full: Callable[[bool], None], tmp_path: Path
    ) -> None:
        exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")), max_bytes=8)
        with SendQueue(queue, exporter, quick()) as sender:
            sender.push(b"good....bad.....")
            assert sender.flush()
            assert sender.stats().queue.dead_lettered == 1
        assert sender.stats().data_loss == 0
        queue.close()
        assert exporter.batches == [b"good...."]
        assert dead_letters(tmp_path) == [(b"bad.....", "400")]

    def test_a_dead_letter_of_it_that_cannot_be_written_is_counted_as_lost_in_the_end(
        self, queue: FastQueue, full: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(block: bytes, reason: str) -> None:
            raise DiskFull("no room on the disk")

        monkeypatch.setattr(queue, "bury", refuse)
        with SendQueue(queue, FailingExporter([PermanentExportError("400")]), quick()) as sender:
            sender.push(b"bad")
            assert sender.flush()
            assert sender.stats().queue.dead_lettered == 1
        assert sender.stats().data_loss == 1

    def test_dead_letters_of_it_that_find_no_room_in_memory_either_are_lost_and_counted(
        self,
        queue: FastQueue,
        full: Callable[[bool], None],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(block: bytes, reason: str) -> None:
            raise DiskFull("no room on the disk")

        exporter = FailingExporter()
        exporter.fail_with(PermanentExportError("400"))
        failover = FailoverConfig(drain_interval=0.02, max_bytes=3 * len(numbered(1)[0]))
        with SendQueue(queue, exporter, quick(failover=failover)) as sender:
            with monkeypatch.context() as patch:
                patch.setattr(queue, "bury", refuse)
                for batch in numbered(5):
                    sender.push(batch)
                    assert sender.flush()
            wait_until(lambda: sender.stats().data_loss == 2)
        assert sender.stats().data_loss == 2
        queue.close()
        assert dead_letters(tmp_path) == [(batch, "400") for batch in numbered(5)[2:]]

    @pytest.mark.parametrize("drain_interval", [0.02, 60.0], ids=["while it runs", "when it is closed"])
    def test_a_dead_letter_of_it_is_written_when_the_disk_has_recovered(
        self, queue: FastQueue, full: Callable[[bool], None], tmp_path: Path, drain_interval: float
    ) -> None:
        config = quick(failover=FailoverConfig(drain_interval=drain_interval))
        sender = SendQueue(queue, MemoryExporter(), config).start()
        sender.push(b"good")  # its thread starts
        failover = sender._failover
        assert failover is not None
        failover._memory.dead_letters.extend([_letter(b"bad", "400"), _letter(b"worse", "422")])
        full(False)
        if drain_interval < 1:
            wait_until(lambda: not failover.dead_letters)
        sender.close()
        assert sender.stats().queue.dead_lettered == 2
        assert sender.stats().data_loss == 0
        queue.close()
        assert dead_letters(tmp_path) == [(b"bad", "400"), (b"worse", "422")]

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

    def test_a_batch_that_cannot_be_prepared_says_nothing_about_the_destination(self, queue: FastQueue) -> None:
        class Picky(FailingExporter):
            def prepare(self, batch: bytes) -> Prepared:
                if batch == b"undecodable":
                    raise ValueError("cannot be decoded")
                return super().prepare(batch)

        exporter = Picky([DOWN])
        config = quick(enabled=False, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=0.0))
        with SendQueue(queue, exporter, config) as sender:
            with pytest.raises(PermanentExportError, match="cannot be prepared: ValueError: cannot be decoded"):
                sender.push(b"undecodable")
            assert sender.stats().circuit is CircuitState.CLOSED
            with pytest.raises(TransientExportError, match="nobody listens"):
                sender.push(b"one")
            with pytest.raises(PermanentExportError, match="cannot be prepared"):
                sender.push(b"undecodable")  # as the probe: another takes its place
            assert sender.stats().circuit is CircuitState.HALF_OPEN
            sender.push(b"one")
            assert sender.stats().circuit is CircuitState.CLOSED
            assert sender.stats().errors["unknown"] == 2
        assert exporter.batches == [b"one"]

    def test_what_is_no_exception_gives_the_place_of_the_send_back(self, queue: FastQueue) -> None:
        class Interrupted(MemoryExporter):
            def take(self, prepared: Prepared) -> None:
                raise KeyboardInterrupt

        sender = SendQueue(queue, Interrupted(), quick(enabled=False))
        with pytest.raises(KeyboardInterrupt):
            sender.push(b"one")
        assert sender.stats().sends_inflight == 0

    def test_what_waits_is_not_overtaken(self, queue: FastQueue) -> None:
        exporter = MemoryExporter()
        sender = SendQueue(queue, exporter, quick(always_queue=False))
        queue.push(b"first")
        sender.push(b"second")
        assert len(sender) == 2
        sender.start()
        assert sender.flush()
        sender.close()
        assert sorted(exporter.batches) == [b"first", b"second"]


class TestLimits:
    """The adaptive limit of blocks."""

    @pytest.mark.parametrize("kind", ["disk", "memory"])
    @pytest.mark.parametrize(
        ("behavior", "reason"), [("drop_oldest", "oldest"), ("drop_newest", "newest"), ("block", "timeout")]
    )
    def test_the_limit_of_blocks_follows_their_size(
        self, tmp_path: Path, kind: str, behavior: str, reason: str
    ) -> None:
        config = quick(type=kind, path=tmp_path / "queue", max_bytes=100_000, full_behavior=behavior, max_size=10,
                       target_utilization=0.8, block_timeout=0.0)  # fmt: skip
        sender = SendQueue.open(MemoryExporter(), config)
        refused = 0
        for _ in range(250):
            try:
                sender.push(bytes(1000))
            except QueueFull:
                refused += 1
        stats = sender.stats()
        assert stats.queue.size == stats.queue.max_size == 80
        assert stats.queue.dropped[reason] == 170
        assert refused == (0 if behavior == "drop_oldest" else 170)
        sender.close(timeout=0.0)

    def test_freshest_first_still_drops_the_oldest(self, tmp_path: Path) -> None:
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

    def test_the_limit_looks_back_on_the_last_blocks_and_not_on_all(self) -> None:
        limit = AdaptiveLimit(max_bytes=1_000_000, target=1.0)
        for _ in range(100_000):
            limit.record(10)
        found = [limit.record(1000) for _ in range(20_000)]
        assert 1000 <= (found[-1] or 0) <= 1500

    def test_a_queue_of_yours_keeps_its_own_limits(self, tmp_path: Path) -> None:
        own = FastQueueConfig(max_size=20_000, full_behavior=FullBehavior.DROP_NEWEST)
        with FastQueue(tmp_path / "queue", own) as queue:
            sender = SendQueue(queue, MemoryExporter(), quick(max_size=10))
            for batch in numbered(200):
                sender.push(batch)
            assert len(queue) == 200
            assert queue.stats().max_size == 20_000

    def test_without_it_max_size_holds(self, tmp_path: Path) -> None:
        config = quick(path=tmp_path / "queue", max_size=10, adaptive_enabled=False)
        sender = SendQueue.open(MemoryExporter(), config)
        for _ in range(150):
            sender.push(bytes(10))
        assert sender.stats().queue.size == 10
        sender.close()
