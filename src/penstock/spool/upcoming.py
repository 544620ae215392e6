"""The frames that the reader comes to next, in memory since they were pushed: who keeps up reads nothing back."""

from collections import deque

from penstock.spool.lease import FrameRef, Lease

_MOST_BYTES = 4 << 20


class Upcoming:
    """Frames that lie one behind another in the log, up to so many blocks and bytes; the others have to be read.

    Each is known by its offset, so a reader that stands there may take it from here or from the disk: it is the same.
    """

    def __init__(self, most_blocks: int) -> None:
        self._frames: deque[tuple[FrameRef, int, list[Lease], int]] = deque()
        self.most_blocks = most_blocks
        self._blocks = self._bytes = 0
        self._end = -1  # where the last one ends

    def add(self, ref: FrameRef, end: int, leases: list[Lease], length: int, reader_offset: int) -> None:
        """A frame from `ref.offset` to `end` has been written, the reader stands at `reader_offset`."""
        if ref.offset != (self._end if self._frames else reader_offset):
            return  # between those that are here and this one lie others
        if self._blocks + len(leases) > self.most_blocks or self._bytes + length > _MOST_BYTES:
            return
        self._frames.append((ref, end, leases, length))
        self._blocks += len(leases)
        self._bytes += length
        self._end = end

    def take(self, offset: int) -> tuple[FrameRef, int, list[Lease], int] | None:
        """The frame at `offset`, its end, its blocks and their bytes, if it is here."""
        frames = self._frames
        while frames:
            found = frames[0]
            if found[0].offset > offset:
                return None
            frames.popleft()
            self._blocks -= len(found[2])
            self._bytes -= found[3]
            if found[0].offset == offset:
                return found
        return None
