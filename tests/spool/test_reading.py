"""Blocks that are handed out from memory and from the log: the same ones, in order, none of them twice."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.errors import DiskFailed
from penstock.spool import frame_cache
from penstock.spool.config import Order
from penstock.spool.frame_cache import FrameCache
from penstock.spool.lease import FrameRef, Lease
from tests.spool.damage import chunk_paths, drain, flip, numbered
from tests.spool.fake_files import FakeFiles

DISK = FastQueueConfig(durability=Durability.DISK, compression="none", meta_sync_interval=3600)


def reopened(files: FakeFiles, blocks: list[bytes], config: FastQueueConfig = DISK) -> FastQueue:
    """A queue with these blocks, none of them in memory."""
    queue = FastQueue("q", config, files=files)
    for block in blocks:
        queue.push(block)
    files.kill()
    return FastQueue("q", config, files=files)


def frame(offset: int, data: bytes = b"x") -> tuple[FrameRef, int, Lease]:
    return FrameRef(offset, offset, offset + 1), offset + 10, Lease(offset, 1, data, 0.0)


def test_a_frame_is_given_to_a_reader_that_stands_exactly_there() -> None:
    kept = FrameCache(most_blocks=10)
    for offset in (0, 10, 20):
        kept.add(*frame(offset), reader_offset=0)
    assert kept.take(0) == frame(0)
    assert kept.take(5) is None
    assert kept.take(20) == frame(20)
    assert kept.take(20) is None


def test_nothing_is_kept_behind_a_frame_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_cache, "_MOST_BYTES", 5)
    kept = FrameCache(most_blocks=3)
    kept.add(*frame(10), reader_offset=0)  # the reader has others to read first
    kept.add(*frame(0), reader_offset=0)
    kept.add(*frame(10, b"too large"), reader_offset=0)
    kept.add(*frame(20), reader_offset=0)  # there is room, but not for the one before
    assert kept.take(0) == frame(0)
    assert kept.take(10) is None
    assert kept.take(20) is None


def test_a_consumer_that_keeps_up_does_not_depend_on_reads() -> None:
    files = FakeFiles()
    queue = FastQueue("q", FastQueueConfig(durability=Durability.DISK, meta_sync_interval=3600), files=files)
    queue.push(b"before")
    files.reads_fail = True
    for i in range(100):
        queue.push(b"%d" % i)
        assert [lease.data for lease in queue.lease()] == [b"before" if i == 0 else b"%d" % (i - 1)]
    files.reads_fail = False
    queue.close()


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_the_order_is_kept_across_what_is_in_memory_and_what_is_not(tmp_path: Path, durability: Durability) -> None:
    config = FastQueueConfig(durability=durability, inmemory_blocks=3, chunk_size=300, compression="none")
    blocks = [b"%03d" % i * 10 for i in range(60)]
    out = []
    with FastQueue(tmp_path, config) as queue:
        for at in range(0, 60, 6):
            for block in blocks[at : at + 4]:
                queue.push(block)
            queue.push_many(blocks[at + 4 : at + 6])
            out += [lease.data for lease in queue.lease(1 + at % 5)]
        assert len(chunk_paths(tmp_path)) > 3
        leased = len(out)
        out += drain(queue)
        assert len(queue) == leased
        assert queue.stats().lost_blocks == 0
    assert out == blocks
    with FastQueue(tmp_path, config) as queue:
        assert drain(queue) == blocks[:leased]


@pytest.mark.parametrize("compression", ["none", "snappy", "lz4", "zstd"])
def test_frames_of_one_block_and_of_many_come_in_order(tmp_path: Path, compression: str) -> None:
    config = replace(DISK, compression=compression, chunk_size=2000)  # type: ignore[arg-type]
    blocks = numbered(200)
    with FastQueue(tmp_path, config) as queue:
        for at in range(0, 200, 20):
            for block in blocks[at : at + 17]:
                queue.push(block)
            queue.push_many(blocks[at + 17 : at + 20])  # share a frame
    with FastQueue(tmp_path, config) as queue:
        out = [lease.data for most in (1, 1, 7, 1, 30) for lease in queue.lease(most)]
        queue.push(b"the youngest")
        assert out + drain(queue) == [*blocks, b"the youngest"]
        assert len(chunk_paths(tmp_path)) > 3
        assert len(queue) == len(out)
        assert queue.stats().lost_blocks == 0


@pytest.mark.parametrize("damaged", range(8))
@pytest.mark.parametrize("place", [9, 20, 60], ids=["magic", "fields", "body"])
def test_damage_in_a_row_of_frames_costs_its_block_only(tmp_path: Path, damaged: int, place: int) -> None:
    blocks = [b"%d" % i * 40 for i in range(10)]
    with FastQueue(tmp_path, DISK) as queue:
        for block in blocks:
            queue.push(block)
    flip(chunk_paths(tmp_path)[0], damaged * (56 + 40) + place)
    with FastQueue(tmp_path, DISK) as queue:
        assert drain(queue) == [block for i, block in enumerate(blocks) if i != damaged]
        assert queue.stats().lost_blocks == queue.stats().damaged_regions == 1


def test_a_read_that_fails_keeps_nothing_back_that_could_be_read() -> None:
    files = FakeFiles()
    queue = reopened(files, [b"%05d" % i * 10_000 for i in range(5)])
    files.unreadable_from = 2 * (56 + 50_000) + 100
    assert [queue.pop(), queue.pop()] == [b"00000" * 10_000, b"00001" * 10_000]
    for _ in range(2):
        with pytest.raises(DiskFailed):
            queue.pop()
    files.unreadable_from = 1 << 62
    assert drain(queue) == [b"%05d" % i * 10_000 for i in range(2, 5)]
    queue.close()


@pytest.mark.parametrize("size", [10, 1_000, 50_000, 300_000])
def test_a_backlog_is_read_once(size: int) -> None:
    files = FakeFiles()
    blocks = [b"%010d" % i * (size // 10) for i in range(max(10, min(2_000, 2_000_000 // size)))]
    queue = reopened(files, blocks)
    files.bytes_read = 0
    assert drain(queue) == blocks
    length = sum(map(len, blocks)) + 56 * len(blocks)
    assert files.bytes_read <= 1.2 * length + 64 * 1024
    queue.close()


def test_a_block_that_was_not_handed_out_has_no_attempt() -> None:
    files = FakeFiles()
    queue = reopened(files, numbered(10))
    assert [lease.attempts for lease in queue.lease(1)] == [1]
    files.kill()
    with FastQueue("q", DISK, files=files) as queue:
        assert [lease.attempts for lease in queue.lease(10)] == [2] + [1] * 9


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("left", [0, 1])
def test_sequences_that_a_kill_skipped_are_done_and_not_lost(left: int, order: Order) -> None:
    files = FakeFiles()
    config = replace(DISK, chunk_size=1000, order=order)
    queue = FastQueue("q", config, files=files)
    queue.push(bytes(200))
    assert queue.pop() is not None
    for _ in range(left):
        queue.push(bytes(100))
    queue._syncer.run_once()
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert [len(block) for block in drain(queue)] == [100] * left
    blocks = [bytes([number]) * 700 for number in range(10)]  # each in a chunk of its own
    for block in blocks:
        queue.push(block)
    queue.ack(sorted(queue.lease(10))[:5])  # the oldest of them
    queue._syncer.run_once()
    assert queue.stats().chunks == 5
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert len(queue) == 5
    assert drain(queue) == (blocks[5:] if order == "fifo" else blocks[:4:-1])
    assert queue.stats().lost_blocks == 0


def test_a_backlog_comes_whole_however_many_kills_it_has_seen() -> None:
    files, blocks = FakeFiles(), numbered(50)
    queue = reopened(files, blocks)
    queue.push(b"behind what the kill has skipped")
    queue.ack(queue.lease(20)[10:])
    files.kill()
    queue = FastQueue("q", DISK, files=files)
    queue.ack(queue.lease(10))
    assert [queue.pop(), queue.pop()] == blocks[20:22]
    assert drain(queue) == [*blocks[22:], b"behind what the kill has skipped"]
    assert len(queue) == 0
