"""Examines a queue's folder from outside: what it holds, whether it is whole; repairs it if asked."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from penstock.errors import QueueError
from penstock.spool import frames, meta
from penstock.spool.chunk_files import ChunkFile
from penstock.spool.dead_letters import FOLDER_NAME
from penstock.spool.files import OsSpoolFiles, SpoolFiles, write_all
from penstock.spool.folder import is_spool_locked, lock_spool_folder
from penstock.spool.frame_reader import FrameReader
from penstock.spool.meta import DamagedSpoolMeta
from penstock.spool.recovery import RecoveredState, recover_spool

_MOST_LOOKS = 20
Seen = TypeVar("Seen")
ANY_CHUNK_SIZE = 512 << 20  # nothing is appended here, so any value serves


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolOverview:
    """A queue's folder at a glance. Its cost does not depend on the backlog. For a queue in use it is a snapshot."""

    path: str
    is_in_use: bool
    meta: str  # "version 3", "missing", "damaged"
    was_closed_properly: bool
    blocks: int
    bytes: int
    attempted: int  # handed out before and not acked: those will come again
    chunks: int
    disk_bytes: int
    oldest_enqueued_at: float | None
    next_sequence: int
    dead_letters: int
    quarantined_files: int
    foreign_files: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Bytes of the log that are no frame."""

    offset: int
    bytes: int
    reason: str
    blocks: int | None  # that were lost with them, None if that cannot be known
    is_mended: bool = False


@dataclass(kw_only=True, slots=True)
class CheckReport:
    """What reading every byte of a folder has shown."""

    path: str
    is_in_use: bool = False  # then what is at its end may still be on its way, and chunks may vanish
    meta: str = ""
    frames: int = 0
    blocks: int = 0  # whole, acked or not
    bytes_read: int = 0
    damages: list[Damage] = field(default_factory=list)
    missing_blocks: int = 0  # by their sequences, whatever became of their bytes
    torn_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return self.meta != "damaged" and not self.torn_bytes and all(damage.is_mended for damage in self.damages)

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "is_whole": self.is_whole})


def overview_of_spool(folder: str, files: SpoolFiles | None = None) -> SpoolOverview:
    """Look at a folder without changing it; QueueError if there is no queue."""
    files = files or OsSpoolFiles()
    return look_at_spool_in_use(_overview, files, folder)


def look_at_spool_in_use(look: Callable[[SpoolFiles, str], Seen], files: SpoolFiles, folder: str) -> Seen:
    """`look` again while chunks vanish under it: the queue's owner deletes those that are done."""
    for _ in range(_MOST_LOOKS):
        with suppress(FileNotFoundError):
            return look(files, folder)
    return look(files, folder)


def _overview(files: SpoolFiles, folder: str) -> SpoolOverview:
    state, version = _read_state(files, folder)
    reader = FrameReader(state.chunks, state.reader_offset, None)
    oldest = None
    while (found := reader.next_header()) is not None and oldest is None:
        if not state.acked.covers(found[1].first, found[1].end):
            oldest = found[1].enqueued_at or None
        reader.skip(found[1])
    state.chunks.close()
    letters = 0
    with suppress(QueueError):
        letters = overview_of_spool(f"{folder}/{FOLDER_NAME}", files).blocks
    return SpoolOverview(
        path=folder,
        is_in_use=is_spool_locked(files, folder),
        meta=version,
        was_closed_properly=not state.unclean,
        blocks=state.count,
        bytes=state.bytes,
        attempted=sum(sequence not in state.acked for sequence in state.attempts),
        chunks=len(state.chunks.chunks),
        disk_bytes=state.chunks.size_bytes,
        oldest_enqueued_at=oldest,
        next_sequence=state.next_sequence,
        dead_letters=letters,
        quarantined_files=len(files.names(state.quarantine.folder)),
        foreign_files=state.quarantine.foreign_files,
    )


