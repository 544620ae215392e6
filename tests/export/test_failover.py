"""The failover holds and sends what could not be queued or sent, where memory is as safe as a success promises."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DiskFailed, DiskFull, PermanentExportError, QueueClosed, TransientExportError
from penstock.export import (
    BreakerConfig,
    CircuitState,
    FailoverConfig,
    PartialSuccess,
    PipelineSplitConfig,
    Prepared,
    SendQueue,
    send_workers,
)
from penstock.spool import Durability, FastQueue, FastQueueConfig, MemoryQueue
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.quick import DOWN, SPLIT, Deaf, dead_letters, failing, numbered, push_all, quick

Switch = Callable[[bool], None]


def refuse(*_: object, **__: object) -> int:
    raise DiskFull("no room on the disk")


@pytest.fixture
def full(queue: FastQueue, monkeypatch: pytest.MonkeyPatch) -> Switch:
    push = queue.push

    def set_full(value: bool) -> None:
        monkeypatch.setattr(queue, "push", refuse if value else push)

    set_full(True)
    return set_full


@pytest.mark.parametrize("error", [DiskFull, DiskFailed])
def test_batches_wait_in_memory_and_are_sent_from_there(
    queue: FastQueue, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(block: bytes) -> int:
        raise error("no room on the disk, or no disk")

    monkeypatch.setattr(queue, "push", fail)
    exporter = FailingExporter([DOWN])
    exporter.hold()
    with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=0.02, drain_batch=10))) as sender:
        push_all(sender, numbered(25))
        assert sender.stats().failover_size > 0
        assert sender.stats().failover_bytes > 0
        exporter.release()
        wait_until(lambda: not len(sender))
    assert sorted(exporter.batches) == numbered(25)


def test_a_batch_that_it_has_no_thread_for_is_not_taken(
    queue: FastQueue, full: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    exporter = MemoryExporter()
    sender = SendQueue(queue, exporter, quick())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            sender.push(b"one")
    sender.push(b"two")
    assert sender.flush()
    assert exporter.batches == [b"two"]
    sender.close()


@pytest.mark.parametrize("split", [PipelineSplitConfig(), SPLIT])
def test_workers_that_have_nothing_to_send_do_not_keep_the_probe_from_it(
    queue: FastQueue, full: Switch, split: PipelineSplitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_workers, "IDLE_WAIT", 60.0)  # an idle worker that held the probe would hold it for good
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


def test_nothing_of_it_goes_into_an_open_circuit(queue: FastQueue, full: Switch) -> None:
    exporter = FailingExporter([DOWN])
    breaker = BreakerConfig(threshold=1, reset_timeout=60.0)
    sender = SendQueue(queue, exporter, quick(circuit_breaker=breaker, failover=FailoverConfig(drain_interval=60.0)))
    failover = sender._failover
    assert failover is not None
    push_all(sender, numbered(3))
    assert failover.drain(10) == 1
    assert failover.drain(10) == 0
    assert exporter.attempts == numbered(1)
    full(False)
    sender.close()


def test_its_oldest_go_when_there_is_no_room_and_that_is_data_loss(queue: FastQueue, full: Switch) -> None:
    exporter = failing()
    config = quick(failover=FailoverConfig(max_size=3, drain_interval=60.0))
    sender = SendQueue(queue, exporter, config).start()
    push_all(sender, numbered(5))
    assert sender.stats().failover_evicted == 2
    assert sender.stats().data_loss == 2
    full(False)
    sender.close()
    assert sender.stats().data_loss == 2
    left: list[bytes] = []
    while len(left) < 3:
        left += [lease.data for lease in queue.lease(10, timeout=5)]
    assert sorted(left) == numbered(5)[2:]


def test_so_many_of_it_are_sent_every_so_often(queue: FastQueue, full: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_the_destination_refuses_at_the_end_holds_up_none_of_the_others(queue: FastQueue, full: Switch) -> None:
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")))
    with SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=60.0, drain_batch=1))) as sender:
        push_all(sender, (b"one", b"bad", b"two", b"bad, too", b"three"))
    assert exporter.batches == [b"one", b"two", b"three"]
    assert sender.stats().data_loss == 0
    assert sender.stats().queue.dead_lettered == 2


def test_what_fails_of_it_holds_up_none_of_the_others_and_moves_to_a_disk_that_has_recovered(
    queue: FastQueue, full: Switch
) -> None:
    exporter = FailingExporter([TimeoutError()])
    config = quick(retry_interval=60.0, max_retry_delay=60.0, failover=FailoverConfig(drain_interval=0.01))
    sender = SendQueue(queue, exporter, config)
    push_all(sender, (b"one", b"two", b"three"))
    wait_until(lambda: exporter.batches == [b"two", b"three"])
    full(False)
    sender.close()
    assert sender.stats().data_loss == 0
    assert [lease.data for lease in queue.lease()] == [b"one"]


def test_at_the_end_it_waits_for_no_disk_where_a_push_would(queue: FastQueue, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_takes_nothing_that_comes_after_its_end(queue: FastQueue, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_where_order_matters_it_waits_for_what_is_in_the_queue(queue: FastQueue, full: Switch) -> None:
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


def test_where_order_matters_nothing_passes_one_of_it_that_is_being_sent(queue: FastQueue, full: Switch) -> None:
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


def test_where_order_matters_what_it_cannot_hold_goes_to_the_queue(queue: FastQueue, full: Switch) -> None:
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


def test_a_send_of_it_that_hangs_does_not_keep_close_beyond_its_deadline(queue: FastQueue, full: Switch) -> None:
    exporter = Deaf()
    exporter.hold()
    sender = SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=0.01))).start()
    sender.push(b"one")
    wait_until(lambda: exporter.at_once)
    assert sender.close(timeout=1.0) == ["penstock-failover"]  # time enough for the others to end
    exporter.release()


def test_it_goes_on_after_an_unforeseen_error(queue: FastQueue, full: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("batch", "letter"), [(b"bad", b"bad"), (b"good....bad.....", b"bad.....")])
def test_what_the_destination_refuses_of_it_is_a_dead_letter_of_the_queue_once_its_disk_takes_it(
    queue: FastQueue, full: Switch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: bytes, letter: bytes
) -> None:
    for module in ("batch_delivery", "failover"):
        monkeypatch.setattr(f"penstock.export.{module}.ERROR_PAUSE", 0.01)
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")), max_bytes=8)
    with SendQueue(queue, exporter, quick()) as sender:
        with monkeypatch.context() as disk:
            disk.setattr(queue, "bury", refuse)
            sender.push(batch)
            wait_until(lambda: letter in exporter.attempts)
            assert len(sender) == 1
        assert sender.flush()
        assert sender.stats().queue.dead_lettered == 1
    assert sender.stats().data_loss == 0
    queue.close()
    assert exporter.batches == [b"good...."] * (batch != letter)
    assert dead_letters(tmp_path) == [(letter, "400")]


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_it_never_answers_for_a_queue_that_promises_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    with FastQueue(tmp_path / "durable", FastQueueConfig(durability=durability)) as queue:
        monkeypatch.setattr(queue, "push", refuse)
        sender = SendQueue(queue, failing(), quick())
        with pytest.raises(DiskFull):
            sender.push(b"one")
        assert len(sender) == 0
        sender.close()


@pytest.mark.parametrize("in_order", [False, True])
def test_without_a_queue_it_takes_what_the_destination_does_not_take_now(in_order: bool) -> None:
    exporter = FailingExporter([DOWN], in_order=in_order)
    config = quick(enabled=False, failover=FailoverConfig(drain_interval=0.01))
    with SendQueue(MemoryQueue(), exporter, config) as sender:
        push_all(sender, numbered(3))
        assert sender.flush()
    assert sorted(exporter.batches) == numbered(3)
    assert sender.lost == 0
    if in_order:
        assert exporter.batches == numbered(3)


def test_without_a_queue_what_it_holds_at_the_end_is_counted_as_lost() -> None:
    sender = SendQueue(MemoryQueue(), failing(), quick(enabled=False)).start()
    sender.push(b"one")
    sender.close(timeout=0.2)
    assert sender.lost == sender.stats().data_loss == 1


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_without_a_queue_it_does_not_answer_where_memory_is_not_enough(durability: Durability) -> None:
    sender = SendQueue(MemoryQueue(), failing(), quick(enabled=False, durability=durability))
    with pytest.raises(TransientExportError):
        sender.push(b"one")
    assert sender.stats().failover_size == 0
    sender.close()


@pytest.mark.parametrize(("failover", "lost"), [({"max_bytes": 3}, 1), ({"enabled": False}, 0)])
def test_what_could_never_fit_it_is_refused_with_the_disks_error_as_is_all_without_it(
    queue: FastQueue, full: Switch, failover: dict[str, Any], lost: int
) -> None:
    sender = SendQueue(queue, MemoryExporter(), quick(failover=FailoverConfig(**failover)))
    with pytest.raises(DiskFull):
        sender.push(b"four")
    assert sender.stats().data_loss == lost


@pytest.mark.parametrize("error", [DOWN, PermanentExportError("400")])
def test_what_it_holds_at_the_end_is_counted_as_lost(
    queue: FastQueue, full: Switch, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(queue, "bury", refuse)
    exporter = failing(error)
    sender = SendQueue(queue, exporter, quick(failover=FailoverConfig(drain_interval=60.0))).start()
    sender.push(b"one")
    sender.close(timeout=0.2)
    assert sender.stats().data_loss == 1
