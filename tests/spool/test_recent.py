"""Blocks that are handed out without being read back: the same ones, in the same order, and only so many."""

from pathlib import Path

import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.spool import recent
from penstock.spool.lease import Lease
from penstock.spool.recent import FrameRef, Recent
from tests.spool.damage import chunk_paths, drain
from tests.spool.fake_files import FakeFiles


def frame(offset: int, data: bytes = b"x") -> tuple[FrameRef, int, list[Lease], int]:
    return FrameRef(offset, offset, offset + 1), offset + 10, [Lease(offset, 1, data, 0.0)], len(data)


def test_a_frame_is_given_to_a_reader_that_stands_exactly_there() -> None:
    kept = Recent(most_blocks=10)
    for offset in (0, 10, 20):
        kept.add(*frame(offset), reader_offset=0)
    assert kept.take(0) == frame(0)
    assert kept.take(5) is None
    assert kept.take(20) == frame(20)
    assert kept.take(20) is None


def test_nothing_is_kept_behind_a_frame_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_MOST_BYTES", 5)
    kept = Recent(most_blocks=3)
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
