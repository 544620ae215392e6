"""Segments: whole or not there, known by their names."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.model.chunk_partials import partials_of_chunks
from penstock.model.partial import ENCODED, PARTIALS, merged
from penstock.model.point import chunk_type
from penstock.model.segment import (
    Segment,
    check_segment_writer,
    decode_partials_block,
    decode_partials_block_encoded,
    encode_partials_block,
    outline_of_segment,
    parse_segment_name,
    read_segment,
    seal,
    sealed,
)

Cpu = chunk_type("cpu")
PARTS = merged(partials_of_chunks([Cpu.of(["a", "b"], [0, 60_000_000], [1.0, 2.0])]))


def test_a_sealed_segment_reads_back_as_it_was(tmp_path: Path) -> None:
    path = seal(tmp_path, Segment("edge", 3, 7), PARTS)

    assert path.name == "edge-0000000000000003-0000000000000007.arrow"
    assert read_segment(path).equals(PARTS)
    assert read_segment(path).schema == PARTIALS
    metadata = {b"penstock.segment": b"1", b"penstock.rows": b"2", b"penstock.span": b"0 60000000"}
    assert pa.ipc.open_file(path).schema.metadata == metadata
    assert outline_of_segment(path).rows == 2


def test_a_segment_says_where_most_of_its_rows_are_without_its_outliers(tmp_path: Path) -> None:
    minutes = [0, *range(100, 5_100), 1_000_000]
    partials = partials_of_chunks([Cpu.of(["a"] * 5_002, [60_000_000 * n for n in minutes], [1.0] * 5_002)])
    first, last = outline_of_segment(seal(tmp_path, Segment("edge", 0, 1), partials)).span or (0, 0)

    assert 100 < first / 60_000_000 < 1_000
    assert 4_200 < last / 60_000_000 < 5_100


def test_a_segment_without_rows_or_of_an_older_writer_does_not_say_where_they_are(tmp_path: Path) -> None:
    older = tmp_path / Segment("edge", 2, 3).name
    with pa.ipc.new_file(older, ENCODED.with_metadata({b"penstock.rows": b"0"})):
        pass

    assert outline_of_segment(seal(tmp_path, Segment("edge", 0, 1), PARTIALS.empty_table())).span is None
    assert outline_of_segment(older).span is None


def test_segments_are_listed_in_the_order_of_their_sequences_and_nothing_else_is(tmp_path: Path) -> None:
    for segment in (Segment("b", 0, 9), Segment("a", 10, 300), Segment("a", 0, 9)):
        seal(tmp_path, segment, PARTS)
    for foreign in (".edge-0000000000000003-0000000000000007.arrow", "notes.txt", "a-1-2.arrow"):
        (tmp_path / foreign).touch()

    assert sealed(tmp_path) == [Segment("a", 0, 9), Segment("a", 10, 300), Segment("b", 0, 9)]


def test_a_segment_that_was_not_finished_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def power_cut(handle: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        seal(tmp_path, Segment("edge", 0, 1), PARTS)

    assert sealed(tmp_path) == []


def test_a_sealed_segment_is_never_replaced(tmp_path: Path) -> None:
    path = seal(tmp_path, Segment("edge", 0, 1), PARTS)
    before = path.read_bytes()

    with pytest.raises(FileExistsError):
        seal(tmp_path, Segment("edge", 0, 1), PARTS.slice(1))

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_reads_back_as_it_was() -> None:
    assert decode_partials_block(encode_partials_block(PARTS)).equals(PARTS)


def test_a_block_whose_texts_were_written_out_is_still_read() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, PARTIALS) as writer:
        writer.write_table(PARTS)
    block = bytes(sink.getvalue())

    assert decode_partials_block(block).equals(PARTS)
    assert decode_partials_block_encoded(block).schema == ENCODED


def test_blocks_of_different_texts_are_sealed_as_one(tmp_path: Path) -> None:
    blocks = [encode_partials_block(PARTS.slice(number, 1)) for number in (1, 0, 1)]
    path = seal(tmp_path, Segment("edge", 0, 2), pa.concat_tables(map(decode_partials_block_encoded, blocks)))

    assert read_segment(path).equals(pa.concat_tables([PARTS.slice(1, 1), PARTS]).take([0, 1, 2]).combine_chunks())


def test_names_and_segments_are_each_others_inverse() -> None:
    segment = Segment("edge_1.eu", 0, 2**63)
    assert parse_segment_name(segment.name) == segment
    assert parse_segment_name("edge-xyz.arrow") is None


@pytest.mark.parametrize("name", ["", "a-b", "a/b", ".hidden"])
def test_a_writer_whose_name_would_break_a_segments_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"segments\.writer"):
        check_segment_writer(name)
