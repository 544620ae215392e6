"""Where batches wait: what the send queue needs of a queue, and the same for one that is in memory only."""

import heapq
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from penstock.clock import Clock, SystemClock
from penstock.errors import BlockTooLarge, QueueClosed, QueueError, QueueFull
from penstock.export.config import SendQueueConfig
from penstock.spool import DeadLetter, FastQueue, FullBehavior, Lease, MemoryQueue, QueueStats

MOST_DEAD_LETTERS = 1000


class Source(Protocol):
    """The part of `FastQueue` that the send queue uses."""

    @property
    def max_attempts(self) -> int | None: ...

    def push(self, block: bytes, *, timeout: float | None = None) -> int: ...

    def lease(self, max_blocks: int = 1, *, timeout: float | None = None) -> list[Lease]: ...

    def ack(self, leases: Lease | Iterable[Lease]) -> None: ...

    def nack(self, lease: Lease, delay: float = 0.0, *, keep: bool = False) -> None: ...

    def is_last_attempt(self, lease: Lease) -> bool: ...

    def reject(self, lease: Lease, reason: str) -> None: ...

    def bury(self, block: bytes, reason: str) -> None: ...

    def replay_dead_letters(self, reason: str = "") -> tuple[int, int]: ...

    def resize(self, max_size: int) -> None: ...

    def stats(self) -> QueueStats: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def __len__(self) -> int: ...


def as_source(queue: FastQueue | MemoryQueue, config: SendQueueConfig, clock: Clock) -> "Source":
    """The queue, with leases if it has none of its own."""
    if isinstance(queue, MemoryQueue):
        timeout = float(config.block_timeout)
        return LeasedMemory(queue, config.full_behavior, timeout, max_attempts=config.max_attempts, clock=clock)
    return queue


