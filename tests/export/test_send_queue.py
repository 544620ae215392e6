"""The send queue: always-queue, in place, once acknowledged, never lost."""

import asyncio
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    ConfigError,
    DiskFull,
    ErrorClass,
    QueueClosed,
    TransientExportError,
)
from penstock.export import (
    AdaptiveWorkersConfig,
    BackoffConfig,
    BreakerConfig,
    CircuitState,
    PartialSuccess,
    PipelineSplitConfig,
    Prepared,
    SendQueue,
    SendQueueConfig,
    send_queue,
)
from penstock.spool import FastQueue, Lease
from penstock.spool.files import OsSpoolFiles
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.quick import DOWN, SPLIT, Deaf, dead_letters, failing, held, numbered, push_all, quick


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_everything_pushed_arrives_once_and_is_acknowledged(queue: FastQueue, split: PipelineSplitConfig) -> None:
    exporter = MemoryExporter()
    with SendQueue(queue, exporter, quick(pipeline_split=split)) as sender:
        push_all(sender, numbered(500))
        wait_until(lambda: not len(sender))
        assert sender.stats().exported_batches == 500
    assert sorted(exporter.batches) == numbered(500)


def test_it_starts_and_closes_with_an_async_with(queue: FastQueue) -> None:
    exporter = MemoryExporter()

    async def main() -> SendQueue:
        async with SendQueue(queue, exporter, quick()) as sender:
            push_all(sender, numbered(10))
            await asyncio.to_thread(wait_until, lambda: not len(sender))
        return sender

    closed = asyncio.run(main())
    assert sorted(exporter.batches) == numbered(10)
    with pytest.raises(QueueClosed):
        closed.push(b"late")


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_a_batch_that_failed_goes_to_its_place_and_not_to_the_tail(
    queue: FastQueue, split: PipelineSplitConfig
) -> None:
    exporter = FailingExporter([DOWN])
    queue.push_many(numbered(2000))
    config = quick(workers=1, pipeline_split=split, max_concurrent_sends=1, retry_interval=0.001)
    with SendQueue(queue, exporter, config) as sender:
        wait_until(lambda: not len(sender))
        assert sender.stats().exported_bytes == sum(map(len, numbered(2000)))  # of what is sent again once
    failed = exporter.attempts[0]
    assert exporter.batches.index(failed) < 1000
    assert [batch for batch in exporter.batches if batch != failed] == numbered(2000)[1:]


def test_while_the_destination_is_down_the_oldest_batch_is_the_one_that_is_tried(queue: FastQueue) -> None:
    exporter = failing()
    queue.push_many(numbered(10))
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        wait_until(lambda: sender.stats().circuit_opened >= 3)
        probes = exporter.attempts[-1]
        exporter.recover()
        wait_until(lambda: not len(sender))
    assert probes == numbered(1)[0]
    assert exporter.batches == numbered(10)


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_an_open_circuit_is_asked_before_a_batch_is_leased(queue: FastQueue, split: PipelineSplitConfig) -> None:
    exporter = failing()
    config = quick(circuit_breaker=BreakerConfig(threshold=1, reset_timeout=60.0), pipeline_split=split)
    with SendQueue(queue, exporter, config) as sender:
        sender.push(b"first")
        wait_until(lambda: sender.stats().circuit is CircuitState.OPEN)
        push_all(sender, numbered(20))
        rejected = sender.stats().circuit_rejected
        wait_until(lambda: sender.stats().circuit_rejected > rejected + 8)  # all have had a turn
        stats = sender.stats()
    assert stats.queue.leased <= 1  # one worker may have waited for a batch when the circuit opened
    assert len(exporter.attempts) <= 2
    assert 0 < stats.backoff <= 60.0


def test_after_its_rest_exactly_one_probe_goes_out(queue: FastQueue) -> None:
    exporter = failing()
    config = quick(workers=8, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=0.05))
    with SendQueue(queue, exporter, config) as sender:
        push_all(sender, numbered(50))
        wait_until(lambda: sender.stats().circuit is CircuitState.OPEN)

        def holds_the_next_probe() -> bool:
            exporter.release()
            exporter.hold()
            stats = sender.stats()
            return stats.circuit is CircuitState.OPEN and not stats.sends_inflight  # so no other is under way

        wait_until(holds_the_next_probe)
        exporter.most_at_once = 0
        wait_until(lambda: exporter.at_once)
        assert sender.stats().circuit is CircuitState.HALF_OPEN
        refused = sender.stats().circuit_rejected
        wait_until(lambda: sender.stats().circuit_rejected >= refused + 8)  # the others have asked
        assert exporter.at_once == exporter.most_at_once == 1
        exporter.recover()
        exporter.release()
        wait_until(lambda: not len(sender))
        assert sender.stats().circuit is CircuitState.CLOSED


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


