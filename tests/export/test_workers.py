"""How many send, how many at once, and exporters that take many blocks as one."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import SystemClock
from penstock.errors import ConfigError, TransientExportError
from penstock.export import (
    AdaptiveWorkersConfig,
    BreakerConfig,
    PartialSuccess,
    PipelineSplitConfig,
    Prepared,
    SendQueue,
)
from penstock.export import (
    send_workers as workers,
)
from penstock.export.prepared_channel import PreparedBatch, PreparedChannel
from penstock.export.send_workers import SendWorkers
from penstock.export.thread_pool import IsRetired, SendThreadPool
from penstock.spool import FastQueue, FastQueueConfig, Lease, MemoryQueue
from penstock.testing import FakeClock, MemoryExporter, wait_until
from tests.export.quick import SPLIT, begun, dead_letters, failing, held, numbered, push_all, quick


class TestWorkers:
    """How many, and how many at once."""

    def test_as_many_as_configured_send_at_once(self, queue: FastQueue) -> None:
        exporter = held()
        with SendQueue(queue, exporter, quick(workers=3)) as sender:
            push_all(sender, numbered(10))
            wait_until(lambda: exporter.at_once == 3)
            stats = sender.stats()
            assert (stats.workers_active, stats.workers_total, stats.sends_inflight) == (3, 3, 3)
            exporter.release()
            wait_until(lambda: not len(sender))
        assert exporter.most_at_once == 3

    def test_one_that_there_is_not_to_be_any_more_ends_after_what_it_is_at(self, queue: FastQueue) -> None:
        senders: Counter[str] = Counter()

        class Named(MemoryExporter):
            def take(self, prepared: Prepared) -> PartialSuccess | None:
                name = threading.current_thread().name
                senders[name] += 1
                for thread in threading.enumerate() if name == "penstock-worker-0" else ():
                    if thread.name == "penstock-worker-1":
                        thread.join(10)
                return super().take(prepared)

        exporter = Named()
        exporter.hold()
        with SendQueue(queue, exporter, quick(workers=2)) as sender:
            push_all(sender, numbered(50))
            wait_until(lambda: exporter.at_once == 2)
            sender._workers.resize(1)
            exporter.release()
            wait_until(lambda: not len(sender))
        assert senders == {"penstock-worker-0": 49, "penstock-worker-1": 1}

    def test_none_come_back_when_all_were_asked_to_end(self) -> None:
        pool = SendThreadPool("worker", lambda number, is_retired: None, FakeClock())
        pool.stop()
        pool.resize(3)
        assert pool.size == 0
        assert pool.join(0.0) == []

    def test_one_that_met_an_unforeseen_error_pauses_before_it_goes_on(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[float] = []
        turns = iter([ZeroDivisionError("a mistake of ours"), None])

        def work(number: int, is_retired: IsRetired) -> None:
            if (problem := next(turns)) is not None:
                raise problem

        pool = SendThreadPool("worker", work, SystemClock())
        monkeypatch.setattr(pool, "pause", pauses.append)
        pool.resize(1)
        assert pool.join(SystemClock().monotonic() + 30) == []
        assert pauses == [1.0]
        assert "Worker failed and goes on. worker=worker-0" in caplog.text

    def test_the_global_limit_holds_for_all_of_them(self, queue: FastQueue) -> None:
        exporter = held()
        with SendQueue(queue, exporter, quick(workers=4, global_send_limit=2)) as sender:
            push_all(sender, numbered(10))
            wait_until(lambda: sender.stats().workers_active == 4 and exporter.at_once == 2)
            exporter.release()
            wait_until(lambda: not len(sender))
        assert exporter.most_at_once == 2

    def test_a_sender_of_the_split_has_several_sends_under_way(self, queue: FastQueue) -> None:
        exporter = held()
        split = PipelineSplitConfig(enabled=True, preparer_count=2, sender_count=2, channel_size=3)
        with SendQueue(queue, exporter, quick(pipeline_split=split, max_concurrent_sends=2)) as sender:
            push_all(sender, numbered(30))
            wait_until(lambda: exporter.at_once == 4)
            wait_until(lambda: sender.stats().queue.leased >= 7)
            stats = sender.stats()
            assert (stats.senders_active, stats.workers_total, stats.workers_active) == (2, 2, 0)
            # 4 under way, 3 in the channel, at most one more in the hands of each preparer
            assert stats.queue.leased <= 9
            exporter.release()
            wait_until(lambda: not len(sender))

    def test_the_split_has_as_many_preparers_and_senders_as_configured(self, queue: FastQueue) -> None:
        split = PipelineSplitConfig(enabled=True, preparer_count=3, sender_count=5)
        with SendQueue(queue, MemoryExporter(), quick(pipeline_split=split, max_concurrent_sends=2)) as sender:
            names = {thread.name for thread in threading.enumerate()}
            assert {name for name in names if "preparer" in name} == {f"penstock-preparer-{n}" for n in range(3)}
            assert {name for name in names if "sender" in name} == {f"penstock-sender-{n}" for n in range(10)}
            assert sender.stats().workers_total == 5

    def test_the_split_holds_no_more_than_the_memory_budget(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.config.usable_memory", lambda: 1000)
        sender = SendQueue(queue, MemoryExporter(), quick(pipeline_split=SPLIT, memory_percent=0.5,
                                                          memory_limit_ratio=0.5))  # fmt: skip
        assert isinstance(sender._workers, SendWorkers)
        channel = sender._workers._channel
        assert channel is not None
        channel.put(PreparedBatch(Lease(0, 1, bytes(150), 0.0), Prepared(bytes(99))))
        assert channel.wait_for_room(0.0)
        channel.put(PreparedBatch(Lease(1, 1, b"x", 0.0), Prepared(b"")))
        assert not channel.wait_for_room(0.0)

    def test_the_split_sends_the_freshest_first_where_that_is_asked_for(self, tmp_path: Path) -> None:
        exporter = held()
        with FastQueue(tmp_path / "queue", FastQueueConfig(order="freshest")) as queue:
            queue.push_many(numbered(6))
            with SendQueue(queue, exporter, quick(pipeline_split=SPLIT, max_concurrent_sends=1)) as sender:
                wait_until(lambda: queue.stats().leased == 6)
                exporter.release()
                wait_until(lambda: not len(sender))
        assert exporter.batches == numbered(6)[::-1]

    @pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
    def test_workers_do_not_come_while_the_destination_is_down(
        self, queue: FastQueue, split: PipelineSplitConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.send_queue.INTERVAL", 0.01)
        exporter = failing()
        adaptive = AdaptiveWorkersConfig(enabled=True, min_workers=1, max_workers=4)
        breaker = BreakerConfig(threshold=1, reset_timeout=60.0)
        config = quick(adaptive_workers=adaptive, pipeline_split=split, circuit_breaker=breaker)
        with SendQueue(queue, exporter, config) as sender:
            sender.push(b"first")
            wait_until(lambda: sender.stats().circuit_opened)
            push_all(sender, numbered(100))
            decisions = sender.stats().circuit_rejected + 10
            wait_until(lambda: sender.stats().circuit_rejected > decisions)
            assert sender.stats().workers_total == 1

    @pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
    def test_adaptive_workers_come_when_the_queue_is_deep(
        self, queue: FastQueue, split: PipelineSplitConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.export.send_queue.INTERVAL", 0.01)
        exporter = held()
        adaptive = AdaptiveWorkersConfig(enabled=True, min_workers=1, max_workers=3)
        config = quick(adaptive_workers=adaptive, pipeline_split=split, max_concurrent_sends=1)
        with SendQueue(queue, exporter, config) as sender:
            push_all(sender, numbered(100))
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
        exporter = held()
        adaptive = AdaptiveWorkersConfig(enabled=True, min_workers=1, max_workers=4)
        with SendQueue(queue, exporter, quick(adaptive_workers=adaptive)) as sender:
            push_all(sender, numbered(100))
            wait_until(lambda: sender.stats().workers_total == 4)
            exporter.release()
            wait_until(lambda: sender.stats().workers_total == 1)

    def test_the_channel_lets_the_oldest_out_first_or_the_newest_where_that_is_asked_for(self) -> None:
        for newest_first, order in ((False, [1, 2, 3]), (True, [3, 2, 1])):
            channel = PreparedChannel(10, newest_first=newest_first)
            for sequence in (2, 3, 1):
                channel.put(PreparedBatch(Lease(sequence, 1, b"x", 0.0), Prepared(b"x")))
            jobs = [channel.get(0.0) for _ in order]
            assert [job.lease.sequence for job in jobs if job is not None] == order

    def test_what_was_prepared_and_not_sent_is_given_back_at_the_end(self, queue: FastQueue) -> None:
        exporter = held()
        sender = SendQueue(queue, exporter, quick(pipeline_split=SPLIT, max_concurrent_sends=1)).start()
        push_all(sender, numbered(10))
        wait_until(lambda: queue.stats().leased == 10)
        assert sender.close(timeout=0.6) == []
        assert queue.stats().leased == 0
        assert len(queue) == 10

    def test_what_is_prepared_too_late_is_given_back_by_the_preparer(self, queue: FastQueue) -> None:
        may_go_on = threading.Event()

        class Slow(MemoryExporter):
            def prepare(self, batch: bytes) -> Prepared:
                may_go_on.wait(20)
                return super().prepare(batch)

        exporter = Slow()
        sender = SendQueue(queue, exporter, quick(pipeline_split=SPLIT)).start()
        sender.push(b"one")
        wait_until(lambda: sender.stats().preparers_active == 1)
        assert sender.close(timeout=1.0) == ["penstock-preparer-0"]  # time enough for the others to end
        may_go_on.set()
        wait_until(lambda: queue.stats().leased == 0)
        assert len(queue) == 1
        assert exporter.batches == []

    def test_a_batch_that_comes_after_the_gate_has_closed_is_left_to_the_probe(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workers, "IDLE_WAIT", 5.0)
        exporter = MemoryExporter()
        breaker = BreakerConfig(threshold=1, reset_timeout=0.0)
        sender = SendQueue(queue, exporter, quick(workers=1, circuit_breaker=breaker)).start()
        wait_until(lambda: queue._state._not_empty.waiting)  # so the gate has let it pass
        gate = sender._gate
        gate.failed(begun(gate), TransientExportError("503"), attempts=1)
        assert gate.begin() is not None  # the probe
        sender.push(b"one")
        wait_until(lambda: queue.stats().nacked == 1)
        assert [lease.attempts for lease in queue.lease()] == [1]  # it was not sent
        assert sender.close() == []
        assert exporter.batches == []
        assert len(queue) == 1

    def test_where_there_are_no_more_threads_those_that_run_do_the_work(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "penstock-worker-2":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        exporter = MemoryExporter()
        with SendQueue(queue, exporter, quick(workers=4)) as sender:
            assert sender.stats().workers_total == 2
            sender.push(b"one")
            wait_until(lambda: not len(sender))
        assert exporter.batches == [b"one"]
        assert "Fewer workers than wanted. pool=penstock-worker workers=2" in caplog.text

    def test_a_queue_that_gets_no_thread_at_all_says_so_and_can_be_closed(
        self, queue: FastQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        sender = SendQueue(queue, MemoryExporter(), quick(workers=4))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                sender.start()
        sender.push(b"one")
        assert sender.close() == []
        assert len(queue) == 1

    def test_an_exporter_may_close_the_queue_that_it_works_for(self, queue: FastQueue) -> None:
        closed: list[list[str]] = []

        class Fatal(MemoryExporter):
            def take(self, prepared: Prepared) -> None:
                closed.append(sender.close(timeout=5.0))
                raise ConnectionError("never again")

        sender = SendQueue(queue, Fatal(), quick(workers=2)).start()
        sender.push(b"one")
        wait_until(lambda: closed)
        assert closed[0][0].startswith("penstock-worker-")
        assert len(queue) == 1


class TestGroups:
    """Exporters that take many blocks as one."""

    class Grouping:
        max_blocks = 8
        max_bytes = 1 << 20

        def __init__(self, errors: list[Exception | None]) -> None:
            self.errors = errors
            self.groups: list[list[bytes]] = []

        def begin(self, queue_id: str) -> None: ...

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
            stats = sender.stats()
            assert stats.workers_total == 1
            assert (stats.retries, stats.retry_successes, stats.retry_failures["unknown"]) == (2, 1, 1)
            assert (stats.exported_batches, stats.errors["unknown"]) == (20, 2)
        queue.close()
        assert [block for group in exporter.groups for block in group] == numbered(20)
        assert dead_letters(tmp_path) == [(b"bad", "cannot be read")]

    def test_a_group_that_still_fails_at_the_end_stays_in_the_queue(self, queue: FastQueue) -> None:
        exporter = self.Grouping([OSError(28, "No space left")] * 1000)
        queue.push_many(numbered(10))
        with SendQueue(queue, exporter, quick()) as sender:
            wait_until(lambda: sender.stats().errors["unknown"] >= 2)
        assert [lease.data for lease in queue.lease(100)] == numbered(10)

    def test_freshest_first_is_refused(self, tmp_path: Path) -> None:
        with (
            FastQueue(tmp_path / "fresh", FastQueueConfig(order="freshest")) as queue,
            pytest.raises(ConfigError, match="must be 'fifo'"),
        ):
            SendQueue(queue, self.Grouping([]), quick())

    @pytest.mark.parametrize("setting", ["enabled", "always_queue"])
    def test_sending_past_the_queue_is_refused(self, queue: FastQueue, setting: str) -> None:
        with pytest.raises(ConfigError, match="always queues: enabled and always_queue"):
            SendQueue(queue, self.Grouping([]), quick(**{setting: False}))

    def test_a_queue_in_memory_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"type must be 'disk' .* got 'memory'"):
            SendQueue(MemoryQueue(), self.Grouping([]), quick())