class LeasedMemory:
    """Leases, nacks and dead letters for a `MemoryQueue`, with the same meaning as those of a `FastQueue`.

    Order: as pushed; a nacked block keeps its place.
    Loss: what `full_behavior` says, and everything when the process ends. The limits count what is on lease, too.
    Threads: every method may be called from any thread.
    """

    def __init__(
        self,
        queue: MemoryQueue,
        full_behavior: FullBehavior = FullBehavior.DROP_OLDEST,
        block_timeout: float = 30.0,
        *,
        max_attempts: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._queue = queue
        self.max_attempts = max_attempts
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
        self._returned: dict[int, Lease] = {}
        # Heaps of sequences that came back. Dropped ones are in them still, and passed over.
        self._due: list[int] = []
        self._delayed: list[tuple[float, int]] = []
        self._bytes_out = 0  # of blocks that are leased or came back
        self._acked = self._nacked = self._redelivered = self._buried = self._letters_dropped = 0
        self._dropped = dict.fromkeys(("oldest", "newest", "timeout", "disk_full"), 0)
        self.dead_letters: deque[DeadLetter] = deque(maxlen=MOST_DEAD_LETTERS)

    # -- in ----------------------------------------------------------------------------------------------------------

    def push(self, block: bytes, *, timeout: float | None = None) -> int:
        """Take the block, or QueueFull as `full_behavior` says; how many old ones had to go for it."""
        if len(block) > self._queue.max_bytes:
            raise BlockTooLarge(f"a block of {len(block)} bytes exceeds max_bytes = {self._queue.max_bytes}")
        deadline = self._clock.monotonic() + (self._block_timeout if timeout is None else timeout)
        with self._lock:
            self._check_open_locked()
            evicted = 0
            while not self._fits_locked(len(block)):
                if self._full_behavior is FullBehavior.DROP_OLDEST:
                    self._evict_locked()
                    evicted += 1
                else:
                    self._wait_for_room_locked(deadline)
            self._queue.push(block)
            self._not_empty.notify()
            return evicted

    def _wait_for_room_locked(self, deadline: float) -> None:
        left = deadline - self._clock.monotonic()
        if self._full_behavior is FullBehavior.BLOCK and left > 0:
            self._not_full.wait(left)
            self._check_open_locked()
            return
        self._dropped["timeout" if self._full_behavior is FullBehavior.BLOCK else "newest"] += 1
        raise QueueFull(f"no room: {len(self)} blocks, {self.size_bytes} bytes in memory")

    def _evict_locked(self) -> None:
        """Drop the oldest block that is not on lease, else the oldest of all: its holder may still succeed."""
        self._dropped["oldest"] += 1
        if not self._returned and len(self._queue):
            self._queue.pop()
            return
        held = self._returned or self._leased  # what came back is older than all that was never out
        self._bytes_out -= len(held.pop(min(held)).data)

    def _fits_locked(self, length: int) -> bool:
        return len(self) < self._queue.max_size and self.size_bytes + length <= self._queue.max_bytes

    # -- out ---------------------------------------------------------------------------------------------------------

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
                self._not_empty.wait(min(deadline - now, max(due - now, 0.001)))

    def _take_locked(self, most: int, now: float) -> list[Lease]:
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappush(self._due, heapq.heappop(self._delayed)[1])
        taken: list[Lease] = []
        while self._due and len(taken) < most:
            lease = self._returned.pop(heapq.heappop(self._due), None)
            if lease is not None:
                taken.append(lease._replace(attempts=lease.attempts + 1))
                self._redelivered += 1
        for block, pushed_at in self._queue.pop_dated(most - len(taken)):
            taken.append(Lease(self._next, 1, block, pushed_at))
            self._bytes_out += len(block)
            self._next += 1
        self._leased.update((lease.sequence, lease) for lease in taken)
        return taken

    def wake(self) -> None:
        """Let everything that came back go out again now, whatever its delay."""
        with self._lock:
            for _, sequence in self._delayed:
                heapq.heappush(self._due, sequence)
            self._delayed.clear()

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        done = (leases,) if isinstance(leases, Lease) else tuple(leases)
        with self._lock:
            self._acked += sum(self._forget_locked(lease) for lease in done)

    def nack(self, lease: Lease, delay: float = 0.0, *, keep: bool = False) -> None:
        """Deliver the block again; after `max_attempts` it is a dead letter, unless it is to be kept all the same."""
        if self.is_last_attempt(lease):
            if not keep:
                self.reject(lease, "too many attempts")
                return
            lease = lease._replace(attempts=lease.attempts - 1)
        with self._lock:
            if self._leased.pop(lease.sequence, None) is None:
                return
            self._nacked += 1
            self._returned[lease.sequence] = lease
            if delay > 0:
                heapq.heappush(self._delayed, (self._clock.monotonic() + delay, lease.sequence))
            else:
                heapq.heappush(self._due, lease.sequence)
            self._not_empty.notify()

    def is_last_attempt(self, lease: Lease) -> bool:
        """Whether the block has had its `max_attempts` with this one."""
        return self.max_attempts is not None and lease.attempts >= self.max_attempts

    def reject(self, lease: Lease, reason: str) -> None:
        """Keep the block in `dead_letters`, the latest thousand of them."""
        with self._lock:
            if self._forget_locked(lease):
                self._bury_locked(lease, reason)

    def bury(self, block: bytes, reason: str) -> None:
        with self._lock:
            self._bury_locked(Lease(-1, 1, block, self._clock.time()), reason)

    def _bury_locked(self, lease: Lease, reason: str) -> None:
        self._buried += 1
        self._letters_dropped += len(self.dead_letters) == MOST_DEAD_LETTERS
        self.dead_letters.append(
            DeadLetter(lease.sequence, lease.attempts, lease.enqueued_at, self._clock.time(), reason, lease.data)
        )

    def _forget_locked(self, lease: Lease) -> bool:
        if self._leased.pop(lease.sequence, None) is None:
            return False
        self._bytes_out -= len(lease.data)
        self._not_full.notify_all()
        return True

    def replay_dead_letters(self, reason: str = "") -> tuple[int, int]:
        """Push those whose reason contains `reason` again; how many, and how many stay."""
        replayed = 0
        for _ in range(len(self.dead_letters)):  # not those that are refused again during the replay
            try:
                letter = self.dead_letters.popleft()
            except IndexError:
                break  # another replay has taken the rest
            if reason not in letter.reason:
                self.dead_letters.append(letter)
                continue
            try:
                self.push(letter.data)
            except QueueError:
                self.dead_letters.append(letter)
                raise
            replayed += 1
        return replayed, len(self.dead_letters)

    # -- state -------------------------------------------------------------------------------------------------------

    def resize(self, max_size: int) -> None:
        """Have another limit of blocks, from the next push on."""
        with self._lock:
            self._queue.max_size = max_size
            self._not_full.notify_all()

    def flush(self) -> None:
        """There is nothing to flush to."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def __len__(self) -> int:
        return len(self._queue) + len(self._leased) + len(self._returned)

    @property
    def size_bytes(self) -> int:
        return self._queue.size_bytes + self._bytes_out

    @property
    def evicted(self) -> int:
        """Blocks dropped to make room."""
        return self._dropped["oldest"]

    def stats(self) -> QueueStats:
        with self._lock:
            held = len(self)
            since = [lease.enqueued_at for part in (self._leased, self._returned) for lease in part.values()]
            if (oldest_at := self._queue.oldest_at()) is not None:
                since.append(oldest_at)
            return QueueStats(
                size=held,
                bytes=self.size_bytes,
                max_size=self._queue.max_size,
                max_bytes=self._queue.max_bytes,
                leased=len(self._leased),
                delayed=len(self._returned),
                inmemory_blocks=held,
                disk_bytes=0,
                disk_available_bytes=0,
                chunks=0,
                pushed=self._queue.pushed,
                acked=self._acked,
                nacked=self._nacked,
                redelivered=self._redelivered,
                dead_lettered=self._buried,
                dead_letters_dropped=self._letters_dropped,
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
                oldest_age=max(0.0, self._clock.time() - min(since)) if since else 0.0,
            )

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed("the queue in memory is closed")
