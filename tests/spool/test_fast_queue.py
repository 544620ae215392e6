"""What every FastQueue does, whatever its durability, compression and order."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from penstock import (
    BlockTooLarge,
    Durability,
    FastQueue,
    FastQueueConfig,
    Lease,
    QueueClosed,
)
from penstock.spool import backlog
from penstock.testing import FakeClock, wait_until
from tests.spool.damage import Open, drain, numbered
from tests.spool.fake_files import FakeFiles


def test_blocks_come_out_as_they_went_in(open_queue: Open) -> None:
    queue = open_queue()
    for block in numbered(50):
        queue.push(block)
    queue.push_many(numbered(50, start=50))

    assert len(queue) == 100
    assert queue.size_bytes == sum(map(len, numbered(100)))
    assert drain(queue) == numbered(100)
    assert len(queue) == queue.size_bytes == 0


@pytest.mark.parametrize("compression", ["none", "snappy", "lz4", "zstd"])
def test_every_compression_brings_back_the_same_bytes(open_queue: Open, compression: str) -> None:
    blocks = [b"", b"x", os.urandom(3000), b"abc" * 5000, bytes(20_000)]
    queue = open_queue(compression=compression)
    for block in blocks:
        queue.push(block)
    queue.push_many(blocks)
    queue.close()

    assert drain(open_queue(compression=compression)) == blocks * 2


def test_sequences_grow_by_one_within_a_batch(open_queue: Open) -> None:
    queue = open_queue()
    first = queue.push(b"one")
    assert queue.push_many([b"two", b"three"]) == range(first + 1, first + 3)
    assert queue.push_many([]) == range(0)
    assert [lease.sequence for lease in queue.lease(3)] == [first, first + 1, first + 2]


def test_acks_may_come_in_any_order(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(20))
    leases = queue.lease(20)
    queue.ack(leases[7])
    queue.ack([leases[3], leases[1], leases[2]])
    queue.close()

    queue = open_queue()
    assert [lease.data for lease in queue.lease(20)] == [
        block for i, block in enumerate(numbered(20)) if i not in (1, 2, 3, 7)
    ]


def test_what_was_leased_and_not_acked_comes_back_in_order_with_its_attempts(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(6))
    assert [lease.attempts for lease in queue.lease(3)] == [1, 1, 1]
    queue.close()

    queue = open_queue()
    assert [(lease.data, lease.attempts) for lease in queue.lease(6)] == list(
        zip(numbered(6), [2, 2, 2, 1, 1, 1], strict=True)
    )


def test_a_nacked_block_keeps_its_place(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(5))
    first, second, *_ = queue.lease(3)
    queue.nack(second)
    queue.nack(first)

    assert [(lease.data, lease.attempts) for lease in queue.lease(3)] == [
        (numbered(5)[0], 2),
        (numbered(5)[1], 2),
        (numbered(5)[3], 1),
    ]


def test_a_nacked_block_waits_for_its_delay(open_queue: Open) -> None:
    clock = FakeClock()
    queue = open_queue(clock=clock, meta_sync_interval=3600)
    queue.push_many(numbered(2))
    queue.nack(queue.lease()[0], delay=10.0)

    assert [lease.data for lease in queue.lease(5)] == numbered(2)[1:]
    clock.advance(9.9)
    assert queue.lease() == []
    clock.advance(0.1)
    assert [lease.data for lease in queue.lease()] == numbered(1)


def test_a_waiting_lease_wakes_when_a_nacked_block_is_due(open_queue: Open) -> None:
    queue = open_queue()
    queue.push(b"block")
    queue.nack(queue.lease()[0], delay=0.02)
    assert [lease.attempts for lease in queue.lease(timeout=10)] == [2]


def test_a_nacked_block_survives_a_restart_with_its_attempts(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(2))
    queue.nack(queue.lease()[0], delay=3600)
    queue.close()

    assert [(lease.data, lease.attempts) for lease in open_queue().lease(2)] == [
        (numbered(2)[0], 2),
        (numbered(2)[1], 1),
    ]


def test_a_lease_that_is_not_out_any_more_is_passed_over(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(3))
    leases = queue.lease(2)
    queue.ack(leases)
    queue.ack(leases)
    queue.ack(leases[0])
    queue.nack(leases[0])
    queue.ack(Lease(10**9, 1, b"never", 0.0))

    assert len(queue) == 1
    assert drain(queue) == numbered(3)[2:]


def test_a_lease_that_was_nacked_cannot_be_acked_and_comes_again(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(2))
    leases = queue.lease(2)
    queue.nack(leases[0])
    queue.ack(leases[0])
    queue.nack(leases[1])
    queue.ack(leases)

    assert [(lease.data, lease.attempts) for lease in queue.lease(2)] == [(block, 2) for block in numbered(2)]


def test_an_ack_may_leave_more_gaps_than_a_journal_has_room_for(open_queue: Open) -> None:
    queue = open_queue(max_size=100_000, inmemory_blocks=100_000, write_buffer_size="1Mi", chunk_size="10Mi")
    queue.push_many([b"%d" % i for i in range(70_000)])
    queue.ack(queue.lease(70_000)[::2])
    assert len(queue) == 35_000
    queue.close()
    left = open_queue(max_size=100_000).lease(70_000)
    assert [lease.data for lease in left] == [b"%d" % i for i in range(1, 70_000, 2)]


def test_so_many_acked_blocks_between_others_that_one_frame_cannot_count_them(open_queue: Open) -> None:
    queue = open_queue(max_size=100_000, inmemory_blocks=100_000, write_buffer_size="1Mi", chunk_size="10Mi")
    queue.push_many([b""] * 70_000)
    queue.ack([lease for lease in queue.lease(70_000) if lease.sequence % 60])
    queue.close()
    assert len(drain(open_queue(max_size=100_000))) == 70_000 // 60 + 1


def test_a_lease_of_no_blocks_is_a_mistake(open_queue: Open) -> None:
    with pytest.raises(ValueError, match="max_blocks must be >= 1, got 0"):
        open_queue().lease(0)


def test_blocks_are_leased_to_one_only(open_queue: Open) -> None:
    queue = open_queue(max_size=100_000)
    queue.push_many(numbered(2000))
    taken: list[bytes] = []

    def work() -> None:
        while leases := queue.lease(7):
            taken.extend(lease.data for lease in leases)
            queue.ack(leases)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(taken) == sorted(numbered(2000))


def test_many_pushers_and_leasers_lose_and_double_nothing(open_queue: Open) -> None:
    queue = open_queue(max_size=100_000)
    taken: list[bytes] = []

    def push(start: int) -> None:
        for block in numbered(100, start):
            queue.push(block)

    def work() -> None:
        with suppress(QueueClosed):
            while leases := queue.lease(5, timeout=30.0):
                taken.extend(lease.data for lease in leases)
                queue.ack(leases)

    threads = [threading.Thread(target=push, args=(i * 100,)) for i in range(8)]
    threads += [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads[:8]:
        thread.join()
    wait_until(lambda: len(taken) >= 800)
    queue.close()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(numbered(800))


def test_lease_waits_for_a_push(open_queue: Open) -> None:
    queue = open_queue()
    leased: list[Lease] = []
    thread = threading.Thread(target=lambda: leased.extend(queue.lease(timeout=30)))
    thread.start()
    wait_until(lambda: queue._state._not_empty.waiting)
    queue.push(b"late")
    thread.join()
    assert [lease.data for lease in leased] == [b"late"]


def test_a_block_is_bytes_and_a_view_is_copied(open_queue: Open) -> None:
    queue = open_queue()
    data = bytearray(b"before")
    queue.push(memoryview(data))  # type: ignore[arg-type]
    queue.push_many([data])  # type: ignore[list-item]
    data[:] = b"behind"
    assert drain(queue) == [b"before", b"before"]
    with pytest.raises(TypeError, match="a block is bytes, not str"):
        queue.push("text")  # type: ignore[arg-type]


def test_a_block_that_can_never_fit_has_its_own_error(open_queue: Open) -> None:
    queue = open_queue(max_block_bytes=100)
    queue.push(b"x" * 100)
    with pytest.raises(BlockTooLarge, match="101 bytes exceeds max_block_bytes = 100"):
        queue.push(b"x" * 101)
    with pytest.raises(BlockTooLarge):
        queue.push_many([b"small", b"x" * 101])
    assert len(queue) == 1


def test_sequences_are_never_used_twice_across_restarts(open_queue: Open) -> None:
    seen: set[int] = set()
    for _ in range(4):
        queue = open_queue()
        sequences = {*queue.push_many(numbered(10)), queue.push(b"one more")}
        assert not sequences & seen
        seen |= sequences
        while leases := queue.lease(100):
            queue.ack(leases)
        queue.close()


def test_not_even_a_kill_makes_the_queue_use_a_sequence_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "RESERVED_SEQUENCES", 5)
    files, seen = FakeFiles(), set[int]()
    for _ in range(3):
        queue = FastQueue("q", FastQueueConfig(meta_sync_interval=3600), files=files)
        sequences = [*(queue.push(block) for block in numbered(12)), *queue.push_many(numbered(9))]
        assert not seen & set(sequences)
        seen |= set(sequences)
        files.kill()
        queue._syncer.close()


def test_enqueued_at_is_when_the_block_was_pushed(open_queue: Open) -> None:
    clock = FakeClock(1000.0)
    queue = open_queue(clock=clock, meta_sync_interval=3600)
    for block in numbered(20):
        queue.push(block)
        clock.advance(0.5)
    queue.close()

    leases = open_queue(clock=clock).lease(20)
    assert [lease.enqueued_at for lease in leases] == pytest.approx([1000.0 + i / 2 for i in range(20)])


def test_a_drained_queue_gives_its_chunks_back(open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue(compression="none")
    queue.push_many([os.urandom(500) for _ in range(200)])
    queue.flush()
    assert queue.stats().chunks > 10
    while leases := queue.lease(10):
        queue.ack(leases)
    queue.flush()
    assert queue.stats().chunks == 1
    assert queue.stats().disk_bytes < 2048  # not even the last one, if it is large
    queue.push(b"and on it goes")
    queue.close()
    assert drain(open_queue()) == [b"and on it goes"]


def test_a_stuck_block_does_not_hold_the_chunks_behind_it(open_queue: Open) -> None:
    queue = open_queue(compression="none", max_size=1000)
    queue.push_many([b"%03d" % i + os.urandom(500) for i in range(200)])
    queue.flush()
    stuck = queue.lease()[0]
    while leases := queue.lease(10):
        queue.ack(leases)
    queue.flush()
    assert queue.stats().chunks == 2
    queue.close()

    queue = open_queue()
    assert [lease.data for lease in queue.lease(10)] == [stuck.data]
    assert queue.stats().lost_blocks == 0


def test_reopening_costs_no_blocks_and_no_counts(open_queue: Open) -> None:
    blocks = numbered(120)
    queue = open_queue()
    queue.push_many(blocks)
    out: list[bytes] = []
    for _ in range(12):
        leases = queue.lease(10)
        out += [lease.data for lease in leases]
        queue.ack(leases)
        assert (len(queue), queue.size_bytes) == (120 - len(out), sum(map(len, blocks[len(out) :])))
        queue.close()
        queue = open_queue()
        assert (len(queue), queue.size_bytes) == (120 - len(out), sum(map(len, blocks[len(out) :])))
    assert out == blocks


def test_newest_first_with_some_on_lease_survives_a_restart(open_queue: Open) -> None:
    queue = open_queue(order="freshest")
    queue.push_many(numbered(4))
    assert [lease.data for lease in queue.lease(2)] == numbered(4)[:1:-1]
    queue.close()
    assert [lease.data for lease in open_queue(order="freshest").lease(5)] == numbered(4)[::-1]


def test_opening_reads_as_little_with_a_large_backlog_as_with_a_small_one() -> None:
    read: dict[int, int] = {}
    for count in (10, 10_000):
        files = FakeFiles()
        config = FastQueueConfig(durability=Durability.DISK, max_size=10**6, meta_sync_interval=3600)
        with FastQueue("q", config, files=files) as queue:
            for at in range(0, count, 10):
                queue.push_many(numbered(10, at))
        files.bytes_read = 0
        with FastQueue("q", config, files=files) as queue:
            read[count] = files.bytes_read
            assert len(queue) == count
    assert read[10_000] < read[10] + 100


def test_a_block_that_was_spilled_behind_holes_of_large_ones_is_found_again(open_queue: Open) -> None:
    queue = open_queue()
    blocks = [b"%d" % i * 40_000 for i in range(6)]
    for block in blocks:
        queue.push(block)
    leases = queue.lease(6)
    queue.ack(leases[1:4])
    queue.flush()
    for lease in (leases[0], leases[4], leases[5]):
        queue.nack(lease)
    assert [lease.data for lease in queue.lease(9)] == [blocks[0], blocks[4], blocks[5]]
