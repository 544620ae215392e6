"""Damage of every kind: nothing crashes, nothing loops, nothing whole is lost, and what is lost is counted."""

import copy
import json
import logging
import os
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.errors import QueueError
from penstock.spool import frames
from penstock.spool.config import Order
from tests.examples import examples
from tests.spool.damage import chunk_paths, drain, flip
from tests.spool.fake_files import FakeFiles

DISK = FastQueueConfig(durability=Durability.DISK, compression="snappy", chunk_size=2000)
FRESHEST = FastQueueConfig(durability=Durability.DISK, compression="snappy", chunk_size=2000, order="freshest")


def filled(folder: Path, config: FastQueueConfig = DISK) -> list[bytes]:
    """A folder with ten frames of one to four blocks in several chunks; all blocks, in order."""
    blocks: list[bytes] = []
    rng = random.Random(1)  # the same each time, so that files have the lengths that they had before
    with FastQueue(folder, config) as queue:
        for i in range(10):
            batch = [b"%d/%d " % (i, j) + rng.randbytes(120 if i < 9 else 20) for j in range(1 + i % 4)]
            queue.push_many(batch)
            blocks += batch
    return blocks


def frame_ranges(folder: Path) -> list[tuple[Path, int, int]]:
    """(chunk, start, end) of every frame."""
    ranges = []
    for path in chunk_paths(folder):
        data, at = path.read_bytes(), 0
        while at < len(data):
            header = frames.parse_frame_header(data, at, at, checked=True)
            ranges.append((path, at, at + header.size))
            at += header.size
    return ranges


def is_subsequence(part: list[bytes], whole: list[bytes]) -> bool:
    rest = iter(whole)
    return all(block in rest for block in part)


@pytest.mark.parametrize("frame", [0, 3, 6, 9])
@pytest.mark.parametrize("place", ["prefix", "magic", "fields", "checksum", "body"])
@pytest.mark.parametrize("config", [DISK, FRESHEST], ids=["fifo", "freshest"])
def test_a_flipped_bit_costs_one_frame(tmp_path: Path, frame: int, place: str, config: FastQueueConfig) -> None:
    blocks = filled(tmp_path, config)
    path, start, end = frame_ranges(tmp_path)[frame]
    at = {"prefix": 5, "magic": 9, "fields": 20, "checksum": 53, "body": 60}[place]
    flip(path, start + at, bit=3)
    lost_from = sum(1 + i % 4 for i in range(frame))
    lost = range(lost_from, lost_from + 1 + frame % 4)

    with FastQueue(tmp_path, config) as queue:
        kept = drain(queue)
        stats = queue.stats()
        assert sorted(kept) == sorted(block for i, block in enumerate(blocks) if i not in lost)
        assert stats.damaged_regions == 1
        assert stats.damaged_bytes == end - start
        assert stats.lost_blocks == len(lost) or (
            frame == 9 and stats.lost_blocks == 0
        )  # a torn tail was never accepted
        assert len(queue) == queue.size_bytes == 0
        queue.push(b"on it goes")
        assert queue.pop() == b"on it goes"
    assert [file.stat().st_size for file in (tmp_path / "quarantine").iterdir()] == [end - start]


