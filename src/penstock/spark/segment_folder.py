"""A folder of segments as a log with offsets: what is new, what a batch holds, what may go. No JVM is needed here.

    {"edge": {"last": 41, "segments": 7}}     offset: of each writer the last sequence, and how many segments so far

The segments of a writer follow on each other, so one that disappeared before it was planned leaves a hole; the count
tells of one that went between plan and batch. What was taken already may go.
A segment that cannot be read is moved to `quarantine/` and its batch goes on without it; it still counts.
"""

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import SegmentVanished, TableConflict
from penstock.model.partial import PARTIALS, merged, merged_encoded
from penstock.model.segment import (
    QUARANTINE,
    Origin,
    Outline,
    Segment,
    origin_of,
    outline_of,
    read_encoded,
    rows_in,
    sealed,
)
from penstock.model.share import Share
from penstock.spark.pieces import Piece

log = logging.getLogger(__name__)
MARK = ".penstock-source"
STEP_ROWS = 1_000_000  # about 70 MB: what a task merges at a time, so that it works on the same memory all along
MERGE_ROWS = 4_000_000  # about 300 MB: as many as that where few merge, and half of it is what it holds of merged ones

Merge = Callable[[pa.Table], pa.Table]
Offset = dict[str, dict[str, int]]


class SegmentFolder:
    """The segments below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def identity(self) -> str:
        """What tells this folder from others, also after it was moved; made when first asked for."""
        mark = self.folder / MARK
        try:
            return mark.read_text().strip()
        except FileNotFoundError:
            pass
        scratch = self.folder / f"{MARK}.{uuid.uuid4().hex}"
        scratch.write_text(uuid.uuid4().hex)
        try:
            os.link(scratch, mark)  # fails if another process was first: then theirs holds
        except FileExistsError:
            pass
        finally:
            scratch.unlink()
        return mark.read_text().strip()

    def after(self, offset: Offset) -> list[Segment]:
        """What was sealed since `offset`, quarantined ones included, oldest file of each writer first."""
        everything = set(sealed(self.folder)) | set(self.quarantined())
        return sorted(s for s in everything if s.last > offset.get(s.writer, {}).get("last", -1))

    def quarantined(self) -> list[Segment]:
        aside = self.folder / QUARANTINE
        return sealed(aside) if aside.is_dir() else []

    def admit(
        self,
        start: Offset,
        *,
        up_to: Offset | None = None,
        files: int | None = None,
        rows: int | None = None,
        size_bytes: int | None = None,
    ) -> Offset:
        """The furthest offset that keeps within every limit, but always at least one segment if there is one.

        TableConflict if a segment covers sequences that another has covered already: its points would count twice.
        SegmentVanished if one does not follow on the one before it: points would be missing.
        """
        end = {writer: dict(position) for writer, position in start.items()}
        taken_files = taken_rows = taken_bytes = 0
        for segment in self._in_turn(self.after(start)):
            if up_to is not None and segment.last > up_to.get(segment.writer, {}).get("last", -1):
                continue
            taken_files += 1
            taken_rows += self._rows(segment) if rows is not None else 0
            taken_bytes += self._size(segment) if size_bytes is not None else 0
            over = (
                (files is not None and taken_files > files)
                or (rows is not None and taken_rows > rows)
                or (size_bytes is not None and taken_bytes > size_bytes)
            )
            if over and taken_files > 1:
                break
            before = end.get(segment.writer, {"last": segment.first - 1, "segments": 0})
            if segment.first > before["last"] + 1:
                raise self._missing(Segment(segment.writer, before["last"] + 1, segment.first - 1))
            if segment.first <= before["last"]:
                raise TableConflict(
                    f"{segment.name} in {self.folder} covers sequences from {segment.first} on, but segments of writer "
                    f"{segment.writer!r} up to {before['last']} were taken before: move it away, and see that no two "
                    "queues write under the same name"
                )
            end[segment.writer] = {"last": segment.last, "segments": before["segments"] + 1}
        return end

    def check_whole(self, start: Offset, end: Offset) -> None:
        """SegmentVanished unless every sequence between these offsets is in a segment that is there."""
        following = self.after(start)
        for writer, position in end.items():
            reached = start.get(writer, {"last": -1})["last"]
            for segment in following:
                if segment.writer == writer and segment.first <= reached + 1:
                    reached = max(reached, segment.last)
            if reached < position["last"]:
                beyond = [s.first for s in following if s.writer == writer and s.first > reached]
                hole = Segment(writer, reached + 1, min([*beyond, position["last"] + 1]) - 1)
                raise self._missing(hole, "a table lacks what others have, and ")

    def _missing(self, hole: Segment, why: str = "") -> SegmentVanished:
        return SegmentVanished(
            f"{why}sequences {hole.first} to {hole.last} of writer {hole.writer!r} are in no segment of {self.folder}: "
            "put what is missing back, or restore it from a copy. If it is lost for good, put an empty file of that "
            f"name in its place, and it counts as damaged: {hole.name}"
        )

    def reach(self) -> Offset:
        """How far the segments that are there go, whatever became of those before them."""
        found: Offset = {}
        for segment in self.after({}):
            before = found.get(segment.writer, {"segments": 0})
            found[segment.writer] = {"last": segment.last, "segments": before["segments"] + 1}
        return found

    def between(self, start: Offset, end: Offset) -> list[Segment]:
        """The segments of the batch from `start` to `end`; SegmentVanished unless it is every one of them."""
        found = [s for s in self.after(start) if s.last <= end.get(s.writer, {}).get("last", -1)]
        for writer, position in end.items():
            expected = position["segments"] - start.get(writer, {}).get("segments", 0)
            have = sum(segment.writer == writer for segment in found)
            if have != expected:
                raise SegmentVanished(
                    f"{expected} segments of writer {writer!r} belong to this batch (up to sequence "
                    f"{position['last']}), {have} are in {self.folder}: put the missing ones back, or restore them "
                    "from a copy; without them the tables would miss points"
                )
        return found

    def rows_between(self, start: Offset, end: Offset) -> int:
        """How many rows the segments of a batch have, before anything is merged."""
        return sum(map(self._rows, self.between(start, end)))

    def outlines(self, segments: list[Segment]) -> dict[Segment, Outline]:
        """What each of them says of its rows; one that is damaged says nothing."""
        return {segment: self._outline(segment) for segment in segments}

    def origins(self, segments: list[Segment]) -> dict[str, Origin]:
        """Of each writer the origin of the first of these segments, where it says so."""
        first: dict[str, Segment] = {}
        for segment in sorted(segments):
            first.setdefault(segment.writer, segment)
        found = {writer: self._origin(segment) for writer, segment in first.items()}
        return {writer: origin for writer, origin in found.items() if origin}

    def read(self, piece: Piece, merge: Merge = merged) -> Iterator[pa.RecordBatch]:
        """The partials of a piece, merged, in batches of exactly the schema that `merge` gives."""
        fresh: list[pa.Table] = []
        held: list[pa.Table] = []  # merged once
        step = STEP_ROWS if merge is merged else MERGE_ROWS
        for name in piece.names:
            table = self._read(name, piece.share)
            if table is not None:
                fresh.append(table)
            if _rows(fresh) < min(step, MERGE_ROWS // piece.share.among):  # all that it has read, texts too, is held
                continue
            if merge is not merged:  # what comes out of it cannot go in again
                yield from _batches(merge(pa.concat_tables(fresh)))
                fresh = []
                continue
            held.append(merged_encoded(pa.concat_tables(fresh)))
            fresh = []
            if held[-1].num_rows > step // 2:
                step = MERGE_ROWS  # hardly anything merges in so few rows
            if _rows(held) > MERGE_ROWS // 2 and len(held) > 1:
                held = [merged_encoded(pa.concat_tables(held))]
            if _rows(held) > MERGE_ROWS // 2:  # nor in many: pass it on rather than hold it
                yield from _batches(held.pop().cast(PARTIALS))
        if fresh or held:
            yield from _batches(merge(pa.concat_tables([*held, *fresh])))

    def _read(self, name: str, share: Share) -> pa.Table | None:
        path = self.folder / name
        try:
            return read_encoded(path, share)
        except FileNotFoundError:
            if (self.folder / QUARANTINE / name).exists():
                return None
            raise SegmentVanished(f"{path} is gone: put it back, or restore it from a copy") from None
        except (ValueError, OSError) as error:  # pyarrow's own errors are of these kinds
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system's: says nothing about the segment, and another task may have read it
            aside = self.folder / QUARANTINE
            aside.mkdir(exist_ok=True, mode=0o700)
            try:
                path.rename(aside / name)
            except FileNotFoundError:
                pass  # another task that reads the same batch was first
            log.error("Segment is damaged and set aside. segment=%s quarantine=%s reason=%s", name, aside, error)
            return None

    def clean(self, committed: Offset, older_than: float) -> int:
        """Delete what is below `committed` and was sealed before `older_than` (seconds since the epoch).

        The newest segment of a writer always stays: after a crash its writer learns from it what is sealed already.
        """
        newest = {segment.writer: segment for segment in sealed(self.folder)}
        deleted = 0
        for segment in sealed(self.folder):
            done = segment.last <= committed.get(segment.writer, {}).get("last", -1)
            path = self.folder / segment.name
            try:
                if done and segment != newest[segment.writer] and path.stat().st_mtime < older_than:
                    path.unlink()
                    deleted += 1
            except FileNotFoundError:
                pass  # another query on these segments was first
        return deleted

    def _in_turn(self, segments: list[Segment]) -> Iterator[Segment]:
        """One of each writer in turn, so that a writer with a long backlog does not hold up the others."""
        waiting: dict[str, list[Segment]] = {}
        for segment in reversed(segments):
            waiting.setdefault(segment.writer, []).append(segment)
        while waiting:
            for writer in sorted(waiting):
                yield waiting[writer].pop()
                if not waiting[writer]:
                    del waiting[writer]

    def _where(self, segment: Segment) -> Path:
        path = self.folder / segment.name
        return path if path.exists() else self.folder / QUARANTINE / segment.name

    def _size(self, segment: Segment) -> int:
        return self._where(segment).stat().st_size

    def _rows(self, segment: Segment) -> int:
        try:
            return rows_in(self._where(segment))
        except (ValueError, OSError):
            return 0  # damaged: the task that reads it sets it aside

    def _outline(self, segment: Segment) -> Outline:
        try:
            return outline_of(self._where(segment))
        except (ValueError, OSError):
            return Outline()

    def _origin(self, segment: Segment) -> Origin | None:
        try:
            return origin_of(self._where(segment))
        except (ValueError, OSError):
            return None


def _rows(tables: list[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)


def _batches(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    return iter(rows.combine_chunks().to_batches())


def lasts(offset: Offset) -> dict[str, int]:
    """Only the last sequence of each writer."""
    return {writer: position["last"] for writer, position in offset.items()}


def checked_offset(offset: Any) -> Offset:
    """An offset as Spark hands it back."""
    return {writer: {"last": int(at["last"]), "segments": int(at["segments"])} for writer, at in offset.items()}
