"""MemoryQueue: the failover of a durable queue, bounded by count and bytes, gone with the process."""

import threading
from collections import deque

from penstock.clock import Clock, SystemClock
from penstock.errors import BlockTooLarge, ConfigError
from penstock.spool.lease import pushed_as_block
from penstock.units import parse_bytes


class MemoryQueue:
    """A bounded queue of byte blocks in memory that evicts its oldest to make room.

    Order: first in, first out.
    Loss: the oldest blocks where there is no room, counted in `evicted`; everything when the process ends.
    Threads: every method may be called from any thread.
    """

    def __init__(self, max_size: int = 1000, max_bytes: int | str = "256Mi", *, clock: Clock | None = None) -> None:
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise ConfigError(f"max_size must be >= 1, got {max_size!r}")
        self.max_size = max_size
        self.max_bytes = parse_bytes(max_bytes, "max_bytes")
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes must be >= 1, got {self.max_bytes}")
        self._clock = clock or SystemClock()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._blocks: deque[tuple[bytes, float]] = deque()  # each with the time at which it came
        self._bytes = 0
        self.pushed = 0
        self.evicted = 0

    def push(self, block: bytes) -> int:
        """Take the block. Returns how many old ones were evicted for it. Raises BlockTooLarge if it can never fit."""
        if type(block) is not bytes:
            block = pushed_as_block(block)
        if len(block) > self.max_bytes:
            raise BlockTooLarge(f"a block of {len(block)} bytes exceeds max_bytes = {self.max_bytes}")
        with self._lock:
            evicted = 0
            while self._blocks and (len(self._blocks) >= self.max_size or self._bytes + len(block) > self.max_bytes):
                self._bytes -= len(self._blocks.popleft()[0])
                evicted += 1
            self._blocks.append((block, self._clock.time()))
            self._bytes += len(block)
            self.pushed += 1
            self.evicted += evicted
            return evicted

    def pop(self) -> bytes | None:
        """The oldest block, None if there is none."""
        taken = self.pop_many(1)
        return taken[0] if taken else None

    def pop_many(self, most: int) -> list[bytes]:
        """Up to `most` blocks, oldest first."""
        return [block for block, _ in self.pop_dated(most)]

    def pop_dated(self, most: int) -> list[tuple[bytes, float]]:
        """The same, each with the time at which it was pushed, in seconds since the epoch."""
        with self._lock:
            taken = [self._blocks.popleft() for _ in range(min(most, len(self._blocks)))]
            self._bytes -= sum(len(block) for block, _ in taken)
            return taken

    def peek(self) -> bytes | None:
        """The oldest block; nothing changes."""
        with self._lock:
            return self._blocks[0][0] if self._blocks else None

    def oldest_at(self) -> float | None:
        """When the oldest block was pushed; None if there is none."""
        with self._lock:
            return self._blocks[0][1] if self._blocks else None

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def size_bytes(self) -> int:
        return self._bytes