def test_a_batch_that_always_meets_a_server_error_does_not_hold_up_the_others(queue: FastQueue) -> None:
    exporter = FailingExporter(poison=(b"bad", TransientExportError("500", ErrorClass.SERVER_ERROR)))
    config = quick(workers=1, max_retry_delay=30.0, circuit_breaker=BreakerConfig(threshold=2, reset_timeout=0.01))
    queue.push(b"bad")
    queue.push_many(numbered(50))
    with SendQueue(queue, exporter, config) as sender:
        wait_until(lambda: len(sender) == 1)
    assert sorted(exporter.batches) == numbered(50)
    assert len(queue) == 1


def test_retry_after_holds_everything_back_and_does_not_count_as_a_failure(queue: FastQueue) -> None:
    times: list[float] = []

    class Timed(FailingExporter):
        def take(self, prepared: Prepared) -> PartialSuccess | None:
            times.append(time.monotonic())
            return super().take(prepared)

    exporter = Timed([TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=0.2)])
    config = quick(workers=1, circuit_breaker=BreakerConfig(threshold=1, reset_timeout=60.0))
    with SendQueue(queue, exporter, config) as sender:
        sender.push(b"one")
        push_all(sender, numbered(5))
        wait_until(lambda: not len(sender))
        assert sender.stats().circuit_opened == 0
    assert times[1] - times[0] >= 0.2
    assert exporter.batches == [b"one", *numbered(5)]


def test_flush_says_whether_everything_is_settled(queue: FastQueue) -> None:
    exporter = MemoryExporter()
    with SendQueue(queue, exporter, quick()) as sender:
        assert sender.flush()
        exporter.hold()
        sender.push(b"one")
        assert not sender.flush(timeout=0.02)
        exporter.release()
        assert sender.flush()
    assert exporter.batches == [b"one"]


def test_push_is_not_slower_because_the_destination_hangs(queue: FastQueue) -> None:
    exporter = held()
    with SendQueue(queue, exporter, quick()) as sender:
        push_all(sender, numbered(1000))
        assert len(sender) == 1000
        exporter.release()
        wait_until(lambda: not len(sender))


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_close_finishes_what_is_under_way_and_leaves_the_rest_durable(
    tmp_path: Path, split: PipelineSplitConfig
) -> None:
    exporter = held()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(pipeline_split=split, max_concurrent_sends=1)).start()
        push_all(sender, numbered(100))
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


def test_close_brings_what_a_queue_of_yours_holds_to_the_disk(queue: FastQueue) -> None:
    sender = SendQueue(queue, MemoryExporter(), quick())
    sender.push(b"one")
    assert queue.stats().inmemory_blocks == 1
    sender.close()
    assert queue.stats().inmemory_blocks == 0
    assert len(queue) == 1


def test_a_queue_of_yours_may_be_closed_before_it(queue: FastQueue) -> None:
    sender = SendQueue(queue, MemoryExporter(), quick()).start()
    sender.push(b"one")
    assert sender.flush()
    queue.close()
    assert sender.close() == []


def test_what_was_closed_does_not_start_again(queue: FastQueue) -> None:
    sender = SendQueue(queue, MemoryExporter(), quick())
    sender.close()
    with pytest.raises(QueueClosed, match="the send queue is closed"):
        sender.start()


def test_a_send_that_hangs_does_not_keep_close_beyond_its_deadline(tmp_path: Path) -> None:
    exporter = Deaf()
    exporter.hold()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(workers=1)).start()
        sender.push(b"one")
        wait_until(lambda: exporter.at_once)
        began = time.monotonic()
        late = sender.close(timeout=1.0)  # time enough for the others to end
        assert late == ["penstock-worker-0"]
        assert time.monotonic() - began < 15.0  # and not the 30 that it has otherwise
        assert len(queue) == 1
        exporter.release()


def test_a_worker_that_waits_for_room_to_send_does_not_begin_after_close(tmp_path: Path) -> None:
    exporter = Deaf()
    exporter.hold()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(workers=3, global_send_limit=1)).start()
        push_all(sender, numbered(3))
        wait_until(lambda: exporter.at_once == 1 and sender.stats().workers_active == 3)
        late = sender.close(timeout=1.0)
        assert len(late) == 1
        exporter.release()
        wait_until(lambda: not any(thread.name in late for thread in threading.enumerate()))
        assert len(exporter.batches) == 1
        assert queue.stats().leased == 0
        assert len(queue) == 2


def test_close_cuts_a_hanging_send_off_and_its_batch_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exporter = held()
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, exporter, quick(workers=1)).start()
        sender.push(b"one")
        wait_until(lambda: exporter.at_once)
        assert sender.close(timeout=0.6) == []
        assert len(queue) == 1
    assert not caplog.records  # the destination did nothing wrong


