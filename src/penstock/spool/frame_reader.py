"""Reads frames forward through the log and past damage; no content of the bytes makes it fail."""

from contextlib import suppress

from penstock.spool import frames
from penstock.spool.chunk_files import ChunkFile, ChunkLog
from penstock.spool.frames import HEADER_SIZE, MAGIC, DamagedFrame, Frame, FrameHeader
from penstock.spool.quarantine import Quarantine

_WINDOW = 64 * 1024  # many small frames come with one read
_SMALL_FRAME = 16 * 1024  # behind a larger one, reading ahead would only copy bytes twice
_SEARCH = 1 << 20


class FrameReader:
    """Walks the log from `offset` on, one frame after another, and steps over what is no frame."""

    def __init__(self, chunks: ChunkLog, offset: int, quarantine: Quarantine | None) -> None:
        self._chunks = chunks
        self._quarantine = quarantine  # None: look, but neither count nor keep what is damaged
        self.offset = offset
        self._chunk: ChunkFile | None = None
        self._window = b""
        self._window_at = 0
        self._window_of: ChunkFile | None = None
        self._read_size = _WINDOW
        self._skipped: tuple[int, FrameHeader] | None = None

    def _current(self) -> ChunkFile | None:
        """The chunk in which the next frame lies, None at the end of the log.

        One file after the other, whatever their names say: bytes that came into a chunk by damage make it reach over
        the beginning of the next one.
        """
        chunk = self._chunk
        if chunk is None or chunk.deleted:
            chunk = self._chunks.chunk_at(self.offset)
        elif self.offset < chunk.end:
            return chunk
        else:
            chunk = self._chunks.chunk_after(chunk)
            if chunk is not None:
                self.offset = chunk.start
        if chunk is not None:
            self._chunk = chunk
            self.offset = max(self.offset, chunk.start)
        return chunk

    def has_passed(self, chunk: ChunkFile) -> bool:
        current = self._chunk
        if current is None:
            return chunk.end <= self.offset
        return chunk.start < current.start or (chunk is current and self.offset >= chunk.end)

    def next_header(self) -> tuple[int, FrameHeader] | None:
        """The next whole frame's offset and header, None at the end of the log. `read` or `skip` moves on."""
        while True:
            chunk = self._current()
            if chunk is None:
                return None
            try:
                header = self._header(chunk, self.offset)
            except DamagedFrame as damage:
                start = self.offset
                if self._goes_back_into_skipped(chunk):
                    continue
                self.offset = self._next_good(chunk, start + 1)
                if self._quarantine is not None:
                    self._quarantine.keep(self._chunks, chunk, start, self.offset, str(damage))
                continue
            return self.offset, header

    def jump(self, offset: int) -> None:
        """Go on at `offset`, the end of a frame that was taken from the cache."""
        self.offset = offset
        self._chunk = self._skipped = None

    def skip(self, header: FrameHeader) -> None:
        self._skipped = self.offset, header
        self.offset += header.size

    def read(self, header: FrameHeader) -> Frame | None:
        """The frame whose header `next_header` gave; None if its body is damaged. Moves behind it either way."""
        offset = self.offset
        chunk = self._chunk
        assert chunk is not None
        end = offset + header.size
        try:
            frame = self._frame(chunk, offset, header)
        except DamagedFrame as damage:
            frame = None
            end = self._end_of_damaged(chunk, offset, header)
            if self._quarantine is not None:
                self._quarantine.keep(self._chunks, chunk, offset, end, str(damage))
        self.offset = end
        return frame

    def _end_of_damaged(self, chunk: ChunkFile, offset: int, header: FrameHeader) -> int:
        """Where reading goes on behind a damaged body: at its end, or at the successor that missing bytes drew inside.

        Only the frame that follows this one by its sequences is believed there: a block may hold frames of its own.
        """
        end = offset + header.size
        if end >= chunk.end or self._good_header(chunk, end) is not None:
            return end
        return self._successor_inside(chunk, offset, header) or end

    def _goes_back_into_skipped(self, chunk: ChunkFile) -> bool:
        """No frame follows a skipped one. Its body was not checked, so its successor may have been drawn inside it."""
        skipped, self._skipped = self._skipped, None
        if skipped is None or skipped[0] + skipped[1].size != self.offset or skipped[0] < chunk.start:
            return False
        found = self._successor_inside(chunk, *skipped)
        if found is not None:
            self.offset = found
        return found is not None

    def _successor_inside(self, chunk: ChunkFile, offset: int, header: FrameHeader) -> int | None:
        start, end = offset + header.header_size, offset + header.size
        while header.checked and (start := self._next_good(chunk, start)) < end:
            found = self._good_header(chunk, start)
            if found is not None and found.follows == header.end:
                return start
            start += 1
        return None

    def _good_header(self, chunk: ChunkFile, offset: int) -> FrameHeader | None:
        with suppress(DamagedFrame):
            return self._header(chunk, offset)
        return None

    def _frame(self, chunk: ChunkFile, offset: int, header: FrameHeader) -> Frame:
        at = offset + header.header_size
        length = header.size - header.header_size
        self._read_size = _WINDOW if header.size < _SMALL_FRAME else HEADER_SIZE
        inside = at - self._window_at if self._window_of is chunk else -1
        if inside >= 0 and inside + length <= len(self._window):
            body = self._window[inside : inside + length]
        else:
            body = self._chunks.read(chunk, at, length)
        return frames.decode_frame(offset, header, body)

    def _header(self, chunk: ChunkFile, offset: int) -> FrameHeader:
        inside = offset - self._window_at if self._window_of is chunk else -1
        if inside < 0 or inside + HEADER_SIZE > len(self._window):
            self._window = self._chunks.read(chunk, offset, self._read_size)
            self._window_at, self._window_of = offset, chunk
            inside = 0
        header = frames.parse_frame_header(self._window, inside, offset, checked=chunk.checked)
        if offset + header.size > chunk.end:
            raise DamagedFrame("cut frame")
        return header

    def _next_good(self, chunk: ChunkFile, start: int) -> int:
        """The offset of the next whole header behind `start`, or the end of the chunk."""
        while chunk.checked and start < chunk.end:
            data = self._chunks.read(chunk, start, _SEARCH)
            found = data.find(MAGIC, frames.MAGIC_AT)
            while found >= 0:
                offset = start + found - frames.MAGIC_AT
                if self._good_header(chunk, offset) is not None:
                    return offset
                found = data.find(MAGIC, found + 1)
            start += max(1, len(data) - HEADER_SIZE)
        return chunk.end
