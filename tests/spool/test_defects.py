"""The defects that the seed's implementation had, one test each. The letters are those of the research table."""

import os
import threading
from pathlib import Path

import pytest

from penstock import BlockTooLarge, DiskFull, Durability, FastQueue, FastQueueConfig, FullBehavior
from penstock.testing import FakeClock, wait_until
from tests.spool.damage import chunk_paths, drain, flip
from tests.spool.fake_files import FakeFiles


def test_a_a_consumer_half_as_fast_as_the_producer_gets_everything_in_order(tmp_path: Path) -> None:
    blocks = [b"%05d" % i * 20 for i in range(20_000)]
    out = []
    with FastQueue(tmp_path, FastQueueConfig(max_size=50_000)) as queue:
        for i in range(0, 20_000, 2):
            queue.push(blocks[i])
            queue.push(blocks[i + 1])
            out.append(queue.pop())
        assert queue.stats().inmemory_flushes > 1
        out += drain(queue)
    assert out == blocks


def test_b_a_backlog_survives_close_and_more_can_be_pushed_behind_it(tmp_path: Path) -> None:
    blocks = [b"%04d" % i for i in range(1000)]
    with FastQueue(tmp_path) as queue:
        queue.push_many(blocks[:500])
        assert [queue.pop() for _ in range(14)] == blocks[:14]
    with FastQueue(tmp_path) as queue:
        queue.push_many(blocks[500:])
        assert len(queue) == 986
        assert drain(queue) == blocks[14:]


@pytest.mark.parametrize(
    ("durability", "recovered"), [(Durability.MEMORY, 0), (Durability.DISK, 35), (Durability.FSYNC, 35)]
)
def test_c_a_crash_right_after_a_push_loses_what_the_level_says_and_the_counts_tell_the_truth(
    durability: Durability, recovered: int
) -> None:
    files, config = FakeFiles(), FastQueueConfig(durability=durability, meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    for i in range(35):
        queue.push(b"%d" % i)
    files.kill()
    queue._syncer.close()

    with FastQueue("q", config, files=files) as queue:
        assert len(queue) == recovered
        assert drain(queue) == [b"%d" % i for i in range(recovered)]
        assert len(queue) == queue.size_bytes == 0


@pytest.mark.parametrize("behavior", list(FullBehavior))
def test_d_a_block_larger_than_max_bytes_is_refused_at_once_and_evicts_nothing(
    tmp_path: Path, behavior: FullBehavior
) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_bytes=1000, full_behavior=behavior)) as queue:
        queue.push_many([b"x" * 100] * 5)
        with pytest.raises(BlockTooLarge, match="1001 bytes"):
            queue.push(b"y" * 1001)
        assert len(queue) == 5
        assert sum(queue.stats().dropped.values()) == 0


def _separate_frames(tmp_path: Path, count: int = 10) -> list[bytes]:
    """A closed queue in which every block has a frame of its own."""
    blocks = [b"block %d" % i * 9 for i in range(count)]
    with FastQueue(tmp_path, FastQueueConfig(durability=Durability.DISK, compression="none")) as queue:
        for block in blocks:
            queue.push(block)
    return blocks


def test_e_a_flipped_bit_in_a_header_costs_that_frame_only(tmp_path: Path) -> None:
    blocks = _separate_frames(tmp_path)
    flip(chunk_paths(tmp_path)[0], 4 * (56 + 63) + 3)
    with FastQueue(tmp_path) as queue:
        assert drain(queue) == blocks[:4] + blocks[5:]
        stats = queue.stats()
        assert (stats.lost_blocks, stats.damaged_regions, stats.damaged_bytes) == (1, 1, 56 + 63)
        assert len(queue) == queue.size_bytes == 0
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_f_a_flipped_bit_in_a_payload_is_found_and_costs_that_frame_only(tmp_path: Path) -> None:
    blocks = _separate_frames(tmp_path)
    flip(chunk_paths(tmp_path)[0], 7 * (56 + 63) + 56 + 20)
    with FastQueue(tmp_path) as queue:
        assert drain(queue) == blocks[:7] + blocks[8:]
        assert queue.stats().lost_blocks == 1


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b'{"version": 3}'])
def test_g_a_meta_that_is_missing_or_damaged_is_rebuilt_from_the_chunks(tmp_path: Path, content: bytes | None) -> None:
    blocks = _separate_frames(tmp_path)
    meta = tmp_path / "fastqueue.meta"
    meta.unlink()
    if content is not None:
        meta.write_bytes(content)
    with FastQueue(tmp_path) as queue:
        assert (len(queue), queue.size_bytes) == (10, sum(map(len, blocks)))
        assert queue.stats().damaged_regions == (content is not None)
        assert drain(queue) == blocks


def test_h_a_truncated_chunk_ends_at_its_last_whole_frame_and_the_counts_are_right(tmp_path: Path) -> None:
    blocks = _separate_frames(tmp_path)
    os.truncate(chunk_paths(tmp_path)[0], 6 * (56 + 63) + 30)
    with FastQueue(tmp_path) as queue:
        assert (len(queue), queue.size_bytes) == (6, sum(map(len, blocks[:6])))
        queue.push(b"new")
        assert drain(queue) == [*blocks[:6], b"new"]
        assert len(queue) == queue.size_bytes == 0


