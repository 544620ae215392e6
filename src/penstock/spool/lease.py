"""A leased block: what `FastQueue.lease` hands out and `ack` or `nack` takes back, and where it lies in the log."""

from typing import NamedTuple


class Lease(NamedTuple):
    """One block, the consumer's until it is acked or nacked or the process ends.

    A tuple, because the queue makes one per block and this is the cheapest object that has names.
    """

    sequence: int
    """The block's number: grows with every push, is never used twice, may leave gaps."""
    attempts: int
    """How often it has been handed out, this time included."""
    data: bytes
    enqueued_at: float
    """Seconds since the epoch, to the millisecond."""

    def __repr__(self) -> str:
        return f"Lease(sequence={self.sequence}, attempts={self.attempts}, {len(self.data)} bytes)"


class FrameRef(NamedTuple):
    """Where a block that was read lies: its frame's offset and sequences [first, end)."""

    offset: int
    first: int
    end: int


def pushed_as_block(value: object) -> bytes:
    """The pushed value as bytes; TypeError if it is none of bytes, bytearray and memoryview."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a block is bytes, not {type(value).__name__}")
