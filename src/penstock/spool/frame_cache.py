"""The frames that the reader comes to next, kept in memory when they are written.

A consumer that keeps up with its producers reads nothing back from the disk.
"""

from collections import deque

from penstock.spool.lease import FrameRef, Lease

_MOST_BYTES = 4 << 20


class FrameCache:
    """Frames of one block each that follow one another in the log, up to `most_blocks` and 4 MiB.

    A frame is found by its offset. The reader takes a frame that is not here from the disk: it is the same.
    """

    def __init__(self, most_blocks: int) -> None:
        self._frames: deque[tuple[FrameRef, int, Lease]] = deque()
        self._most_blocks = most_blocks
        self._bytes = 0
        self._end = -1  # where the last one ends

    def add(self, ref: FrameRef, end: int, lease: Lease, reader_offset: int) -> None:
        """A frame from `ref.offset` to `end` has been written, the reader stands at `reader_offset`."""
        if ref.offset != (self._end if self._frames else reader_offset):
            return  # between those that are here and this one lie others
        length = len(lease.data)
        if len(self._frames) >= self._most_blocks or self._bytes + length > _MOST_BYTES:
            return
        self._frames.append((ref, end, lease))
        self._bytes += length
        self._end = end

    def take(self, offset: int) -> tuple[FrameRef, int, Lease] | None:
        """The frame at `offset`, its end and its block, if it is here."""
        frames = self._frames
        while frames:
            found = frames[0]
            if found[0].offset > offset:
                return None
            frames.popleft()
            self._bytes -= len(found[2].data)
            if found[0].offset == offset:
                return found
        return None
