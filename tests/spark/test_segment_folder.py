"""A folder of segments as a log: what a batch takes, what is missing, what is damaged, what may go. No JVM."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.errors import ConfigError, SegmentVanished, TableConflict
from penstock.model.chunk_partials import partials_of_chunks
from penstock.model.packed import PACKED, packed_partials
from penstock.model.partial import PARTIALS, merged
from penstock.model.point import chunk_type
from penstock.model.segment import QUARANTINE, Segment, seal, sealed
from penstock.model.share import Share
from penstock.spark.piece_reading import read_piece
from penstock.spark.pieces import SparkReadPiece
from penstock.spark.progress import JobProgress, ProgressListener
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.spark.source import SegmentSource

PARTS = merged(partials_of_chunks([chunk_type("cpu").of(["a", "b"], [0, 60_000_000], [1.0, 2.0])]))


@pytest.fixture
def folder(tmp_path: Path) -> SegmentSourceFolder:
    """Three segments of writer a (sequences 0 to 29), one of writer b."""
    for n in range(3):
        seal(tmp_path, Segment("a", 10 * n, 10 * n + 9), PARTS)
    seal(tmp_path, Segment("b", 0, 4), PARTS)
    return SegmentSourceFolder(tmp_path)


ALL = {"a": {"last": 29, "segments": 3}, "b": {"last": 4, "segments": 1}}


def names(folder: SegmentSourceFolder) -> list[str]:
    return [segment.name for segment in sealed(folder.folder)]


def counted(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(pc.sum(batch["count"]).as_py() for batch in batches)


def test_without_limits_everything_is_admitted(folder: SegmentSourceFolder) -> None:
    assert folder.admit({}) == ALL
    assert folder.admit(ALL) == ALL


def test_limits_of_files_rows_and_bytes_hold_and_writers_take_turns(folder: SegmentSourceFolder) -> None:
    two = {"a": {"last": 9, "segments": 1}, "b": {"last": 4, "segments": 1}}
    size = max(path.stat().st_size for path in folder.folder.glob("*.arrow"))
    assert folder.admit({}, files=2) == two
    assert folder.admit({}, rows=5) == two
    assert folder.admit({}, size_bytes=2 * size + 1) == two
    assert folder.admit(two, files=1) == {**two, "a": {"last": 19, "segments": 2}}


def test_a_segment_larger_than_the_limit_is_a_batch_of_its_own(folder: SegmentSourceFolder) -> None:
    assert folder.admit({}, rows=1) == {"a": {"last": 9, "segments": 1}}
    assert folder.admit({}, size_bytes=1) == {"a": {"last": 9, "segments": 1}}


def test_nothing_beyond_the_target_is_admitted(folder: SegmentSourceFolder) -> None:
    target = folder.admit({})
    seal(folder.folder, Segment("a", 30, 39), PARTS)
    seal(folder.folder, Segment("c", 0, 9), PARTS)
    assert folder.admit({}, up_to=target) == ALL


def test_a_batch_is_exactly_the_segments_between_two_offsets(folder: SegmentSourceFolder) -> None:
    start = {"a": {"last": 9, "segments": 1}}
    assert folder.between(start, ALL) == [Segment("a", 10, 19), Segment("a", 20, 29), Segment("b", 0, 4)]


def test_a_segment_that_covers_what_another_did_is_refused_rather_than_counted_twice(
    folder: SegmentSourceFolder,
) -> None:
    seal(folder.folder, Segment("a", 20, 39), PARTS)
    with pytest.raises(
        TableConflict, match=r"covers sequences from 20 on, but .* writer 'a' up to 29 were taken before"
    ):
        folder.admit(ALL)
    with pytest.raises(TableConflict, match="covers sequences from 20 on"):
        folder.admit({})


def test_a_segment_that_comes_back_after_it_was_taken_is_not_taken_again(folder: SegmentSourceFolder) -> None:
    path = folder.folder / Segment("a", 0, 9).name
    kept = path.read_bytes()
    path.unlink()
    offset = folder.admit(ALL)
    path.write_bytes(kept)

    assert offset == folder.admit(ALL) == ALL


def test_a_batch_that_misses_a_segment_is_refused(folder: SegmentSourceFolder) -> None:
    (folder.folder / Segment("a", 10, 19).name).unlink()
    with pytest.raises(SegmentVanished, match=r"3 segments of writer 'a' .* 2 are in"):
        folder.between({}, ALL)
    with pytest.raises(SegmentVanished, match="is gone"):
        list(read_piece(folder.folder, SparkReadPiece([Segment("a", 10, 19).name])))


def test_a_segment_that_went_before_it_was_planned_is_missed_and_an_empty_file_stands_in_for_it(
    folder: SegmentSourceFolder,
) -> None:
    taken = {"a": {"last": 9, "segments": 1}}
    (folder.folder / Segment("a", 10, 19).name).unlink()
    with pytest.raises(SegmentVanished, match=r"a-000000000000000a-0000000000000013\.arrow") as refusal:
        folder.admit(taken)
    with pytest.raises(SegmentVanished):
        folder.admit({})
    assert "sequences 10 to 19 of writer 'a'" in str(refusal.value)
    assert "put an empty file of that name" in str(refusal.value)

    (folder.folder / Segment("a", 10, 19).name).touch()
    assert folder.admit(taken) == ALL
    assert counted(read_piece(folder.folder, SparkReadPiece(names(folder)))) == 6


def test_what_was_taken_long_ago_may_have_holes(folder: SegmentSourceFolder) -> None:
    (folder.folder / Segment("a", 10, 19).name).unlink()
    assert folder.admit(ALL) == ALL
    assert folder.reach() == {"a": {"last": 29, "segments": 2}, "b": {"last": 4, "segments": 1}}


@pytest.mark.parametrize("damage", [b"", b"rubbish", "cut", "columns"])
def test_a_damaged_segment_is_set_aside_and_still_counts(folder: SegmentSourceFolder, damage: bytes | str) -> None:
    path = folder.folder / Segment("a", 10, 19).name
    if damage == "columns":
        with pa.ipc.new_file(path, pa.schema([("x", pa.int64())])) as writer:
            writer.write_table(pa.table({"x": [1]}))
    else:
        path.write_bytes(path.read_bytes()[:300] if damage == "cut" else bytes(damage))  # type: ignore[arg-type]
    everything = names(folder)

    assert counted(read_piece(folder.folder, SparkReadPiece(everything))) == 6
    assert [segment.name for segment in folder.quarantined()] == [path.name]
    assert (folder.folder / QUARANTINE / path.name).exists()
    assert [segment.name for segment in folder.between({}, ALL)] == everything
    assert counted(read_piece(folder.folder, SparkReadPiece(everything))) == 6  # the same when the batch runs again


def test_an_error_of_the_system_that_one_task_sees_sets_nothing_aside(
    folder: SegmentSourceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other task has counted stays counted, and this one reads it when it runs again."""
    one, other = (SparkReadPiece(names(folder), Share(number, 2)) for number in range(2))
    whole = counted(read_piece(folder.folder, other))

    def failing(path: Path, share: Share) -> pa.Table:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("penstock.spark.piece_reading.read_segment_encoded", failing)
        with pytest.raises(OSError, match="Too many open files"):
            list(read_piece(folder.folder, one))

    assert folder.quarantined() == []
    assert whole + counted(read_piece(folder.folder, one)) == 8


