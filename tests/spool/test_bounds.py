"""What bounds bytes rather than blocks: the memory layer and a lease; and failures that are not the block's."""

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, DiskFull, QueueFull
from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior
from penstock.spool.files import OsSpoolFiles

POLICY = "penstock.spool.capacity_policy"  # the logger of the queue's limits

KILOBYTE = bytes(1000)


def test_the_memory_layer_is_bounded_by_bytes_as_well(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(inmemory_bytes=5000)) as queue:
        for _ in range(5):
            queue.push(KILOBYTE)
        assert queue.stats().inmemory_blocks == 5
        queue.push(KILOBYTE)
        assert queue.stats().inmemory_blocks == 1
        assert queue.stats().disk_bytes > 0
        queue.push(bytes(6000))  # more than memory may hold at all
        assert [len(lease.data) for lease in queue.lease(100)] == [1000] * 6 + [6000]


def test_what_is_on_lease_counts_as_in_memory(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(inmemory_bytes=5000)) as queue:
        queue.push_many([KILOBYTE] * 5)
        leases = queue.lease(5)
        queue.push(KILOBYTE)
        assert queue.stats().disk_bytes > 0
        queue.ack(leases)
        assert len(queue.lease(100)) == 1


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_a_lease_is_bounded_by_bytes_but_never_empty_for_it(tmp_path: Path, durability: Durability, order: str) -> None:
    config = FastQueueConfig(durability=durability, order=order)  # type: ignore[arg-type]
    with FastQueue(tmp_path, config) as queue:
        queue.push_many([bytes(3000), bytes(3000), bytes(3000), bytes(9000)])
        sizes = []
        while leases := queue.lease(10, max_bytes=6500):
            sizes.append([len(lease.data) for lease in leases])
            queue.ack(leases)
    expected = [[3000, 3000], [3000], [9000]] if order == "fifo" else [[9000], [3000, 3000], [3000]]
    assert sizes == expected


def test_what_came_back_counts_toward_the_bytes_of_a_lease(tmp_path: Path) -> None:
    with FastQueue(tmp_path) as queue:
        queue.push_many([KILOBYTE] * 4)
        for lease in queue.lease(2):
            queue.nack(lease)
        assert [lease.sequence for lease in queue.lease(10, max_bytes=3000)] == [0, 1, 2]


def test_a_failure_that_is_not_the_blocks_never_makes_it_a_dead_letter(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_attempts=2)) as queue:
        queue.push(b"x")
        for _ in range(5):
            queue.nack(queue.lease()[0], keep=True)
        assert queue.stats().dead_lettered == 0
        queue.nack(queue.lease()[0])
        assert queue.stats().dead_lettered == 1


def test_another_limit_of_blocks_holds_from_the_next_push_on(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_size=5, full_behavior=FullBehavior.DROP_NEWEST)) as queue:
        queue.push_many([b"x"] * 5)
        queue.resize(6)
        queue.push(b"x")
        with pytest.raises(QueueFull):
            queue.push(b"x")
        assert queue.stats().max_size == 6


@pytest.mark.parametrize("most", ["three", 1.5, True, 0])
def test_attempts_that_are_no_number_are_refused(most: object) -> None:
    with pytest.raises(ConfigError, match="max_attempts must be >= 1 or None, got"):
        FastQueueConfig(max_attempts=most)  # type: ignore[arg-type]


def test_a_full_disk_is_one_line_however_many_blocks_it_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(OsSpoolFiles):
        is_full = False

        def pwritev(self, handle: int, buffers: Any, offset: int, /) -> int:  # type: ignore[override]
            if self.is_full:
                raise OSError(28, "No space left on device")
            return os.pwritev(handle, buffers, offset)

    files = FullDisk()
    with FastQueue(tmp_path, FastQueueConfig(durability=Durability.DISK), files=files) as queue:
        files.is_full = True
        for _ in range(10):
            with pytest.raises(DiskFull):
                queue.push(b"x")
        files.is_full = False
        for _ in range(10):
            queue.push(b"x")
    lines = [
        record.msg.partition(".")[0] for record in caplog.records if record.name == "penstock.spool.capacity_policy"
    ]
    assert lines == ["Queue started dropping", "Queue takes everything again"]


def test_a_block_for_which_larger_ones_went_is_no_sign_of_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_bytes=1000)) as queue:
        queue.push(bytes(950))
        queue.push(bytes(100))
    lines = [
        record.msg.partition(".")[0] for record in caplog.records if record.name == "penstock.spool.capacity_policy"
    ]
    assert lines == ["Queue started dropping"]
