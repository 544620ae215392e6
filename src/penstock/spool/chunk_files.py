"""The log: one endless sequence of bytes, cut into chunk files that are named by their offset (16 hex digits).

A frame never crosses from one chunk into the next. A chunk is as long as its file; the next one begins at or behind
its end (the seed leaves gaps in the offsets, and consumed chunks leave gaps too), so to read on behind the end of a
chunk is to read the next file. A frame larger than `chunk_size` has a chunk of its own.
"""

import re
from bisect import bisect_right
from contextlib import suppress
from itertools import pairwise

from penstock.spool import frames
from penstock.spool.files import Buffers, SpoolFiles, write_all

_NAME = re.compile(r"[0-9a-f]{16}")
_LOOK = 1 << 20
_LOOK_FRAMES = 8  # so many plausible lengths in a row are no accident
_OPEN_CHUNKS = 16  # handles kept open; a backlog of a terabyte has two thousand chunks


class ChunkFile:
    """One chunk file. `first` is the sequence of its first whole frame, None while that is unknown."""

    __slots__ = ("checked", "deleted", "first", "handle", "size", "start", "syncing")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self.first: int | None = None
        self.checked = True
        self.handle = -1
        self.syncing = 0
        self.deleted = False

    @property
    def end(self) -> int:
        return self.start + self.size


