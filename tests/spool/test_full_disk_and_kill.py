"""A disk that is full, and a process that is killed then: what the next one finds, and what it is able to do."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import DiskFailed, DiskFull
from penstock.spool import Durability, FastQueue, FastQueueConfig, journal
from penstock.spool.config import Order
from tests.spool.damage import chunk_paths, drain
from tests.spool.fake_files import FakeFiles
from tests.spool.test_full_disk import BLOCK, SmallDisk, blocks, taken_of

DISK = FastQueueConfig(durability=Durability.DISK, compression="none", meta_sync_interval=3600)


def fill(files: FakeFiles) -> None:
    """Leave no room for anything that grows."""
    files._fault = lambda call, number: errno.ENOSPC if call in ("write", "map", "create") else None


def killed(folder: Path) -> Path:
    """The folder as a kill would leave it now."""
    copy = folder.with_name(folder.name + "-killed")
    shutil.copytree(folder, copy)
    return copy


def test_a_chunk_that_a_full_disk_left_empty_before_a_kill_does_not_keep_the_one_before(tmp_path: Path) -> None:
    config = FastQueueConfig(
        durability=Durability.DISK, compression="none", chunk_size=5 * BLOCK, meta_sync_interval=3600
    )
    disk = SmallDisk(tmp_path / "queue", 5 * BLOCK)
    with FastQueue(tmp_path / "queue", config, files=disk) as queue:
        taken = taken_of(queue, blocks(4))
        disk.capacity = sum(path.stat().st_size for path in chunk_paths(tmp_path / "queue"))
        with pytest.raises(DiskFull):
            queue.push(bytes(BLOCK))  # the next chunk has its name, and not a byte
        folder = killed(tmp_path / "queue")
        disk.capacity *= 2
    assert [path.stat().st_size for path in chunk_paths(folder)][1:] == [0]
    with FastQueue(folder, config, files=SmallDisk(folder, 4 * BLOCK + 1000)) as queue:  # a meta fits, no block does
        assert drain(queue) == taken
        assert len(taken_of(queue, blocks(3))) == 3
        assert queue.stats().chunks == 1


def test_a_journal_goes_on_where_a_full_disk_has_no_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "ROTATE_BYTES", 10 * journal.RECORD_SIZE)
    files = FakeFiles()
    queue = FastQueue("q", DISK, files=files)
    queue.push_many([b"%d" % number for number in range(50)])
    assert queue.pop() == b"0"
    fill(files)
    for number in range(1, 40):
        assert queue.pop() == b"%d" % number
        queue._syncer.run_once()  # no room for a meta either
    files.heal()
    files.kill()
    queue = FastQueue("q", DISK, files=files)
    assert len(queue) == 10
    assert drain(queue) == [b"%d" % number for number in range(40, 50)]


def test_what_is_acked_after_a_close_that_failed_is_not_forgotten_by_a_kill() -> None:
    files = FakeFiles()
    queue = FastQueue("q", DISK, files=files)
    queue.push_many([b"%d" % number for number in range(50)])
    assert queue.pop() == b"0"
    fill(files)
    with pytest.raises(DiskFull):
        queue.close()
    for number in range(1, 40):
        assert queue.pop() == b"%d" % number
    files.heal()
    files.kill()
    assert drain(FastQueue("q", DISK, files=files)) == [b"%d" % number for number in range(40, 50)]


@pytest.mark.parametrize("durability", list(Durability))
def test_a_queue_goes_on_behind_a_meta_that_says_it_was_closed(durability: Durability) -> None:
    config, files = replace(DISK, durability=durability), FakeFiles()
    queue = FastQueue("q", config, files=files)
    given = list(queue.push_many([b"%d" % number for number in range(10)]))
    assert queue.pop() == b"0"
    files._fault = lambda call, number: errno.EIO if call == "sync_folder" and "rename" in files.calls else None
    files.calls.clear()
    with pytest.raises(DiskFailed):
        queue.close()
    files.heal()
    assert [queue.pop() for _ in range(5)] == [b"%d" % number for number in range(1, 6)]
    given.append(queue.push(b"10"))
    files.kill()
    queue = FastQueue("q", config, files=files)
    given.append(queue.push(b"11"))
    assert given == sorted(set(given))
    assert queue.stats().lost_blocks == 0
    if durability is not Durability.MEMORY:
        assert drain(queue) == [b"%d" % number for number in range(6, 12)]


def test_a_journal_that_was_closed_is_not_begun_again_where_no_meta_can_say_so() -> None:
    files = FakeFiles()
    with FastQueue("q", DISK, files=files) as queue:
        queue.push_many([b"%d" % number for number in range(50)])
        assert [queue.pop() for _ in range(10)] == [b"%d" % number for number in range(10)]
    assert not journal.journal_generations(files, "q")
    files._fault = lambda call, number: errno.ENOSPC if call == "write" else None  # a journal fits, a meta does not
    queue = FastQueue("q", DISK, files=files)
    assert [queue.pop() for _ in range(10)] == [b"%d" % number for number in range(10, 20)]
    files.kill()
    files.heal()
    assert FastQueue("q", DISK, files=files).pop() == b"20"


def leave_torn(files: FakeFiles, queue: FastQueue) -> None:
    """The frame behind the meta is on its way when the process is killed."""
    end = len(files.names_now["q/0000000000000000"].written)
    queue.push(bytes(700))
    del files.names_now["q/0000000000000000"].written[end + 100 :]


def leave_empty(files: FakeFiles, queue: FastQueue) -> None:
    """What came after the meta is acked, and its chunks have gone for the sake of a full disk."""
    queue.push_many([bytes(700)] * 3)
    queue.ack(queue.lease(10))
    fill_for_metas(files)
    queue._syncer.run_once()


def fill_for_metas(files: FakeFiles) -> None:
    files._fault = lambda call, number: errno.ENOSPC if call == "write" else None


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("leave", [leave_torn, leave_empty])
def test_where_no_frame_follows_the_meta_what_a_kill_skipped_is_not_lost(
    order: Order, leave: Callable[[FakeFiles, FastQueue], None]
) -> None:
    config, files = replace(DISK, chunk_size=1000, order=order), FakeFiles()
    queue = FastQueue("q", config, files=files)
    queue.push_many([b"first", b"second"])
    queue._syncer.run_once()
    leave(files, queue)
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    given = [bytes([number]) * 700 for number in range(10)]
    for block in given:
        queue.push(block)
    leases = queue.lease(12)
    queue.ack([lease for lease in leases if lease.data not in given[5:]])
    if order == "fifo":
        fill_for_metas(files)
    queue._syncer.run_once()
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert [len(queue) for _ in range(5) if queue.pop()] == [4, 3, 2, 1, 0]
    assert queue.pop() is None
    assert queue.stats().lost_blocks == 0


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
def test_chunks_that_went_with_neither_meta_nor_journal_leave_the_right_count(
    order: Order, durability: Durability
) -> None:
    config = replace(DISK, durability=durability, chunk_size=1000, order=order, inmemory_blocks=1)
    files = FakeFiles()
    queue = FastQueue("q", config, files=files)
    for number in range(12):
        queue.push(bytes([number]) * 700)
    fill(files)
    leases = sorted(queue.lease(12))
    queue.ack(leases[:8])
    queue._syncer.run_once()
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    counts = []
    while (count := len(queue)) and queue.pop():
        counts.append(count)
    assert counts == list(range(len(counts), 0, -1))
    assert len(counts) == 4 - (durability is Durability.MEMORY)  # its last block was never on the disk


def test_a_meta_follows_at_once_on_chunks_that_went_for_its_sake(tmp_path: Path) -> None:
    config = replace(DISK, durability=Durability.MEMORY, chunk_size=2 * BLOCK, inmemory_blocks=1)
    disk = SmallDisk(tmp_path, 20 * BLOCK)
    with FastQueue(tmp_path, config, files=disk) as queue:
        assert len(taken_of(queue, blocks(9))) == 9
        queue.flush()
        disk.capacity = 9 * BLOCK
        queue.ack(queue.lease(4))
        queue._syncer.run_once()
        with FastQueue(killed(tmp_path), config) as other:
            assert len(other) == 5
            assert drain(other) == blocks(9)[4:]
            assert other.stats().lost_blocks == 0


def test_a_kill_while_a_batch_is_taken_back_makes_no_block_look_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    config, files = replace(DISK, chunk_size=1000, write_buffer_size=300), FakeFiles()
    queue = FastQueue("q", config, files=files)
    queue.push(bytes(900))
    gone: list[str] = []
    unlink = files.unlink

    def killed_at_the_third(path: str) -> None:
        gone.append(path)
        if len(gone) == 3:
            raise KeyboardInterrupt
        unlink(path)

    files.calls.clear()
    files._fault = lambda call, number: errno.ENOSPC if files.calls.count("write") > 6 and call == "write" else None
    monkeypatch.setattr(files, "unlink", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        queue.push_many([bytes([number]) * 700 for number in range(1, 11)])
    monkeypatch.setattr(files, "unlink", unlink)
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    left = len(queue)
    assert [block[0] for block in drain(queue)] == list(range(left))
    assert queue.stats().lost_blocks == 0


def test_one_ack_of_blocks_of_many_sizes_leaves_the_bytes_of_those_that_are_left() -> None:
    config, files = replace(DISK, chunk_size=1000), FakeFiles()
    queue = FastQueue("q", config, files=files)
    for length in [900] * 9 + [10, 20]:
        queue.push(bytes(length))
    queue.ack(queue.lease(10))  # one record, and the block of 10 bytes shares its chunk with the last one
    fill_for_metas(files)
    queue._syncer.run_once()
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert (len(queue), queue.size_bytes) == (1, 20)
    assert drain(queue) == [bytes(20)]
    assert queue.size_bytes == 0


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_what_was_drained_before_a_kill_leaves_its_chunks_when_the_folder_is_opened(order: Order) -> None:
    config, files = replace(DISK, chunk_size=1000, order=order), FakeFiles()
    queue = FastQueue("q", config, files=files)
    for _ in range(5):
        queue.push(bytes(700))
    assert len(drain(queue)) == 5
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert queue.stats().chunks == 1
    queue.push(b"next")
    assert drain(queue) == [b"next"]


def test_a_push_that_makes_room_for_its_own_meta_is_taken(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "queue", 20 * BLOCK)
    with FastQueue(tmp_path / "queue", DISK, files=disk) as queue:
        assert len(taken_of(queue, blocks(5))) == 5
        assert len(drain(queue)) == 5
        folder = killed(tmp_path / "queue")
    with FastQueue(folder, DISK, files=SmallDisk(folder, 5 * BLOCK)) as queue:
        assert len(taken_of(queue, blocks(3))) == 3
