"""The send queue over a queue in memory, and the leases of that queue."""

import threading

import pytest

from penstock.errors import ConfigError, ErrorClass, PermanentExportError, QueueFull, TransientExportError
from penstock.export import (
    SendQueue,
)
from penstock.export.leased_memory import SendMemory
from penstock.spool import FullBehavior, MemoryQueue
from penstock.testing import FailingExporter, FakeClock, MemoryExporter, wait_until
from tests.export.quick import DOWN, failing, numbered, push_all, quick


def test_a_push_waits_for_room_where_the_queue_blocks() -> None:
    memory = SendMemory(MemoryQueue(max_size=1), FullBehavior.BLOCK, 30.0)
    memory.push(b"one")
    (lease,) = memory.lease()
    waiting = threading.Thread(target=memory.push, args=(b"two",))
    waiting.start()
    wait_until(lambda: memory._not_full._waiters)  # type: ignore[attr-defined]
    memory.ack(lease)
    waiting.join(30)
    assert [lease.data for lease in memory.lease()] == [b"two"]
    assert memory.stats().dropped["timeout"] == 0


def test_everything_arrives_and_close_empties_it() -> None:
    exporter = FailingExporter([DOWN, None, DOWN])
    sender = SendQueue(MemoryQueue(), exporter, quick()).start()
    push_all(sender, numbered(50))
    sender.close()
    assert sorted(exporter.batches) == numbered(50)
    stats = sender.stats()
    assert stats.data_loss == 0
    assert stats.queue.acked == 50
    assert stats.queue.redelivered >= 2


def test_what_is_lost_at_the_end_is_counted() -> None:
    exporter = failing()
    sender = SendQueue(MemoryQueue(), exporter, quick()).start()
    sender.push(b"one")
    sender.close(timeout=0.1)
    assert sender.stats().data_loss == 1


def test_a_refused_batch_is_kept_with_its_reason() -> None:
    exporter = FailingExporter([PermanentExportError("400")])
    with SendQueue(MemoryQueue(), exporter, quick()) as sender:
        sender.push(b"bad")
        assert sender.flush()
        assert sender.stats().queue.dead_lettered == 1
        assert sender.replay_dead_letters("500") == 0
        assert sender.replay_dead_letters("400") == 1
        assert sender.flush()
    assert exporter.batches == [b"bad"]


def test_dead_letters_beyond_the_latest_thousand_are_counted_as_dropped() -> None:
    memory = SendMemory(MemoryQueue())
    for number in range(1003):
        memory.bury(b"%d" % number, "400")
    assert (memory.stats().dead_lettered, memory.stats().dead_letters_dropped) == (1003, 3)
    assert memory.dead_letters[0].data == b"3"


def test_what_is_on_lease_counts_toward_the_limits_and_the_oldest_goes() -> None:
    memory = SendMemory(MemoryQueue(max_size=3, max_bytes=100))
    for batch in (b"1", b"2", b"3"):
        memory.push(batch)
    first, second = memory.lease(2)
    assert memory.push(b"4") == 1  # 3 goes: the oldest that is not on lease
    memory.nack(first, 60.0)
    assert memory.push(b"5") == 1  # now 1 is
    memory.nack(second)
    assert [lease.data for lease in memory.lease(10)] == [b"2", b"4", b"5"]
    assert memory.push(b"6") == 1  # all are on lease: 2 will not come again
    memory.nack(second)
    assert (len(memory), memory.size_bytes, memory.evicted) == (3, 3, 3)
    assert [lease.data for lease in memory.lease(10)] == [b"6"]


def test_its_bytes_on_lease_are_bounded_too() -> None:
    memory = SendMemory(MemoryQueue(max_size=100, max_bytes=100))
    memory.push(bytes(60))
    memory.lease()
    memory.push(bytes(40))
    assert memory.size_bytes == 100
    memory.push(bytes(40))
    assert memory.size_bytes == 100


def test_a_dead_letter_that_finds_no_room_stays_one() -> None:
    memory = SendMemory(MemoryQueue(max_size=2), FullBehavior.DROP_NEWEST)
    for reason in ("first", "second", "third"):
        memory.bury(reason.encode(), reason)
    with pytest.raises(QueueFull):
        memory.replay_dead_letters()
    assert [lease.data for lease in memory.lease(9)] == [b"first", b"second"]
    assert [letter.reason for letter in memory.dead_letters] == ["third"]


def test_two_may_replay_dead_letters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SendMemory(MemoryQueue())
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


def test_the_age_of_what_waits_is_known() -> None:
    clock = FakeClock()
    memory = SendMemory(MemoryQueue(max_size=2, clock=clock), clock=clock)
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


def test_what_is_pushed_is_kept_as_it_was_and_has_to_be_bytes() -> None:
    exporter = MemoryExporter()
    sender = SendQueue(MemoryQueue(), exporter, quick())
    buffer = bytearray(b"one")
    sender.push(buffer)  # type: ignore[arg-type]
    buffer[:] = b"two"
    with pytest.raises(TypeError, match="a block is bytes, not str"):
        sender.push("text")  # type: ignore[arg-type]
    sender.start().close()
    assert exporter.batches == [b"one"]


def test_after_max_attempts_a_batch_is_a_dead_letter() -> None:
    broken = TransientExportError("broken", ErrorClass.SERVER_ERROR)
    exporter = FailingExporter(poison=(b"bad", broken))
    with SendQueue(MemoryQueue(), exporter, quick(max_attempts=3)) as sender:
        push_all(sender, (b"bad", b"good"))
        wait_until(lambda: not len(sender))
        assert sender.stats().queue.dead_lettered == 1
    assert exporter.batches == [b"good"]
    assert exporter.attempts.count(b"bad") == 3


def test_freshest_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="order must be 'fifo' for a queue in memory, got 'freshest'"):
        SendQueue(MemoryQueue(), MemoryExporter(), quick(order="freshest"))
    with pytest.raises(ConfigError, match="order must be 'fifo' where type is 'memory', got 'freshest'"):
        quick(order="freshest", type="memory")