def test_a_worker_that_meets_the_unforeseen_gives_its_batch_back_and_goes_on(
    queue: FastQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.export.batch_delivery.ERROR_PAUSE", 0.01)
    monkeypatch.setattr("penstock.export.thread_pool._ERROR_PAUSE", 0.01)
    ack, failures = queue.ack, iter([True])

    def fail_once(lease: Lease) -> None:
        if next(failures, False):
            raise RuntimeError("unforeseen")
        ack(lease)

    monkeypatch.setattr(queue, "ack", fail_once)
    exporter = MemoryExporter()
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        push_all(sender, numbered(3))
        wait_until(lambda: not len(sender))
    assert sorted(set(exporter.batches)) == numbered(3)
    assert len(exporter.batches) == 4


def test_close_may_be_called_again_when_the_disk_was_full(tmp_path: Path) -> None:
    class FullDisk(OsSpoolFiles):
        is_full = False

        def pwritev(self, handle: int, buffers: Any, offset: int, /) -> int:  # type: ignore[override]
            if self.is_full:
                raise OSError(28, "No space left on device")
            return os.pwritev(handle, buffers, offset)

    files = FullDisk()
    queue = FastQueue(tmp_path / "queue", files=files)
    sender = SendQueue(queue, MemoryExporter(), quick(), owns_queue=True)
    sender.push(b"one")
    files.is_full = True
    with pytest.raises(DiskFull):
        sender.close()
    files.is_full = False
    assert sender.close() == []
    assert sender.close() == []
    with FastQueue(tmp_path / "queue") as again:
        assert again.pop() == b"one"


def test_backoff_without_jitter_is_what_the_configuration_says(queue: FastQueue) -> None:
    exporter = FailingExporter([DOWN, DOWN])
    config = quick(
        workers=1,
        retry_interval=200.0,
        max_retry_delay=400.0,
        backoff=BackoffConfig(jitter=0.0),
        circuit_breaker=BreakerConfig(enabled=False),
    )
    sender = SendQueue(queue, exporter, config).start()
    sender.push(b"one")
    sender.push(b"two")
    wait_until(lambda: len(exporter.attempts) == 2)
    wait_until(lambda: sender.stats().backoff > 0)
    assert 350.0 < sender.stats().backoff <= 400.0
    sender.close()


def test_an_exporter_that_cannot_be_closed_keeps_no_folder_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(MemoryExporter):
        def close(self) -> None:
            raise OSError("no")

    config = quick(path=tmp_path / "queue")
    with SendQueue.open(Stuck(), config) as sender:
        sender.push(b"one")
        assert sender.flush()
    SendQueue.open(MemoryExporter(), config).close()
    assert "Exporter could not be closed" in caplog.text


class _NoSplit:
    in_order = False

    def prepare(self, batch: bytes) -> None: ...

    def send(self, prepared: object) -> None: ...

    def close(self) -> None: ...


class _UnsureOfOrder(_NoSplit):
    in_order = "no"  # type: ignore[assignment]

    def split(self, batch: bytes) -> None: ...


@pytest.mark.parametrize(
    ("exporter", "says"),
    [
        (MemoryExporter, "exporter must be an exporter, got the class: write MemoryExporter(...)"),
        (_NoSplit(), "exporter _NoSplit has no split: see penstock.Exporter"),
        (_UnsureOfOrder(), "exporter _UnsureOfOrder must have in_order, True or False: see penstock.Exporter"),
    ],
)
def test_what_is_no_exporter_is_refused_at_once(queue: FastQueue, exporter: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        SendQueue(queue, exporter)


def test_what_is_no_queue_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=re.escape("queue must be a FastQueue or a MemoryQueue, got []")):
        SendQueue([], MemoryExporter())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 0},
        {"workers": 1, "pipeline_split": PipelineSplitConfig(enabled=True)},
        {"workers": 1, "adaptive_workers": AdaptiveWorkersConfig(enabled=True, min_workers=4)},
        {"workers": 0, "pipeline_split": PipelineSplitConfig(sender_count=1)},
        {"workers": 0, "pipeline_split": PipelineSplitConfig(enabled=True, sender_count=1)},
    ],
)
def test_order_is_kept_whatever_else_is_set_but_several_workers(queue: FastQueue, settings: dict[str, Any]) -> None:
    exporter = FailingExporter([DOWN, None, None, DOWN, DOWN, None, TimeoutError(), DOWN], in_order=True)
    with SendQueue(queue, exporter, quick(**settings)) as sender:
        push_all(sender, numbered(100))
        assert sender.flush()
        assert sender.stats().workers_total == 1
    assert exporter.batches == numbered(100)
    assert exporter.most_at_once == 1


def test_the_average_latency_is_what_the_number_of_workers_is_decided_by(
    queue: FastQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_queue, "INTERVAL", 0.001)
    with SendQueue(queue, MemoryExporter(), quick(adaptive_workers=AdaptiveWorkersConfig(enabled=True))) as sender:
        asked: list[dict[str, float]] = []

        def decide(now: float, **state: float) -> int:
            asked.append(state)
            return 3

        monkeypatch.setattr(sender._scaler, "decide", decide)
        assert sender._delivery is not None
        sender._delivery.latency.add(0.25)
        wait_until(lambda: asked and asked[-1] == {"workers": 3, "depth": 0, "latency": 0.25})
        assert sender.stats().workers_total == 3


def test_a_push_blocks_for_half_a_minute_by_default() -> None:
    assert SendQueueConfig().block_timeout == SendQueueConfig().queue_config().block_timeout == 30.0
