"""Damage that a queue finds when it counts its blocks at open: what is whole comes out, and `len` is right."""

from dataclasses import replace

import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.spool.config import Order
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles, Inode

CHUNK = "q/0000000000000000"
BLOCK, FRAME = 700, 756
DISK = FastQueueConfig(durability=Durability.DISK, compression="none", meta_sync_interval=3600)
ORDERS = pytest.mark.parametrize("order", ["fifo", "freshest"])


def killed(config: FastQueueConfig, before: int, behind: int) -> FakeFiles:
    """A folder with so many blocks before the last meta, and so many behind it."""
    files = FakeFiles()
    queue = FastQueue("q", config, files=files)
    for number in range(before):
        queue.push(bytes([number]) * BLOCK)
    queue._syncer.run_once()
    for number in range(before, before + behind):
        queue.push(bytes([number]) * BLOCK)
    files.kill()
    return files


def delivered(queue: FastQueue) -> list[int]:
    """The numbers that come out, the smallest first; `len` counts them down."""
    out = []
    left = len(queue)
    while (block := queue.pop()) is not None:
        left -= 1
        assert len(queue) == left
        out.append(block[0])
    assert left == queue.size_bytes == 0
    return sorted(out)


@ORDERS
def test_a_frame_that_slips_to_before_the_meta_comes_out_though_others_are_behind_it(order: Order) -> None:
    config = replace(DISK, order=order)
    files = killed(config, 4, 4)
    del files.names_now[CHUNK].written[:FRAME]  # what is left is whole, and one frame earlier
    queue = FastQueue("q", config, files=files)
    assert delivered(queue) == [1, 2, 3, 4, 5, 6, 7]
    assert queue.stats().lost_blocks == 1


@ORDERS
@pytest.mark.parametrize("before", [0, 3])
def test_headers_that_are_damaged_behind_the_meta_cost_their_blocks_and_no_others(order: Order, before: int) -> None:
    config = replace(DISK, order=order)
    files = killed(config, before, 6)
    for number in range(before, before + 4):
        files.names_now[CHUNK].written[number * FRAME + 20] ^= 0xFF
    queue = FastQueue("q", config, files=files)
    assert delivered(queue) == [*range(before), before + 4, before + 5]
    assert queue.stats().lost_blocks == 4


@ORDERS
def test_headers_that_are_damaged_where_there_is_no_meta_cost_their_blocks_and_no_others(order: Order) -> None:
    config = replace(DISK, order=order)
    files = killed(config, 8, 0)
    for number in range(1, 6):
        files.names_now[CHUNK].written[number * FRAME + 20] ^= 0xFF
    del files.names_now["q/fastqueue.meta"]
    queue = FastQueue("q", config, files=files)
    assert delivered(queue) == [0, 6, 7]
    assert queue.stats().lost_blocks == 5


@ORDERS
def test_chunks_that_are_missing_at_the_end_cost_their_blocks_and_no_others(order: Order) -> None:
    config = replace(DISK, order=order, chunk_size=FRAME)
    files = killed(config, 6, 0)
    del files.names_now[f"q/{4 * FRAME:016x}"], files.names_now[f"q/{5 * FRAME:016x}"]
    queue = FastQueue("q", config, files=files)
    assert delivered(queue) == [0, 1, 2, 3]
    assert queue.stats().lost_blocks == 2


@ORDERS
def test_empty_files_between_chunks_do_not_keep_the_one_before(order: Order) -> None:
    config = replace(DISK, order=order, chunk_size=FRAME)
    files = killed(config, 3, 0)
    for between in (10, 20):
        files.names_now[f"q/{FRAME + between:016x}"] = Inode()
    del files.names_now[f"q/{FRAME:016x}"]
    queue = FastQueue("q", config, files=files)
    assert sorted(block[0] for block in drain(queue)) == [0, 2]
    queue._syncer.run_once()
    assert queue.stats().chunks == 1


def test_a_log_is_not_counted_anew_because_a_chunk_has_gone_from_its_middle() -> None:
    config, files = replace(DISK, chunk_size=FRAME), FakeFiles()
    queue = FastQueue("q", config, files=files)
    queue.push_many([b"", bytes(7), bytes(500)])
    for _ in range(2):
        queue.push(bytes(BLOCK))
    leases = queue.lease(4)
    queue.ack([leases[0], leases[3]])
    queue._syncer.run_once()
    assert queue.stats().chunks == 2
    files.kill()
    last = max(name for name in files.names_now if len(name) == len(CHUNK))
    del files.names_now[last].written[100:]  # a power cut has left no more of it
    queue = FastQueue("q", config, files=files)
    for lease in queue.lease(10):
        queue.nack(lease)
    queue.flush()
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert (len(queue), queue.size_bytes) == (2, 507)  # by its header, which is all that is read, it would be less