def test_the_last_frame_cut_at_every_byte_costs_that_frame_only(tmp_path: Path) -> None:
    blocks = filled(tmp_path / "whole")
    path, start, end = frame_ranges(tmp_path / "whole")[-1]
    kept = blocks[: -(1 + 9 % 4)]
    for length in range(start, end):
        folder = tmp_path / "cut"
        shutil.copytree(tmp_path / "whole", folder)
        os.truncate(folder / path.name, length)
        with FastQueue(folder, DISK) as queue:
            assert len(queue) == len(kept), length
            queue.push(b"new")
            assert drain(queue) == [*kept, b"new"], length
        with FastQueue(folder, DISK) as queue:
            assert len(queue) == 0, length
        shutil.rmtree(folder)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_is_done_to_the_bytes_the_rest_comes_out(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    vandalise(tmp_path_factory, data)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_the_bytes_the_rest_comes_out_for_long(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    vandalise(tmp_path_factory, data)


def vandalise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("q")
    blocks = filled(folder)
    whole = [path.read_bytes()[start:end] for path, start, end in frame_ranges(folder)]
    for _ in range(data.draw(st.integers(1, 4))):
        paths = [p for p in sorted(folder.iterdir()) if p.is_file() and p.stat().st_size]
        if not paths:
            break
        path = data.draw(st.sampled_from(paths))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, 1 << 20)) % len(content)  # the checksum in the meta has nine digits or ten
        match data.draw(st.sampled_from(["flip", "zeros", "cut", "garbage", "insert", "remove"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "zeros":
                content[at : at + 100] = bytes(len(content[at : at + 100]))
            case "cut":
                del content[at:]
            case "garbage":
                content[at : at + 50] = data.draw(st.binary(min_size=50, max_size=50))
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=50))
            case "remove":
                del content[at : at + 30]
        path.write_bytes(content)
    left = b"".join(path.read_bytes() for path in chunk_paths(folder))
    undamaged = [i for i, frame in enumerate(whole) if frame in left]

    with FastQueue(folder, DISK) as queue:
        out = drain(queue)
        assert is_subsequence(out, blocks)
        assert set(out) >= {block for block in blocks if int(block.split(b"/")[0]) in undamaged}
        assert len(queue) == queue.size_bytes == 0
        queue.push(b"new")
    with FastQueue(folder, DISK) as queue:
        assert drain(queue) == [b"new"]
    shutil.rmtree(folder)


def test_no_flipped_bit_in_the_meta_costs_a_block() -> None:
    config, whole = FastQueueConfig(durability=Durability.DISK, meta_sync_interval=3600), FakeFiles()
    with FastQueue("q", config, files=whole) as queue:
        for i in range(50):
            queue.push(b"%d" % i)
        queue.ack(queue.lease(5))
    for at in range(whole.size_of("q/fastqueue.meta")):
        for bit in {0, at % 8}:
            files = copy.deepcopy(whole)
            files.names_now["q/fastqueue.meta"].written[at] ^= 1 << bit
            with FastQueue("q", config, files=files) as queue:
                assert [lease.data for lease in queue.lease(100)][-45:] == [b"%d" % i for i in range(5, 50)], (at, bit)


def test_a_damaged_first_header_costs_its_frame_only_even_without_a_meta(tmp_path: Path) -> None:
    blocks = filled(tmp_path)
    flip(frame_ranges(tmp_path)[0][0], 20)
    (tmp_path / "fastqueue.meta").unlink()
    with FastQueue(tmp_path, DISK) as queue:
        assert drain(queue) == blocks[1:]


@pytest.mark.parametrize("missing", [0, 30])
def test_a_block_that_holds_frames_of_its_own_is_one_block_even_when_it_is_damaged(
    tmp_path: Path, missing: int
) -> None:
    filled(tmp_path / "other")
    inner = b"".join(path.read_bytes() for path in chunk_paths(tmp_path / "other"))
    with FastQueue(tmp_path / "q", FastQueueConfig(durability=Durability.DISK, compression="none")) as queue:
        for block in (b"before", inner, b"after", b"last"):
            queue.push(block)
    path = chunk_paths(tmp_path / "q")[0]
    content = bytearray(path.read_bytes())
    at = content.index(inner) + len(inner) // 2
    content[at] ^= 1
    del content[at + 1 : at + 1 + missing]
    path.write_bytes(content)
    with FastQueue(tmp_path / "q") as queue:
        assert drain(queue) == [b"before", b"after", b"last"]


def test_a_queue_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    meta = tmp_path / "fastqueue.meta"
    fields = json.loads(meta.read_bytes())
    del fields["crc"]
    text = json.dumps({**fields, "version": 4, "something": "new"}).encode()
    meta.write_bytes(text[:-1] + b', "crc": %d}' % google_crc32c.value(text))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(QueueError, match="a newer Penstock wrote this queue"):
        FastQueue(tmp_path, DISK)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("config", [DISK, FRESHEST], ids=["fifo", "freshest"])
def test_a_missing_chunk_costs_its_own_blocks_and_they_are_counted(tmp_path: Path, config: FastQueueConfig) -> None:
    blocks = filled(tmp_path, config)
    middle = chunk_paths(tmp_path)[1]
    lost = sum(
        frames.parse_frame_header(path.read_bytes(), start, 0, checked=True).block_count
        for path, start, _ in frame_ranges(tmp_path)
        if path == middle
    )
    middle.unlink()
    with FastQueue(tmp_path, config) as queue:
        out = drain(queue)
        assert len(out) == len(blocks) - lost
        assert queue.stats().lost_blocks == lost
        assert len(queue) == queue.size_bytes == 0
        queue.flush()
        assert queue.stats().chunks <= 1


@pytest.mark.parametrize("durability", list(Durability), ids=lambda level: str(level.value))
@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("acked", [0, 5, 100])
def test_what_is_pushed_after_every_chunk_has_vanished_comes_out(
    tmp_path: Path, durability: Durability, order: Order, acked: int
) -> None:
    config = FastQueueConfig(durability=durability, order=order, chunk_size=2000, inmemory_blocks=2)
    filled(tmp_path, config)
    with FastQueue(tmp_path, config) as queue:
        queue.ack(queue.lease(acked) if acked else [])
    for path in chunk_paths(tmp_path):
        path.unlink()
    for restart in range(2):
        with FastQueue(tmp_path, config) as queue:
            queue.push_many([b"new %d" % i for i in range(10)])
            queue.flush()
            assert [block for block in drain(queue) if block.startswith(b"new")] == (
                [b"new %d" % i for i in (range(10) if order == "fifo" else reversed(range(10)))]
            ), restart


def test_foreign_files_are_left_alone_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = filled(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "00zz").write_text("mine too")
    with caplog.at_level(logging.WARNING), FastQueue(tmp_path, DISK) as queue:
        assert drain(queue) == blocks
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "00zz").exists()
    said = [record for record in caplog.records if "Foreign" in record.message]
    assert len(said) == 1
    assert "notes.txt" in said[0].getMessage()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", bytes(5000), os.urandom(3000), b"PSF1" * 400],
    ids=["empty", "garbage", "zeros", "random", "marks"],
)
def test_a_foreign_file_with_a_chunks_name_is_quarantined(tmp_path: Path, content: bytes) -> None:
    blocks = filled(tmp_path)
    (tmp_path / "00000000000fffff").write_bytes(content)
    with FastQueue(tmp_path, DISK) as queue:
        assert drain(queue) == blocks
        assert queue.stats().damaged_bytes == len(content)
        queue.push(b"new")
    with FastQueue(tmp_path, DISK) as queue:
        assert drain(queue) == [b"new"]


