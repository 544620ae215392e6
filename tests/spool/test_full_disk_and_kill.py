"""A disk that is full, and a process that is killed then: what the next one finds, and what it is able to do."""

import shutil
from pathlib import Path

import pytest

from penstock.errors import DiskFull
from penstock.spool import Durability, FastQueue, FastQueueConfig
from tests.spool.damage import chunk_paths
from tests.spool.test_full_disk import BLOCK, SmallDisk, blocks, drained, taken_of


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
        assert drained(queue) == taken
        assert len(taken_of(queue, blocks(3))) == 3
        assert queue.stats().chunks == 1