@pytest.mark.parametrize("durability", list(Durability))
def test_i_peek_changes_nothing(tmp_path: Path, durability: Durability) -> None:
    with FastQueue(tmp_path, FastQueueConfig(durability=durability)) as queue:
        queue.push_many([b"one", b"two", b"three"])
        assert [queue.peek() for _ in range(5)] == [b"one"] * 5
        assert len(queue) == 3
        assert [lease.attempts for lease in queue.lease(3)] == [1, 1, 1]
        assert queue.peek() is None


def test_j_a_disk_that_fills_up_during_a_spill_loses_nothing_that_was_accepted() -> None:
    files = FakeFiles()
    queue = FastQueue("q", FastQueueConfig(inmemory_blocks=10, meta_sync_interval=3600), files=files)
    for i in range(10):
        queue.push(b"%d" % i)
    files.fail(0, until=1000)
    for _ in range(3):
        with pytest.raises(DiskFull):
            queue.push(b"refused")
    assert queue.stats().dropped["disk_full"] == queue.stats().disk_full == 3
    files.heal()
    queue.push(b"10")
    assert drain(queue) == [b"%d" % i for i in range(11)]
    queue.close()


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
def test_k_blocks_larger_than_a_chunk_and_chunks_filled_to_the_byte_survive_a_restart(
    tmp_path: Path, durability: Durability
) -> None:
    exact = 500 - 56
    blocks = [b"a" * exact, b"b" * exact, b"c" * 5000, b"d", b"e" * (exact - 57), b"f" * 501, b"g" * exact]
    config = FastQueueConfig(durability=durability, compression="none", chunk_size=500, inmemory_blocks=1)
    out = []
    for block in blocks:
        with FastQueue(tmp_path, config) as queue:
            queue.push(block)
    for path in chunk_paths(tmp_path):
        assert path.stat().st_size > 0
    ends = [int(path.name, 16) + path.stat().st_size for path in chunk_paths(tmp_path)]
    assert [int(path.name, 16) for path in chunk_paths(tmp_path)[1:]] == ends[:-1]
    for _ in blocks:
        with FastQueue(tmp_path, config) as queue:
            out.append(queue.pop())
    assert out == blocks


def test_l_a_block_leased_by_a_worker_that_dies_is_not_lost(tmp_path: Path) -> None:
    with FastQueue(tmp_path) as queue:
        queue.push_many([b"one", b"two", b"three"])

        def worker() -> None:
            queue.lease()  # and never comes back

        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()
        assert len(queue) == 3
    with FastQueue(tmp_path) as queue:
        assert drain(queue) == [b"one", b"two", b"three"]


def test_l_a_block_that_is_given_back_is_not_put_behind_the_others(tmp_path: Path) -> None:
    with FastQueue(tmp_path) as queue:
        queue.push_many([b"one", b"two", b"three"])
        queue.nack(queue.lease()[0])
        assert drain(queue) == [b"one", b"two", b"three"]


def test_m_a_poisonous_block_goes_to_the_dead_letters_and_the_others_on(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_attempts=3)) as queue:
        queue.push_many([b"poison", b"good"])
        attempts = []
        while (leases := queue.lease()) and leases[0].data == b"poison":
            attempts.append(leases[0].attempts)
            queue.nack(leases[0])
        assert attempts == [1, 2, 3]
        assert leases[0].data == b"good"
        assert queue.stats().dead_lettered == 1


def test_o_every_setting_has_an_effect(tmp_path: Path) -> None:
    """Those that no other test is about; the rest are named in their own tests."""
    clock = FakeClock()
    config = FastQueueConfig(inmemory_blocks=3, stale_flush=5.0, meta_sync_interval=3600, write_buffer_size=200)
    with FastQueue(tmp_path, config, clock=clock) as queue:
        queue.push(b"x")
        clock.advance(4.9)
        queue._syncer.run_once()
        assert queue.stats().inmemory_blocks == 1
        clock.advance(0.2)
        queue._syncer.run_once()
        stats = queue.stats()
        assert (stats.inmemory_blocks, stats.inmemory_flushes) == (0, 1)
        queue.push_many([b"a" * 90] * 3)
        queue.push(b"overflow")
        assert (queue.stats().inmemory_blocks, queue.stats().inmemory_flushes) == (1, 2)
    frames = sum(path.read_bytes().count(b"PSF1") for path in chunk_paths(tmp_path))
    assert frames == 1 + 2 + 1  # write_buffer_size: two blocks of 90 bytes to a frame


def test_o_the_meta_is_synced_at_its_interval(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(meta_sync_interval=0.005)) as queue:
        before = queue.stats().meta_syncs
        queue.push(b"x")
        queue.ack(queue.lease())
        wait_until(lambda: queue.stats().meta_syncs > before)