def test_damage_is_logged_once_and_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    path, start, _ = frame_ranges(tmp_path)[4]
    flip(path, start + 70)
    with caplog.at_level(logging.WARNING), FastQueue(tmp_path, DISK) as queue:
        drain(queue)
        queue.peek()
        queue.stats()
        queue.flush()
        assert queue.stats().damaged_regions == 1
    assert len([record for record in caplog.records if "set aside" in record.message]) == 1


def test_a_block_damaged_while_it_is_out_is_given_up_when_it_is_nacked(tmp_path: Path) -> None:
    with FastQueue(tmp_path, DISK) as queue:
        queue.push(b"a" + os.urandom(200))
        queue.push(b"whole")
        lease = queue.lease()[0]
        flip(chunk_paths(tmp_path)[0], 100)
        queue.nack(lease)
        assert drain(queue) == [b"whole"]
        assert queue.stats().lost_blocks == 1
        assert len(queue) == 0


def test_damaged_journal_records_bring_their_blocks_again_and_no_others(tmp_path: Path) -> None:
    shutil.copytree(_killed_after_acks(tmp_path / "q", 6), tmp_path / "copy")
    journal = next(path for path in (tmp_path / "copy").iterdir() if path.name.startswith("acks-"))
    records = journal.read_bytes()
    acked_second = 32 * 3  # lease, ack, lease, ack, ...
    flip(journal, acked_second + 9)
    assert len(records.rstrip(b"\0")) <= 32 * 12 < len(records)
    with FastQueue(tmp_path / "copy", DISK) as queue:
        assert [lease.data for lease in queue.lease(10)] == [b"1", b"6", b"7", b"8", b"9"]
        assert queue.stats().damaged_regions == 1


