"""A folder of segments as a log with offsets: what is new, what a batch holds, what may go. No JVM is needed here.

    {"edge": {"last": 41, "segments": 7, "queue": "5f…"}}     offset: of each writer the last sequence, how many
                                                              segments so far, and the queue that they are of

The segments of a writer follow on each other, so one that disappeared before it was planned leaves a hole; the count
tells of one that went between plan and batch. What was taken already may go, and may come back. A segment of another
queue under the same writer's name is refused: its sequences mean other points.
What a task could not read lies in `quarantine/` and still counts (`piece_reading`).

The folder is listed once a batch (`refresh`). Everything else is answered from an index of names, at the cost of what
is new since the offset in question.
"""

import os
import uuid
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.errors import SegmentVanished, TableConflict
from penstock.model.segment import (
    QUARANTINE,
    Origin,
    Outline,
    Segment,
    outline_of_segment,
    parse_segment_name,
    sealed,
)

IDENTITY_FILE = ".penstock-source"
Offset = dict[str, dict[str, Any]]
_HEADERS_KEPT = 10_000  # outlines of segments that were planned and not yet read


class SegmentSourceFolder:
    """The segments below one folder."""

    def __init__(self, folder: Path, *, admits: bool = True) -> None:
        """`admits` says whether `admit` will be called, which looks at what came since the last time."""
        self.folder = folder
        self._admits = admits
        self._is_listed = False
        self._names: set[str] = set()  # of everything in the folder when it was listed last
        self._segments: dict[str, list[Segment]] = {}  # of each writer, in the order of its sequences
        self._fresh: list[Segment] = []  # came since the last `admit`
        self._first: dict[Segment, tuple[int, int]] = {}  # inode and time of what has sequence 0
        self._outlines: dict[Segment, Outline] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentSourceFolder, (self.folder,)  # to the tasks go no lists of names

    def refresh(self) -> None:
        """List the folder; the only place that costs what is kept there."""
        names = os.listdir(self.folder)
        aside = self.folder / QUARANTINE
        if aside.is_dir():
            names = list({*names, *os.listdir(aside)})
        new = [name for name in names if name not in self._names]
        gone = self._names.difference(names) if len(names) - len(new) < len(self._names) else set()
        self._names -= gone
        self._names.update(new)
        self._is_listed = True
        for segment in filter(None, map(parse_segment_name, gone)):
            held = self._segments[segment.writer]
            del held[bisect_left(held, segment)]
            self._outlines.pop(segment, None)  # another segment of that name may come
        fresh = sorted(filter(None, map(parse_segment_name, new)))
        for segment in fresh:
            held = self._segments.setdefault(segment.writer, [])
            if held and segment < held[-1]:
                insort(held, segment)
            else:
                held.append(segment)
        fresh += self._begun_anew()
        if self._admits:
            self._fresh += fresh

    def _begun_anew(self) -> list[Segment]:
        """First segments that were replaced between two listings by one of the same name, as only another queue does.

        Any other segment of a queue that begins anew has a name that was not there before, or follows this one.
        """
        before, self._first = self._first, {}
        for held in self._segments.values():
            if held and held[0].first == 0:
                with suppress(FileNotFoundError):  # gone since it was listed
                    found = self._where(held[0]).stat()
                    self._first[held[0]] = (found.st_ino, found.st_mtime_ns)
        replaced = [segment for segment, file in self._first.items() if before.get(segment, file) != file]
        for segment in replaced:
            self._outlines.pop(segment, None)
        return replaced

    def identity(self) -> str:
        """What tells this folder from others, also after it was moved; made when first asked for."""
        mark = self.folder / IDENTITY_FILE
        try:
            return mark.read_text().strip()
        except FileNotFoundError:
            pass
        scratch = self.folder / f"{IDENTITY_FILE}.{uuid.uuid4().hex}"
        scratch.write_text(uuid.uuid4().hex)
        try:
            os.link(scratch, mark)  # fails if another process was first: then theirs holds
        except FileExistsError:
            pass
        finally:
            scratch.unlink()
        return mark.read_text().strip()

    def after(self, offset: Offset) -> list[Segment]:
        """What is known to be sealed since `offset`, quarantined ones included, by writer and sequence."""
        if not self._is_listed:
            self.refresh()
        found = []
        for writer in sorted(self._segments):
            held, last = self._segments[writer], offset.get(writer, {}).get("last", -1)
            place = bisect_left(held, Segment(writer, last + 1, -1))
            while place and held[place - 1].last > last:
                place -= 1
            found += held[place:]
        return found

    def passed_over(self, offset: Offset) -> dict[str, list[Segment]]:
        """Of each writer the segments at or below `offset`."""
        if not self._is_listed:
            self.refresh()
        return {
            writer: [s for s in held if s.last <= offset[writer]["last"]]
            for writer, held in self._segments.items()
            if writer in offset
        }

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

        TableConflict if a segment covers sequences that another has covered already, or is of another queue: its
        points would count twice, or not at all. SegmentVanished if one does not follow on the one before it.
        """
        self.refresh()
        self._check_fresh(start)
        end = {writer: dict(position) for writer, position in start.items()}
        taken_files = taken_rows = taken_bytes = 0
        for segment in self._in_turn(self.after(start)):
            if up_to is not None and segment.last > up_to.get(segment.writer, {}).get("last", -1):
                continue
            taken_files += 1
            taken_rows += self.outline(segment).rows if rows is not None else 0
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
            queue = before.get("queue")
            origin = self.outline(segment).origin
            if origin and queue not in (None, origin[0]):
                raise self.of_another_queue(segment)
            known = {"queue": origin[0] if origin else queue} if origin or queue else {}
            end[segment.writer] = {"last": segment.last, "segments": before["segments"] + 1, **known}
        return end

    def _check_fresh(self, start: Offset) -> None:
        """TableConflict if what came since the last time, and is passed over, is of another queue."""
        fresh: dict[str, list[Segment]] = {}
        for segment in self._fresh:
            if segment.last <= start.get(segment.writer, {}).get("last", -1):
                fresh.setdefault(segment.writer, []).append(segment)
        self._fresh = []
        for writer, segments in fresh.items():
            self.check_queue(segments, start[writer].get("queue"))

    def check_queue(self, segments: list[Segment], queue: str | None) -> None:
        """TableConflict unless these segments of one writer, which are passed over, are of that queue.

        A queue that is made anew begins with sequence 0, so what it seals comes first or overlaps: that, and the
        headers of the first and the last, tell it without reading all of them.
        """
        for before, segment in pairwise(segments):
            if segment.first <= before.last:
                raise self.of_another_queue(before)
        for segment in (segments[0], segments[-1]) if segments else ():
            origin = self.outline(segment).origin
            if origin and queue not in (None, origin[0]):
                raise self.of_another_queue(segment)

    def of_another_queue(self, segment: Segment) -> TableConflict:
        return TableConflict(
            f"{segment.name} in {self.folder} is of another queue than what the tables hold of writer "
            f"{segment.writer!r}: its sequences would be taken for those. Give that queue a writer name of its own "
            "(segments.writer), and its segments that name"
        )

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
        if not self._is_listed:
            self.refresh()
        return {
            writer: {"last": held[-1].last, "segments": len(held)} for writer, held in self._segments.items() if held
        }

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

    def outline(self, segment: Segment) -> Outline:
        """What a segment's header says; one that is damaged says nothing."""
        if segment not in self._outlines:
            if len(self._outlines) >= _HEADERS_KEPT:
                self._outlines.clear()
            try:
                self._outlines[segment] = outline_of_segment(self._where(segment))
            except (ValueError, OSError):
                return Outline()  # the task that reads it sets it aside
        return self._outlines[segment]

    def origins(self, segments: list[Segment]) -> dict[str, Origin]:
        """Of each writer the origin of the first of these segments, where it says so."""
        first: dict[str, Segment] = {}
        for segment in sorted(segments):
            first.setdefault(segment.writer, segment)
        found = {writer: self.outline(segment).origin for writer, segment in first.items()}
        return {writer: origin for writer, origin in found.items() if origin}

    def clean(self, committed: Offset, older_than: float) -> int:
        """Delete what is below `committed` and was sealed before `older_than` (seconds since the epoch).

        The newest segment of a writer always stays: after a crash its writer learns from it what is sealed already.
        """
        if not self._is_listed:
            self.refresh()
        deleted = 0
        for writer, held in self._segments.items():
            last = committed.get(writer, {}).get("last", -1)
            for segment in held[:-1]:
                path = self.folder / segment.name
                try:
                    if segment.last > last or path.stat().st_mtime >= older_than:
                        break  # those after it are younger
                    path.unlink()
                    deleted += 1
                except FileNotFoundError:
                    pass  # another query on these segments was first, or it is in quarantine
        return deleted

    def age(self, segments: list[Segment], now: float) -> float:
        """Seconds since the oldest of these was sealed, 0 if there is none."""
        first: dict[str, Segment] = {}
        for segment in segments:
            first.setdefault(segment.writer, segment)
        oldest = now
        for segment in first.values():
            with suppress(FileNotFoundError):  # removed since it was listed
                oldest = min(oldest, self._where(segment).stat().st_mtime)
        return now - oldest

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


def checked_spark_offset(offset: Any) -> Offset:
    """An offset as Spark hands it back."""
    return {
        writer: {"last": int(at["last"]), "segments": int(at["segments"])}
        | ({"queue": str(at["queue"])} if "queue" in at else {})
        for writer, at in offset.items()
    }
