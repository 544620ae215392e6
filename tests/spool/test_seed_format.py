"""Folders in the format of the seed, made byte by byte from its description, open and drain."""

import json
import struct
from pathlib import Path

import cramjam
import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from tests.spool.damage import chunk_paths, drain, flip

CHUNK = 4096


def seed_block(data: bytes, *, snappy: bool) -> bytes:
    """Length in bits 0-61, bit 63 says snappy, little-endian; then the data."""
    if snappy:
        packed = bytes(cramjam.snappy.compress_raw(data))
        return struct.pack("<Q", len(packed) | 1 << 63) + packed
    return struct.pack("<Q", len(data)) + data


def seed_folder(folder: Path, blocks: list[bytes], *, version: int, snappy: bool = True, read: int = 0) -> None:
    """Chunks of 4096 bytes named by multiples of that; a block that does not fit begins the next one."""
    folder.mkdir()
    offset = reader_offset = 0
    chunks: dict[int, bytes] = {}
    for number, block in enumerate(blocks):
        encoded = seed_block(block, snappy=snappy)
        if offset % CHUNK + len(encoded) > CHUNK:
            offset = (offset // CHUNK + 1) * CHUNK
        if number == read:
            reader_offset = offset
        start = offset // CHUNK * CHUNK
        chunks[start] = chunks.get(start, b"") + encoded
        offset += len(encoded)
    for start, content in chunks.items():
        if start + CHUNK > reader_offset:
            (folder / f"{start:016x}").write_bytes(content)
    meta = {"name": "fastqueue", "reader_offset": reader_offset, "writer_offset": offset, "version": version}
    if version == 2:
        meta |= {"entry_count": len(blocks) - read, "total_bytes": sum(map(len, blocks[read:]))}
    (folder / "fastqueue.meta").write_text(json.dumps(meta, indent=2))


BLOCKS = [(b"metric %d " % i) * (1 + i % 40) for i in range(200)]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("snappy", [True, False])
@pytest.mark.parametrize("read", [0, 1, 77, 199])
def test_a_folder_of_the_seed_opens_and_drains(tmp_path: Path, version: int, snappy: bool, read: int) -> None:
    seed_folder(tmp_path / "q", BLOCKS, version=version, snappy=snappy, read=read)
    with FastQueue(tmp_path / "q") as queue:
        assert len(queue) == 200 - read
        assert drain(queue) == BLOCKS[read:]
        assert len(queue) == queue.size_bytes == 0
        assert queue.stats().lost_blocks == queue.stats().damaged_regions == 0


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("durability", list(Durability))
def test_it_goes_on_in_our_format_and_survives_restarts_in_between(
    tmp_path: Path, version: int, durability: Durability
) -> None:
    seed_folder(tmp_path / "q", BLOCKS, version=version, read=5)
    config = FastQueueConfig(durability=durability, chunk_size=CHUNK)
    new = [b"new %d" % i for i in range(30)]
    out = []
    for i in range(30):
        with FastQueue(tmp_path / "q", config) as queue:
            queue.push(new[i])
            leases = queue.lease(8)
            queue.ack(leases[:7])
            out += [lease.data for lease in leases[:7]]
    with FastQueue(tmp_path / "q", config) as queue:
        assert len(queue) == 225 - len(out)
        out += drain(queue)
        queue.push(b"last")
        queue.flush()
        assert queue.pop() == b"last"
    assert out == BLOCKS[5:] + new
    assert len(chunk_paths(tmp_path / "q")) == 1


def test_its_blocks_can_be_acked_in_any_order_and_nacked(tmp_path: Path) -> None:
    seed_folder(tmp_path / "q", BLOCKS, version=2)
    with FastQueue(tmp_path / "q") as queue:
        leases = queue.lease(10)
        queue.nack(leases[4])
        queue.ack(leases[5:])
    with FastQueue(tmp_path / "q") as queue:
        again = queue.lease(7)
        assert [lease.data for lease in again] == BLOCKS[:5] + BLOCKS[10:12]
        assert [lease.attempts for lease in again] == [2, 2, 2, 2, 2, 1, 1]


def test_newest_first_works_on_a_folder_of_the_seed(tmp_path: Path) -> None:
    seed_folder(tmp_path / "q", BLOCKS, version=2)
    with FastQueue(tmp_path / "q", FastQueueConfig(order="freshest")) as queue:
        queue.push(b"new")
        assert drain(queue) == [b"new", *reversed(BLOCKS)]


def test_counts_that_the_meta_only_claims_are_replaced_by_those_of_the_chunks(tmp_path: Path) -> None:
    seed_folder(tmp_path / "q", BLOCKS[:35], version=2)
    for path in chunk_paths(tmp_path / "q"):
        path.unlink()
    with FastQueue(tmp_path / "q") as queue:
        assert (len(queue), queue.size_bytes) == (0, 0)
        queue.push(b"new")
        assert drain(queue) == [b"new"]


def test_what_the_seed_wrote_after_its_last_meta_is_found(tmp_path: Path) -> None:
    seed_folder(tmp_path / "q", BLOCKS[:10], version=2)
    with chunk_paths(tmp_path / "q")[-1].open("ab") as chunk:
        chunk.write(seed_block(b"after", snappy=True))
    with FastQueue(tmp_path / "q") as queue:
        assert len(queue) == 11
        assert drain(queue) == [*BLOCKS[:10], b"after"]


def test_without_its_meta_everything_that_lies_there_comes_again(tmp_path: Path) -> None:
    seed_folder(tmp_path / "q", BLOCKS, version=2)
    (tmp_path / "q" / "fastqueue.meta").unlink()
    with FastQueue(tmp_path / "q") as queue:
        assert len(queue) == 200
        assert drain(queue) == BLOCKS


@pytest.mark.parametrize("at", [0, 3, 7, 8, 20])
def test_damage_in_a_chunk_of_the_seed_never_crashes_and_spares_the_other_chunks(tmp_path: Path, at: int) -> None:
    seed_folder(tmp_path / "q", BLOCKS, version=2)
    first, *others = chunk_paths(tmp_path / "q")
    assert others
    in_others = 200 - _count(first.read_bytes())
    flip(first, at, bit=6)
    with FastQueue(tmp_path / "q") as queue:
        out = drain(queue)
        assert out[-in_others:] == BLOCKS[-in_others:]
        assert len(queue) == queue.size_bytes == 0
        queue.push(b"new")
        assert queue.pop() == b"new"


def _count(content: bytes) -> int:
    at = count = 0
    while at < len(content):
        at += 8 + (struct.unpack_from("<Q", content, at)[0] & (1 << 62) - 1)
        count += 1
    return count


@pytest.mark.parametrize("version", [1, 2])
def test_a_meta_that_points_nowhere_costs_no_block_that_was_not_read(tmp_path: Path, version: int) -> None:
    for offset in (3, 5000, 10**9):
        folder = tmp_path / str(offset)
        seed_folder(folder, BLOCKS, version=version, snappy=False, read=0)
        meta = json.loads((folder / "fastqueue.meta").read_text())
        (folder / "fastqueue.meta").write_text(json.dumps({**meta, "reader_offset": offset}))
        with FastQueue(folder) as queue:
            counted, out = len(queue), drain(queue)
        assert counted == len(out)
        assert out == BLOCKS[-len(out) :]
        assert len(out) == 200 if offset != 5000 else len(out) > 150
