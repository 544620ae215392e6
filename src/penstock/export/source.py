"""Where batches wait: what the send queue needs of a queue, and the same for one that is in memory only."""

import heapq
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from penstock.clock import Clock, SystemClock
from penstock.errors import BlockTooLarge, QueueClosed, QueueFull
from penstock.spool import DeadLetter, FastQueue, FullBehavior, Lease, MemoryQueue, QueueStats

MOST_DEAD_LETTERS = 1000
_LOOK_AGAIN = 0.5  # seconds: somebody else may push straight into the MemoryQueue, and we are not told


class Source(Protocol):
    """The part of `FastQueue` that the send queue uses."""

    def push(self, block: bytes) -> int: ...

    def lease(self, max_blocks: int = 1, *, timeout: float | None = None) -> list[Lease]: ...

    def ack(self, leases: Lease | Iterable[Lease]) -> None: ...

    def nack(self, lease: Lease, delay: float = 0.0) -> None: ...

    def reject(self, lease: Lease, reason: str) -> None: ...

    def stats(self) -> QueueStats: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def __len__(self) -> int: ...


def as_source(
    queue: FastQueue | MemoryQueue, full_behavior: FullBehavior, block_timeout: float, clock: Clock
) -> "Source":
    """The queue, with leases if it has none of its own."""
    if isinstance(queue, MemoryQueue):
        return LeasedMemory(queue, full_behavior, block_timeout, clock=clock)
    return queue


class LeasedMemory:
    """Leases, nacks and dead letters for a `MemoryQueue`, with the same meaning as those of a `FastQueue`.

    Order: as pushed; a nacked block keeps its place.
    Loss: as `MemoryQueue`, and everything when the process ends. `full_behavior` holds for those who push here.
    Threads: every method may be called from any thread.
    """

    def __init__(
        self,
        queue: MemoryQueue,
        full_behavior: FullBehavior = FullBehavior.DROP_OLDEST,
        block_timeout: float = 30.0,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._queue = queue
        self._full_behavior = full_behavior
        self._block_timeout = block_timeout
        self._clock = clock or SystemClock()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._closed = False
        self._next = 0
        self._leased: dict[int, Lease] = {}
        self._due: list[tuple[int, Lease]] = []
        self._delayed: list[tuple[float, int, Lease]] = []
        self._bytes_out = 0  # of blocks that are leased or came back
        self._acked = self._nacked = self._redelivered = self._buried = 0
        self._dropped = dict.fromkeys(("oldest", "newest", "timeout", "disk_full"), 0)
        self.dead_letters: deque[DeadLetter] = deque(maxlen=MOST_DEAD_LETTERS)

    def push(self, block: bytes) -> int:
        """Take the block, or QueueFull as `full_behavior` says; how many are held now."""
        if len(block) > self._queue.max_bytes:
            raise BlockTooLarge(f"a block of {len(block)} bytes exceeds max_bytes = {self._queue.max_bytes}")
        deadline = self._clock.monotonic() + self._block_timeout
        with self._lock:
            self._check_open_locked()
            while self._full_behavior is not FullBehavior.DROP_OLDEST and not self._fits_locked(len(block)):
                left = deadline - self._clock.monotonic()
                if self._full_behavior is FullBehavior.BLOCK and left > 0:
                    self._not_full.wait(left)
                    self._check_open_locked()
                    continue
                self._dropped["timeout" if self._full_behavior is FullBehavior.BLOCK else "newest"] += 1
                raise QueueFull(f"no room: {len(self._queue)} blocks, {self._queue.size_bytes} bytes in memory")
            self._dropped["oldest"] += self._queue.push(block)
            self._not_empty.notify()
            return len(self)

    def lease(self, max_blocks: int = 1, *, timeout: float | None = None) -> list[Lease]:
        """Up to `max_blocks` blocks, oldest first; waits up to `timeout` seconds for the first."""
        deadline = self._clock.monotonic() + (timeout or 0.0)
        with self._lock:
            while True:
                self._check_open_locked()
                now = self._clock.monotonic()
                taken = self._take_locked(max_blocks, now)
                if taken or now >= deadline:
                    return taken
                due = self._delayed[0][0] if self._delayed else deadline
                self._not_empty.wait(min(deadline - now, max(due - now, 0.001), _LOOK_AGAIN))

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        done = (leases,) if isinstance(leases, Lease) else tuple(leases)
        with self._lock:
            for lease in done:
                if self._leased.pop(lease.sequence, None) is not None:
                    self._bytes_out -= len(lease.data)
                    self._acked += 1
            self._not_full.notify_all()

    def nack(self, lease: Lease, delay: float = 0.0) -> None:
        with self._lock:
            if self._leased.pop(lease.sequence, None) is None:
                return
            self._nacked += 1
            if delay > 0:
                heapq.heappush(self._delayed, (self._clock.monotonic() + delay, lease.sequence, lease))
            else:
                heapq.heappush(self._due, (lease.sequence, lease))
            self._not_empty.notify()

    def reject(self, lease: Lease, reason: str) -> None:
        """Keep the block in `dead_letters`, the latest thousand of them."""
        with self._lock:
            if lease.sequence not in self._leased:
                return
            self._buried += 1
            self.dead_letters.append(
                DeadLetter(lease.sequence, lease.attempts, lease.enqueued_at, self._clock.time(), reason, lease.data)
            )
        self.ack(lease)

    def flush(self) -> None:
        """There is nothing to flush to."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def __len__(self) -> int:
        return len(self._queue) + len(self._leased) + len(self._due) + len(self._delayed)

    @property
    def size_bytes(self) -> int:
        return self._queue.size_bytes + self._bytes_out

    def stats(self) -> QueueStats:
        with self._lock:
            held = len(self)
            return QueueStats(
                size=held,
                bytes=self.size_bytes,
                max_size=self._queue.max_size,
                max_bytes=self._queue.max_bytes,
                leased=len(self._leased),
                delayed=len(self._due) + len(self._delayed),
                inmemory_blocks=held,
                disk_bytes=0,
                disk_available_bytes=0,
                chunks=0,
                pushed=self._queue.pushed,
                acked=self._acked,
                nacked=self._nacked,
                redelivered=self._redelivered,
                dead_lettered=self._buried,
                dropped=dict(self._dropped),
                disk_full=0,
                disk_failures=0,
                meta_syncs=0,
                chunk_rotations=0,
                inmemory_flushes=0,
                damaged_regions=0,
                damaged_bytes=0,
                lost_blocks=0,
                foreign_files=0,
                unclean_start=False,
                oldest_age=0.0,
            )

    def _take_locked(self, most: int, now: float) -> list[Lease]:
        while self._delayed and self._delayed[0][0] <= now:
            _, sequence, lease = heapq.heappop(self._delayed)
            heapq.heappush(self._due, (sequence, lease))
        taken: list[Lease] = []
        while self._due and len(taken) < most:
            lease = heapq.heappop(self._due)[1]
            taken.append(lease._replace(attempts=lease.attempts + 1))
            self._redelivered += 1
        for block in self._queue.pop_many(most - len(taken)):
            taken.append(Lease(self._next, 1, block, self._clock.time()))
            self._bytes_out += len(block)
            self._next += 1
        self._leased.update((lease.sequence, lease) for lease in taken)
        return taken

    def _fits_locked(self, length: int) -> bool:
        return len(self) < self._queue.max_size and self.size_bytes + length <= self._queue.max_bytes

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed("the queue in memory is closed")