def check_spool(
    folder: str,
    *,
    repair: bool = False,
    advance: Callable[[int], object] | None = None,
    files: SpoolFiles | None = None,
) -> CheckReport:
    """Read every frame. With `repair`, which wants the queue to be closed (QueueLocked), leave the folder whole:

    the torn tail is cut, the meta rebuilt at the next open, and damaged bytes are copied to the quarantine and
    replaced by a frame of the same length that says which blocks are gone. `advance` gets the bytes read.
    """
    files = files or OsSpoolFiles()
    lock = lock_spool_folder(files, folder) if repair and files.names(folder) else None
    try:
        report = CheckReport(path=folder, is_in_use=lock is None and is_spool_locked(files, folder))
        state, report.meta = look_at_spool_in_use(_read_state, files, folder)
        expected: int | None = None
        for chunk in list(state.chunks.chunks):
            try:
                expected = _check_chunk(files, state, chunk, report, expected, repair=repair)
            except FileNotFoundError:
                expected = None  # done, and deleted by the process that has the queue open
            if advance is not None:
                advance(chunk.size)
        if repair and report.meta == "damaged":
            recover_spool(files, folder, ANY_CHUNK_SIZE).chunks.close()
            files.unlink(f"{folder}/{meta.META_NAME}")
            report.meta = "missing"
        state.chunks.close()
        return report
    finally:
        if lock is not None:
            files.close(lock)


def _check_chunk(
    files: SpoolFiles,
    state: RecoveredState,
    chunk: ChunkFile,
    report: CheckReport,
    expected: int | None,
    *,
    repair: bool,
) -> int | None:
    """Read one chunk. Returns the sequence after its last block, None if no frame has said one yet."""
    is_last = chunk is state.chunks.chunks[-1]
    for start, end, header, reason in _pieces(state, chunk):
        report.bytes_read += end - start
        if header is not None and not reason:
            if expected is not None and header.follows > expected:
                report.missing_blocks += header.follows - expected
            report.frames += 1
            report.blocks += header.block_count - header.holes
            expected = header.end
        elif header is None and is_last and end == chunk.end:
            report.torn_bytes = 0 if repair or report.is_in_use else end - start
            if repair:
                state.quarantine.keep(state.chunks, chunk, start, end, "torn tail")
                state.chunks.truncate_at(start)
        else:
            first = header.first if header is not None else expected
            lost_end = header.end if header is not None else _following(state, end)
            lost = None if first is None or lost_end is None else max(0, lost_end - first)
            is_mended = False
            if first is not None and lost is not None:
                is_mended = repair and _mend(files, state, chunk, (start, end), first, lost, reason)
                report.missing_blocks += lost
                expected = first + lost
            report.damages.append(
                Damage(offset=start, bytes=end - start, reason=reason, blocks=lost, is_mended=is_mended)
            )
    return expected


def _pieces(state: RecoveredState, chunk: ChunkFile) -> Iterator[tuple[int, int, frames.FrameHeader | None, str]]:
    """(start, end, header, what is wrong) of everything that lies in the chunk, damaged or not."""
    reader = FrameReader(state.chunks, chunk.start, None)
    while (at := reader.offset) < chunk.end:
        found = reader.next_header()
        if found is None or found[0] >= chunk.end:
            yield at, chunk.end, None, "no frame"
            return
        offset, header = found
        if offset > at:
            yield at, offset, None, "no frame"
        frame = reader.read(header)
        yield offset, reader.offset, header, "" if frame is not None else "damaged body"


def _following(state: RecoveredState, offset: int) -> int | None:
    """What the frame behind `offset` says that the frame before it ended with."""
    found = FrameReader(state.chunks, offset, None).next_header()
    return found[1].follows if found is not None and found[1].checked else None


def _mend(
    files: SpoolFiles,
    state: RecoveredState,
    chunk: ChunkFile,
    span: tuple[int, int],
    first: int,
    lost: int,
    reason: str,
) -> bool:
    """Put a frame of holes in the place of damaged bytes; False if they are too few for one."""
    start, end = span
    filler = frames.encode_frame_of_holes(end - start, first, lost) if chunk.checked else None
    if filler is None:
        return False
    state.quarantine.keep(state.chunks, chunk, start, end, reason)
    write_all(files, chunk.handle, [filler], start - chunk.start)
    files.sync(chunk.handle)
    return True


def _read_state(files: SpoolFiles, folder: str) -> tuple[RecoveredState, str]:
    try:
        known = meta.load_spool_meta(files, folder)
        version = "missing" if known is None else f"version {known.version}"
    except DamagedSpoolMeta:
        version = "damaged"
    state = recover_spool(files, folder, ANY_CHUNK_SIZE, repair=False)
    if version == "missing" and not state.chunks.chunks:
        raise QueueError(f"there is no queue in {folder}")
    return state, version


def spool_size_on_disk(folder: str) -> int:
    """Bytes of the files in it, for progress bars."""
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())