class ChunkLog:
    """The chunk files of one folder. Not thread-safe: the queue's lock guards it."""

    def __init__(self, files: SpoolFiles, folder: str, chunk_size: int, seed_end: int | None) -> None:
        """`seed_end`: only chunks below this offset are in the seed's format; None where no meta says it."""
        self._files = files
        self._folder = folder
        self._chunk_size = chunk_size
        self.chunks = [ChunkFile(int(name, 16), 0) for name in sorted(files.names(folder)) if _NAME.fullmatch(name)]
        for chunk in self.chunks:
            chunk.size = files.size_of(self.path(chunk))
        self._starts = [chunk.start for chunk in self.chunks]
        self._writer: ChunkFile | None = None
        self._dirty: list[ChunkFile] = []
        self._opened: list[ChunkFile] = []
        self._deleted_handles: list[int] = []  # handles of deleted chunks
        self._names_changed = False
        self.rotations = 0
        for chunk in self.chunks:
            chunk.checked = chunk.start >= seed_end if seed_end is not None else not self._looks_like_seed(chunk)
            chunk.first = self._first_sequence(chunk)
        # Bytes that came into a chunk by damage: an offset may mean two places then, and none may be written twice.
        self.overlaps = any(chunk.end > following.start for chunk, following in pairwise(self.chunks))
        self.seed_end = max([0, *(chunk.end for chunk in self.chunks if not chunk.checked)])

    @property
    def end(self) -> int:
        """The offset at which the next frame will lie, if it fits the chunk."""
        return max((chunk.end for chunk in self.chunks[-2:]), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    def path(self, chunk: ChunkFile) -> str:
        return f"{self._folder}/{chunk.start:016x}"

    def append(self, buffers: Buffers, length: int, first: int) -> int:
        """Write one or more whole frames. Returns their offset; an OSError leaves the log as it was."""
        writer = self._writer
        if writer is None or (writer.size and writer.size + length > self._chunk_size):
            writer = self._begin_chunk(first)
        try:
            write_all(self._files, writer.handle, buffers, writer.size)
        except OSError:
            with suppress(OSError):  # the next frame overwrites it, recovery would cut it
                self._files.truncate(writer.handle, writer.size)
            raise
        offset = writer.end
        writer.size += length
        if writer not in self._dirty:
            self._dirty.append(writer)
        return offset

    def mark(self) -> tuple[int, int]:
        """Where the log ends, for `rollback`."""
        return len(self.chunks), self.chunks[-1].size if self.chunks else 0

    def rollback(self, mark: tuple[int, int]) -> None:
        """Take back what was appended since `mark`, as far as the disk allows; the next frame overwrites the rest."""
        count, size = mark
        for chunk in reversed(self.chunks[count:]):  # a kill in between leaves a beginning, not a gap
            self._shorten(chunk, 0)  # first: one that cannot be deleted has at least to be empty
            with suppress(OSError):
                self.delete(chunk)
        if count and self.chunks[count - 1].size > size:
            self._shorten(self.chunks[count - 1], size)
            self._writer = self.chunks[count - 1]
        if len(self.chunks) > count:
            self._writer = None  # the next frame uses the empty file that is left, under its own first sequence

    def _shorten(self, chunk: ChunkFile, size: int) -> None:
        with suppress(OSError):
            self._truncate(chunk, size)
        chunk.size = size

    def begin_empty_chunk(self, first: int) -> None:
        """Begin the next chunk now, so that the one before can be deleted."""
        self._begin_chunk(first)

    @property
    def last_size(self) -> int:
        return self.chunks[-1].size if self.chunks else 0

    def _begin_chunk(self, first: int) -> ChunkFile:
        chunk = ChunkFile(self.end, 0)
        if self.chunks and self.chunks[-1].start == chunk.start:  # an empty file: nothing to keep
            chunk = self.chunks[-1]
            self._open(chunk)
        else:
            self._open(chunk, create=True)
            self.rotations += bool(self.chunks)
            self.chunks.append(chunk)
            self._starts.append(chunk.start)
        chunk.first, chunk.checked = first, True
        self._writer = chunk
        self._names_changed = True
        return chunk

    def _open(self, chunk: ChunkFile, *, create: bool = False) -> None:
        """Open the chunk unless it is open; the chunk that was opened longest ago may be closed for it."""
        if chunk.handle >= 0:
            return
        chunk.handle = self._files.open(self.path(chunk), create=create)
        self._opened.append(chunk)
        for other in self._opened[:-_OPEN_CHUNKS]:
            if other is not self._writer and not other.syncing and other not in self._dirty:
                self._close(other)

    def _close(self, chunk: ChunkFile) -> None:
        if chunk.handle >= 0:
            self._files.close(chunk.handle)
            chunk.handle = -1
            self._opened.remove(chunk)

    def _release_handle(self, chunk: ChunkFile) -> None:
        """Keep the handle of a deleted chunk for `take_deleted_handles`."""
        if chunk.handle >= 0:
            self._deleted_handles.append(chunk.handle)
            chunk.handle = -1
            self._opened.remove(chunk)

    def take_deleted_handles(self) -> list[int]:
        """The handles of chunks deleted since the last time, to be closed without the queue's lock.

        The last handle of a deleted file is what keeps its bytes: to close it takes 0.1 s for 512 MiB.
        """
        gone, self._deleted_handles = self._deleted_handles, []
        return gone

    def chunk_at(self, offset: int) -> ChunkFile | None:
        """The chunk in which a reader at `offset` goes on, None at the end of the log."""
        index = bisect_right(self._starts, offset) - 1
        if index >= 0 and offset < self.chunks[index].end:
            return self.chunks[index]
        return self._first_nonempty(index + 1)

    def chunk_after(self, chunk: ChunkFile) -> ChunkFile | None:
        """The next chunk that holds anything."""
        return self._first_nonempty(bisect_right(self._starts, chunk.start))

    def _first_nonempty(self, index: int) -> ChunkFile | None:
        while index < len(self.chunks) and not self.chunks[index].size:
            index += 1
        return self.chunks[index] if index < len(self.chunks) else None

    def with_ends(self) -> list[tuple[ChunkFile, int | None]]:
        """Returns each chunk with the first sequence that is known to lie behind it, None for the last."""
        ends: list[int | None] = [None]
        for chunk in reversed(self.chunks):  # one that is empty or begins with damage does not know its own
            ends.append(ends[-1] if chunk.first is None else chunk.first)
        return list(zip(self.chunks, ends[-2::-1]))

    def read(self, chunk: ChunkFile, offset: int, length: int) -> bytes:
        """At most `length` bytes of the chunk from the log's `offset` on."""
        if chunk.handle < 0:
            self._open(chunk)
        at = offset - chunk.start
        return self._files.pread(chunk.handle, min(length, chunk.size - at), at)

    def truncate_at(self, offset: int) -> None:
        """End the last chunk at `offset`: what lay behind was never accepted."""
        self._truncate(self.chunks[-1], offset - self.chunks[-1].start)

    def _truncate(self, chunk: ChunkFile, size: int) -> None:
        self._open(chunk)
        self._files.truncate(chunk.handle, size)
        chunk.size = size

    def resume_writing(self) -> None:
        """Append to the last chunk, if it has checked frames and room."""
        if self.chunks and self.chunks[-1].checked and self.chunks[-1].size < self._chunk_size and not self.overlaps:
            chunk = self.chunks[-1]
            self._open(chunk)
            self._writer = chunk

    def mark_unsynced(self, offset: int) -> None:
        """Let the next sync cover what lies behind `offset`: its writer may have died before its own sync."""
        for chunk in self.chunks:
            if chunk.end > offset:
                self._open(chunk)
                self._dirty.append(chunk)
                self._names_changed = True

    def begin_sync(self) -> tuple[list[ChunkFile], bool]:
        """The chunks with writes that no sync has covered, pinned until `end_sync`; whether names have changed."""
        dirty, names = self._dirty, self._names_changed
        self._dirty, self._names_changed = [], False
        for chunk in dirty:
            chunk.syncing += 1
        return dirty, names

    def end_sync(self, chunks: list[ChunkFile], *, is_refused: bool, is_interrupted: bool) -> list[int]:
        """Unpin the chunks of `begin_sync`, dirty again after an interruption. Returns handles to close."""
        for chunk in chunks:
            chunk.syncing -= 1
            if chunk.deleted and not chunk.syncing:
                self._release_handle(chunk)
        if is_interrupted:
            self._dirty += [chunk for chunk in chunks if chunk not in self._dirty and not chunk.deleted]
            self._names_changed = True
        if is_refused:  # the kernel has given up on those pages: another sync of this file would claim success
            self._writer = None
        return self.take_deleted_handles()

    def delete(self, chunk: ChunkFile) -> None:
        self._files.unlink(self.path(chunk))
        index = self.chunks.index(chunk)
        del self.chunks[index], self._starts[index]
        chunk.deleted = True
        if chunk is self._writer:
            self._writer = None
        if chunk in self._dirty:
            self._dirty.remove(chunk)
        if not chunk.syncing:
            self._release_handle(chunk)

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.deleted = True  # one that is being synced is closed when that is over
            if not chunk.syncing:
                self._close(chunk)
        for handle in self.take_deleted_handles():
            self._files.close(handle)

    def _first_sequence(self, chunk: ChunkFile) -> int | None:
        data = self.read(chunk, chunk.start, frames.HEADER_SIZE)
        try:
            return frames.parse_frame_header(data, 0, chunk.start, checked=chunk.checked).first
        except frames.DamagedFrame:
            return None

    def _looks_like_seed(self, chunk: ChunkFile) -> bool:
        """Whether frames of the seed follow one another here, and there is no checked frame."""
        data = self.read(chunk, chunk.start, _LOOK)
        if frames.MAGIC in data:
            return False
        at = seen = 0
        while at < len(data) and seen < _LOOK_FRAMES:
            try:
                header = frames.parse_frame_header(data, at, chunk.start + at, checked=False)
            except frames.DamagedFrame:
                break
            if at + header.size > chunk.size:
                break
            at, seen = at + header.size, seen + 1
        return seen == _LOOK_FRAMES or (seen > 0 and at >= len(data))
