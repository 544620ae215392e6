"""A disk that has room for so many bytes: what lies there is counted, and a write that does not fit gets what does."""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import DiskFull
from penstock.spool import Durability, FastQueue, FastQueueConfig, Lease
from penstock.spool.files import OsSpoolFiles
from penstock.testing import FakeClock
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles

BLOCK = 10_000


class SmallDisk(OsSpoolFiles):
    """Real files, of which those in `folder` have no more than `capacity` bytes for blocks."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.capacity = capacity
        self.asked = 0  # bytes that were to be written

    def pwritev(self, handle: int, buffers: Sequence[bytes], offset: int, /) -> int:  # type: ignore[override]
        data = b"".join(buffers)
        self.asked += len(data)
        used = sum(path.stat().st_size for path in self.folder.iterdir() if len(path.name) == 16)
        growth = max(0, offset + len(data) - os.fstat(handle).st_size)
        fits = len(data) - max(0, used + growth - self.capacity)
        if fits <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(handle, data[:fits], offset)


def blocks(count: int) -> list[bytes]:
    return [b"%010d" % number * (BLOCK // 10) for number in range(count)]


def taken_of(queue: FastQueue, given: list[bytes]) -> list[bytes]:
    """Those of them that it takes."""
    taken = []
    for block in given:
        try:
            queue.push(block)
        except DiskFull:
            continue
        taken.append(block)
    return taken


@pytest.mark.parametrize("durability", list(Durability))
def test_a_queue_that_was_drained_leaves_its_room_to_what_comes_next(tmp_path: Path, durability: Durability) -> None:
    disk = SmallDisk(tmp_path, 8 * BLOCK)
    config = FastQueueConfig(
        durability=durability, inmemory_blocks=1, compression="none", meta_sync_interval=3600, stale_flush=3600
    )
    with FastQueue(tmp_path, config, files=disk) as queue:
        for _ in range(3):
            taken = taken_of(queue, blocks(20))
            assert 7 <= len(taken) <= 8 + (durability is Durability.MEMORY)
            assert drain(queue) == taken
            assert queue.stats().chunks == 1
    with FastQueue(tmp_path, config) as queue:
        assert len(queue) == 0
        assert queue.stats().lost_blocks == 0


def test_what_is_not_drained_stays_whatever_the_disk_refuses(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 8 * BLOCK)
    config = FastQueueConfig(durability=Durability.DISK, compression="none", meta_sync_interval=3600)
    with FastQueue(tmp_path, config, files=disk) as queue:
        taken = taken_of(queue, blocks(20))
        leases = queue.lease(len(taken))
        queue.ack(leases[:-1])
        assert taken_of(queue, blocks(20)) == []
        queue.nack(leases[-1])
        assert drain(queue) == taken[-1:]
        assert taken_of(queue, blocks(20))


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_a_kill_before_the_meta_that_has_no_room_leaves_the_right_count(tmp_path: Path, durability: Durability) -> None:
    disk = SmallDisk(tmp_path / "queue", 8 * BLOCK)
    config = FastQueueConfig(durability=durability, chunk_size=2 * BLOCK, compression="none", meta_sync_interval=3600)
    with FastQueue(tmp_path / "queue", config, files=disk) as queue:
        taken = taken_of(queue, blocks(20))
        disk.capacity = 0
        queue.ack(queue.lease(4))
        queue._syncer.run_once()  # no room for a meta, so the room of what is done is given back
        assert queue.stats().chunks < len(taken)
        disk.capacity = 20 * BLOCK
        more = taken_of(queue, blocks(3))
        shutil.copytree(tmp_path / "queue", tmp_path / "killed")
    with FastQueue(tmp_path / "killed", config) as queue:
        assert len(queue) == len(taken) - 4 + 3
        assert queue.size_bytes == len(queue) * BLOCK
        assert drain(queue) == taken[4:] + more
        assert queue.stats().lost_blocks == 0


def test_a_spill_keeps_what_there_is_room_for(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 8 * BLOCK)
    config = FastQueueConfig(inmemory_blocks=20, compression="none", meta_sync_interval=3600, stale_flush=3600)
    queue = FastQueue(tmp_path, config, files=disk)
    given = blocks(40)
    taken = taken_of(queue, given)
    assert taken == given[:27]  # in memory and on the disk, in order
    disk.asked = 0
    assert taken_of(queue, given[:10]) == []
    assert disk.asked <= 10 * (BLOCK + 1000)  # a push tries one block, not all that is in memory
    disk.capacity = 100 * BLOCK
    assert taken_of(queue, given[27:]) == given[27:]
    assert drain(queue) == given
    queue.close()


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_a_spill_that_ends_halfway_loses_nothing_that_is_on_lease(tmp_path: Path, order: str) -> None:
    disk = SmallDisk(tmp_path, 8 * BLOCK)
    config = FastQueueConfig(
        inmemory_blocks=20,
        compression="none",
        meta_sync_interval=3600,
        stale_flush=3600,
        order=order,  # type: ignore[arg-type]
    )
    given = blocks(20)
    queue = FastQueue(tmp_path, config, files=disk)
    queue.push_many(given)
    leases = queue.lease(12)
    queue.ack(leases[::3])
    done = [lease.data for lease in leases[::3]]
    with pytest.raises(DiskFull):
        queue.flush()
    for lease in leases:
        queue.nack(lease)  # those that are done are passed over
    disk.capacity = 100 * BLOCK
    queue.close()
    with FastQueue(tmp_path, config) as queue:
        out = drain(queue)
        expected = [block for block in given if block not in done]
        assert sorted(out) == expected
        assert out == (expected if order == "fifo" else expected[::-1])
        assert queue.stats().lost_blocks == 0


def test_dead_letters_that_cannot_be_written_are_one_line_until_one_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room = iter([False, False, True, False, False])
    clock = FakeClock()
    with FastQueue(tmp_path, clock=clock) as queue:
        bury = queue._dead.push

        def bury_if_there_is_room(lease: Lease, reason: str) -> None:
            if not next(has_room):
                raise DiskFull("no room on the disk")
            bury(lease, reason)

        monkeypatch.setattr(queue._dead, "push", bury_if_there_is_room)
        queue.push_many(blocks(2))
        for _ in range(5):
            clock.advance(10.0)
            queue.reject(queue.lease()[0], "400")
        assert len(queue) == 1
    assert sum("Dead letters cannot be written" in record.msg for record in caplog.records) == 2


@pytest.mark.parametrize("left", [0, 1])
def test_a_chunk_that_went_without_a_meta_does_not_make_what_a_kill_skipped_look_lost(left: int) -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, chunk_size=1000, compression="none", meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    assert len(taken_of(queue, blocks(left))) == left
    files.kill()
    queue = FastQueue("q", config, files=files)  # its sequences begin behind those that the kill skipped
    given = [block[:700] for block in blocks(10)]
    assert taken_of(queue, given) == given
    queue.ack(queue.lease(left + 5))
    files._fault = lambda call, number: errno.ENOSPC if call == "write" else None
    queue._syncer.run_once()  # the chunks go, and no meta says since when
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    counts = []
    for block in given[5:]:
        counts.append(len(queue))
        assert queue.pop() == block
    assert counts == [5, 4, 3, 2, 1]
    assert queue.stats().lost_blocks == 0


def test_one_ack_of_blocks_before_and_behind_the_meta_leaves_the_right_count() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, chunk_size=1000, compression="none", meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    given = [block[:700] for block in blocks(12)]  # each in a chunk of its own
    assert taken_of(queue, given[:3]) == given[:3]
    queue._syncer.run_once()
    assert taken_of(queue, given[3:]) == given[3:]
    queue.ack(queue.lease(6))  # one record: three that the meta has counted, three that it has not
    files._fault = lambda call, number: errno.ENOSPC if call == "write" else None
    queue._syncer.run_once()  # the chunks go, and no meta says so
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert len(queue) == 6
    assert queue.size_bytes == 6 * 700
    assert drain(queue) == given[6:]
    assert queue.stats().lost_blocks == 0


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_what_was_drained_before_a_kill_leaves_its_room_too(tmp_path: Path, durability: Durability) -> None:
    config = FastQueueConfig(durability=durability, compression="none", meta_sync_interval=3600)
    with FastQueue(tmp_path / "queue", config, files=SmallDisk(tmp_path / "queue", 8 * BLOCK)) as queue:
        taken = taken_of(queue, blocks(20))
        assert drain(queue) == taken
        shutil.copytree(tmp_path / "queue", tmp_path / "killed")  # its meta does not say that all is done
    with FastQueue(tmp_path / "killed", config, files=SmallDisk(tmp_path / "killed", 8 * BLOCK)) as queue:
        assert taken_of(queue, blocks(20)) == taken
        assert drain(queue) == taken
        assert queue.stats().chunks == 1