def test_what_is_read_is_merged_and_has_exactly_the_schema(folder: SegmentSourceFolder) -> None:
    (batch,) = read_piece(folder.folder, SparkReadPiece(names(folder)))
    assert batch.schema == PARTIALS
    assert batch.num_rows == 2
    assert batch["count"].to_pylist() == [4, 4]


@pytest.mark.parametrize("most", [1, 3, 4, 7])
@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_batch_larger_than_a_task_may_hold_is_merged_in_steps(
    folder: SegmentSourceFolder, monkeypatch: pytest.MonkeyPatch, most: int, step: int
) -> None:
    monkeypatch.setattr("penstock.spark.piece_reading.STEP_ROWS", step)
    monkeypatch.setattr("penstock.spark.piece_reading.MERGE_ROWS", most)
    batches = list(read_piece(folder.folder, SparkReadPiece(names(folder))))
    assert all(batch.schema == PARTIALS for batch in batches)
    assert counted(iter(batches)) == 8
    packs = list(read_piece(folder.folder, SparkReadPiece(names(folder)), packed_partials))
    assert all(batch.schema == PACKED for batch in packs)
    assert counted(iter(packs)) == 8


def test_what_merges_in_small_steps_leaves_as_one_batch(
    folder: SegmentSourceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.piece_reading.STEP_ROWS", 4)  # two segments
    (batch,) = read_piece(folder.folder, SparkReadPiece(names(folder)))
    assert batch["count"].to_pylist() == [4, 4]


def test_only_old_committed_segments_go_and_never_the_newest_of_a_writer(folder: SegmentSourceFolder) -> None:
    for path in folder.folder.glob("*.arrow"):
        os.utime(path, (1000, 1000))
    young = folder.folder / Segment("a", 10, 19).name
    os.utime(young, (3000, 3000))

    assert folder.clean({}, older_than=2000) == 0
    assert folder.clean(ALL, older_than=2000) == 1
    assert [segment.first for segment in sealed(folder.folder)] == [10, 20, 0]


def test_a_folder_keeps_its_identity_when_it_moves(folder: SegmentSourceFolder, tmp_path: Path) -> None:
    identity = folder.identity()
    moved = folder.folder.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    assert SegmentSourceFolder(moved).identity() == identity
    (tmp_path / "other").mkdir(parents=True)
    assert SegmentSourceFolder(tmp_path / "other").identity() != identity


def test_segments_are_found_by_path_and_by_uri_and_nowhere_else(folder: SegmentSourceFolder) -> None:
    by_uri: Any = SegmentSource({"path": folder.folder.as_uri()}).reader(None)  # type: ignore[arg-type]
    assert {name for piece in by_uri.partitions() for name in piece.names} == set(names(folder))
    with pytest.raises(ConfigError, match="must be a path or a file:// URI, got 's3://bucket/segments'"):
        SegmentSource({"path": "s3://bucket/segments"}).reader(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_limit_that_makes_no_sense_is_refused(tmp_path: Path, value: str) -> None:
    source = SegmentSource({"path": str(tmp_path), "maxRowsPerTrigger": value})
    with pytest.raises(ConfigError, match="maxRowsPerTrigger must be a whole number >= 1"):
        source.streamReader(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("retainSeconds", "1d"), ("tasks", "0"), ("tasks", "many")])
def test_an_option_that_makes_no_sense_is_refused_by_name(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be a .* got '{value}'"):
        SegmentSource({"path": str(tmp_path), option: value}).streamReader(None)  # type: ignore[arg-type]


def test_the_lag_is_the_age_of_the_oldest_segment_that_waits(folder: SegmentSourceFolder) -> None:
    for n, name in enumerate(names(folder)):
        os.utime(folder.folder / name, (1000 + n, 1000 + n))

    assert folder.age(folder.after({}), now=1010.0) == 10.0
    assert folder.age(folder.after({"a": {"last": 19, "segments": 2}}), now=1010.0) == 8.0
    assert folder.age(folder.after(ALL), now=1010.0) == 0.0


def test_progress_adds_up_over_batches() -> None:
    batch = SimpleNamespace(
        numInputRows=10, processedRowsPerSecond=5.0, batchDuration=2000, durationMs={"latestOffset": 30}
    )
    event: Any = SimpleNamespace(progress=batch)
    progress, shown = JobProgress(), []
    listener = ProgressListener(progress, lambda found: shown.append(found.rows))
    listener.onQueryProgress(event)
    listener.onQueryProgress(event)

    assert (progress.batches, progress.rows, progress.batch_seconds) == (2, 20, 2.0)
    assert shown == [10, 20]
    assert progress.phases == {"list": 0.03, "plan": 0.0, "log_begin": 0.0, "log_end": 0.0}
