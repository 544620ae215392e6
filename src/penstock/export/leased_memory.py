"""A queue in memory with leases: where batches wait without a disk, and where the failover keeps them."""

import threading
from collections import deque
from collections.abc import Iterable

from penstock.clock import Clock, SystemClock
from penstock.errors import BlockTooLarge, QueueClosed, QueueFull
from penstock.spool import DeadLetter, FastQueue, FullBehavior, Lease, MemoryQueue, QueueStats

_MAX_DEAD_LETTERS = 1000


class SendMemory:
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
        self._returned: dict[int, tuple[Lease, float]] = {}  # each with the time from which it may go out again
        self._bytes_out = 0  # of blocks that are leased or came back
        self._acked = self._nacked = self._redelivered = self._buried = 0
        self._dropped = dict.fromkeys(("oldest", "newest", "timeout", "disk_full", "disk_failed"), 0)
        self.dead_letters: deque[DeadLetter] = deque()
        self.dead_letters_dropped = 0

    # -- in ----------------------------------------------------------------------------------------------------------

    def push(self, block: bytes, *, timeout: float | None = None) -> int:
        """Take the block, or raise QueueFull as `full_behavior` says. Returns how many blocks were evicted for it."""
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
        """Drop the oldest block that is not on lease, else the oldest of all: its send may still succeed."""
        self._dropped["oldest"] += 1
        if self._returned:  # older than all that were never leased
            self._bytes_out -= len(self._returned.pop(min(self._returned))[0].data)
        elif len(self._queue):
            self._queue.pop()
        else:
            self._bytes_out -= len(self._leased.pop(min(self._leased)).data)

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
                due = min((at for _, at in self._returned.values()), default=deadline)
                self._not_empty.wait(min(deadline - now, max(due - now, 0.001)))

    def _take_locked(self, most: int, now: float) -> list[Lease]:
        taken: list[Lease] = []
        # Sorted each time: few are back at once, since the send gate closes on failures in a row.
        for sequence in sorted(sequence for sequence, (_, at) in self._returned.items() if at <= now)[:most]:
            lease, _ = self._returned.pop(sequence)
            taken.append(lease._replace(attempts=lease.attempts + 1))
            self._redelivered += 1
        for block, pushed_at in self._queue.pop_dated(most - len(taken)):
            taken.append(Lease(self._next, 1, block, pushed_at))
            self._bytes_out += len(block)
            self._next += 1
        self._leased.update((lease.sequence, lease) for lease in taken)
        return taken

    def end_delays(self) -> None:
        """Let everything that came back go out again now."""
        with self._lock:
            self._returned = {sequence: (lease, 0.0) for sequence, (lease, _) in self._returned.items()}

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        done = (leases,) if isinstance(leases, Lease) else tuple(leases)
        with self._lock:
            self._acked += sum(self._forget_locked(lease) for lease in done)

    def nack(self, lease: Lease, delay: float = 0.0, *, keep: bool = True) -> None:
        """Deliver the block again, however often it was: `keep` stands for that here as in a `FastQueue`."""
        if self.is_last_attempt(lease):
            lease = lease._replace(attempts=lease.attempts - 1)
        with self._lock:
            if self._leased.pop(lease.sequence, None) is None:
                return
            self._nacked += 1
            self._returned[lease.sequence] = lease, self._clock.monotonic() + delay
            self._not_empty.notify()

    def is_last_attempt(self, lease: Lease) -> bool:
        """Whether the block has had its `max_attempts` with this one."""
        return self.max_attempts is not None and lease.attempts >= self.max_attempts

    def _forget_locked(self, lease: Lease) -> bool:
        if self._leased.pop(lease.sequence, None) is None:
            return False
        self._bytes_out -= len(lease.data)
        self._not_full.notify_all()
        return True

    # -- dead letters ------------------------------------------------------------------------------------------------

    def reject(self, lease: Lease, reason: str) -> None:
        """Keep the block in `dead_letters`."""
        with self._lock:
            if self._forget_locked(lease):
                self._bury_locked(lease, reason)

    def bury(self, block: bytes, reason: str) -> None:
        """Keep a block that is not in the queue in `dead_letters`."""
        with self._lock:
            self._bury_locked(Lease(-1, 1, block, self._clock.time()), reason)

    def _bury_locked(self, lease: Lease, reason: str) -> None:
        """Keep the dead letter. The oldest ones go for it beyond a thousand or `max_bytes`, and are counted."""
        letters = self.dead_letters
        size = len(lease.data) + sum(len(letter.data) for letter in letters)
        while letters and (len(letters) >= _MAX_DEAD_LETTERS or size > self._queue.max_bytes):
            size -= len(letters.popleft().data)
            self.dead_letters_dropped += 1
        now = self._clock.time()
        letters.append(DeadLetter(lease.sequence, lease.attempts, lease.enqueued_at, now, reason, lease.data))
        self._buried += 1

    def replay_dead_letters(self, reason: str = "") -> tuple[int, int]:
        """Push those whose reason contains `reason` again. Returns how many, and how many stay."""
        with self._lock:
            chosen = deque(letter for letter in self.dead_letters if reason in letter.reason)
            self.dead_letters = deque(letter for letter in self.dead_letters if reason not in letter.reason)
        count = len(chosen)
        try:
            while chosen:
                self.push(chosen[0].data)
                chosen.popleft()
        finally:
            with self._lock:
                self.dead_letters.extendleft(reversed(chosen))
        return count, len(self.dead_letters)

    # -- state -------------------------------------------------------------------------------------------------------

    def resize(self, max_size: int) -> None:
        """Set the limit of blocks, from the next push on."""
        with self._lock:
            self._queue.max_size = max_size
            self._not_full.notify_all()

    def flush(self) -> None:
        """Does nothing: there is no disk."""

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
            since = [lease.enqueued_at for lease in self._leased.values()]
            since += [lease.enqueued_at for lease, _ in self._returned.values()]
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
                only_in_memory=held,
                pushed=self._queue.pushed,
                acked=self._acked,
                nacked=self._nacked,
                redelivered=self._redelivered,
                dead_lettered=self._buried,
                dead_letters_dropped=self.dead_letters_dropped,
                dropped=dict(self._dropped),
                oldest_age=max(0.0, self._clock.time() - min(since)) if since else 0.0,
            )

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed("the queue in memory is closed")


LeaseSource = FastQueue | SendMemory  # what batches wait in