def test_a_record_of_an_ack_and_a_lease_in_one_is_still_read(tmp_path: Path) -> None:
    folder = _killed_after_acks(tmp_path / "q", 1)
    journal = next(path for path in folder.iterdir() if path.name.startswith("acks-"))
    record = struct.pack("<BxHIQQ4x", 3, 1, 1, 4, 5)  # 4, of one byte, is done, and 5 was handed out
    record += struct.pack("<I", google_crc32c.value(record))
    journal.write_bytes(journal.read_bytes()[:64] + record + bytes(journal.stat().st_size - 96))
    with FastQueue(folder, DISK) as queue:
        assert (len(queue), queue.size_bytes) == (8, 8)
        assert [(lease.data, lease.attempts) for lease in queue.lease(10)] == [
            (b"%d" % i, 2 if i == 5 else 1) for i in (1, 2, 3, 5, 6, 7, 8, 9)
        ]


def test_attempts_of_acked_blocks_are_forgotten_at_the_next_open(tmp_path: Path) -> None:
    folder = _killed_after_acks(tmp_path / "q", 6)
    with FastQueue(folder, DISK) as queue:
        queue.flush()
        assert json.loads((folder / "fastqueue.meta").read_text())["attempts"] == []
        assert len(queue) == 4


def test_an_ack_that_survived_the_block_it_is_about_is_not_counted(tmp_path: Path) -> None:
    queue = FastQueue(tmp_path / "q", FastQueueConfig(durability=Durability.DISK, meta_sync_interval=3600))
    queue.push_many([b"%d" % i for i in range(10)])
    queue.flush()
    chunk = chunk_paths(tmp_path / "q")[0]
    length = chunk.stat().st_size
    queue.push_many([b"lost"] * 5)
    queue.ack(queue.lease(15)[10:])
    shutil.copytree(tmp_path / "q", tmp_path / "cut")
    queue.close()
    os.truncate(tmp_path / "cut" / chunk.name, length)
    with FastQueue(tmp_path / "cut", DISK) as queue:
        assert (len(queue), queue.size_bytes) == (10, 10)
        assert queue.push(b"new") >= 15
        assert drain(queue) == [*(b"%d" % i for i in range(10)), b"new"]


def _killed_after_acks(folder: Path, acks: int) -> Path:
    """A copy of a queue of ten blocks whose process vanished after acking some."""
    queue = FastQueue(folder, FastQueueConfig(durability=Durability.DISK, meta_sync_interval=3600))
    for i in range(10):
        queue.push(b"%d" % i)
    for _ in range(acks):
        queue.ack(queue.lease())
    crashed = folder.with_name("crashed")
    shutil.copytree(folder, crashed)
    queue.close()
    return crashed


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_a_frame_that_slips_to_before_the_meta_is_not_taken_for_one_that_a_kill_skipped(order: Order) -> None:
    files = FakeFiles()
    config = replace(DISK, compression="none", chunk_size=10_000, meta_sync_interval=3600, order=order)
    queue = FastQueue("q", config, files=files)
    for number in range(4):
        queue.push(bytes([number]) * 700)
    queue._syncer.run_once()
    for number in (4, 5):
        queue.push(bytes([number]) * 700)
    files.kill()
    del files.names_now["q/0000000000000000"].written[100:900]
    queue = FastQueue("q", config, files=files)
    assert sorted(block[0] for block in drain(queue)) == [3, 4, 5]
    assert queue.stats().lost_blocks == 3
