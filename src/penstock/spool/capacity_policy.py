"""The gate of a queue: who may come in, what a full queue or a full disk does to those who may not."""

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate

from penstock.clock import Clock
from penstock.errors import BlockTooLarge, QueueClosed, QueueError, QueueFull
from penstock.spool.backlog import Backlog
from penstock.spool.config import FastQueueConfig, FullBehavior, seconds, size
from penstock.spool.files import DISK_FULL, disk_error
from penstock.spool.group_commit import Round, Staged
from penstock.spool.syncer import Keeper

log = logging.getLogger(__name__)

_DISK_RETRY = 0.25  # how often a blocked push looks whether the disk has room again


class Gate:
    """The policies of one queue. Every method wants the queue's lock held; those that wait let it go meanwhile."""

    def __init__(
        self, lock: threading.Lock, backlog: Backlog, keeper: Keeper, config: FastQueueConfig, clock: Clock
    ) -> None:
        self._lock = lock
        self._backlog = backlog
        self._keeper = keeper
        self._clock = clock
        self._behavior = config.full_behavior
        self._block_timeout = seconds(config.block_timeout)
        self.max_size = config.max_size
        self.max_bytes = size(config.max_bytes)
        self.max_block = size(config.max_block_bytes)
        # The queue's lock guards everything below.
        self.is_closed = False
        self._closed_because = "is closed"
        self.not_full = threading.Condition(lock)
        self.waiting = 0
        self.dropped = dict.fromkeys(("oldest", "newest", "timeout", "disk_full"), 0)
        self.disk_full = 0
        self.disk_failures = 0
        self.is_dropping = False
        self._just_dropped = self._disk_refuses = False

    def check_open(self) -> None:
        if self.is_closed:
            raise QueueClosed(f"the queue in {self._backlog.store.folder} {self._closed_because}")

    def leave_to_parent(self, parent: int) -> None:
        """This process is a fork of the one that has the queue. No lock: its holder may not exist here."""
        self.is_closed = True
        self._closed_because = f"belongs to process {parent}, of which this one is a fork: open queues after forking"

    def has_room(self, count: int, length: int, largest: int) -> bool:
        """Whether `count` blocks of `length` bytes together may come in as things are."""
        backlog = self._backlog
        return not (
            backlog.count + count > self.max_size
            or backlog.bytes + length > self.max_bytes
            or largest > self.max_block
            or self.is_closed
            or backlog.next_sequence + count > backlog.sequence_limit
        )

    def fitting(self, blocks: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, there is room for now; 1 if there is none."""
        lengths = accumulate(map(len, blocks), initial=self._backlog.bytes)
        most = bisect_right(list(lengths), self.max_bytes) - 1
        return max(1, min(most, self.max_size - self._backlog.count))

    def make_room(self, count: int, length: int, largest: int, timeout: float | None, *, may_drop: bool = True) -> None:
        """Return when `count` blocks of `length` bytes together may come in, as the policy says.

        Without `may_drop` none has to go for them, and they are not counted as dropped where QueueFull refuses them.
        """
        self.check_open()
        if largest > self.max_block:
            raise BlockTooLarge(f"a block of {largest} bytes exceeds max_block_bytes = {self.max_block}")
        if count > self.max_size or length > self.max_bytes:
            raise QueueFull(
                f"{count} blocks of {length} bytes never fit max_size = {self.max_size}, max_bytes = {self.max_bytes}"
            )
        backlog, deadline = self._backlog, self.deadline(timeout)
        while True:
            is_full = backlog.count + count > self.max_size or backlog.bytes + length > self.max_bytes
            if is_full and not may_drop:
                if self._behavior is not FullBehavior.BLOCK or not self._wait(deadline):
                    raise self._no_room()
                continue
            if is_full and self._make_some_room(count, deadline):
                continue
            if backlog.next_sequence + count <= backlog.sequence_limit:
                return
            backlog.largest_batch = max(backlog.largest_batch, count)
            self.on_disk(self._reserve, count, timeout)

    def _make_some_room(self, count: int, deadline: float) -> bool:
        """Evict a block or wait; False if there is nothing to evict, whatever the counts may say."""
        if self._behavior is FullBehavior.DROP_OLDEST:
            return self._evict(count)
        if self._behavior is FullBehavior.DROP_NEWEST or not self._wait(deadline):
            self.drop("newest" if self._behavior is FullBehavior.DROP_NEWEST else "timeout", count)
            raise self._no_room()
        return True

    def _no_room(self) -> QueueFull:
        backlog = self._backlog
        held = f"{backlog.count} blocks, {backlog.bytes} bytes"
        limits = f"max_size = {self.max_size}, max_bytes = {self.max_bytes}"
        return QueueFull(f"no room in {backlog.store.folder}: {held}, with {limits}")

    def _evict(self, count: int) -> bool:
        self._keeper.write_staged()  # else what is on lease would have to go for blocks that nobody has
        try:
            is_evicted = self._backlog.evict(self._clock.monotonic())
        except OSError as error:
            self.disk_failures += 1
            self.drop("disk_full", count)
            raise disk_error(error) from error
        if is_evicted:
            self.drop("oldest", 1)
        return is_evicted

    def _reserve(self) -> int:
        """Let the meta say that more sequences are spoken for."""
        self._backlog.store.changed = True
        self._lock.release()
        try:
            self._keeper.sync()
        finally:
            self._lock.acquire()
        self.check_open()
        return 0

    def on_disk(self, write: Callable[[], int], count: int, timeout: float | None) -> int:
        """Do what writes. A disk that refuses costs the new blocks only, under BLOCK after waiting for it."""
        deadline = self.deadline(timeout)
        while True:
            try:
                return write()
            except OSError as error:
                self._refused(error, count, deadline)

    def is_on_disk(self, staged: Staged, gathering: Round, count: int, deadline: float) -> bool:
        """Wait until what was staged is on the disk; False if it could not be written and ought to be staged again.

        Wants the lock not to be held, and raises as `on_disk` does. What was written and could not be synced is not
        staged again: it may be delivered as it is.
        """
        try:
            self._keeper.wait_for(gathering)
        except OSError as error:
            self.not_synced(error, staged, count)
        if staged.error is not None:
            with self._lock:
                self._refused(staged.error, count, deadline)
        return staged.error is None

    def not_synced(self, error: OSError, staged: Staged, count: int) -> None:
        """The sync has failed: that matters to those whose blocks were written."""
        if staged.error is None:
            with self._lock:
                self.disk_failures += 1
                self.drop("disk_full", count)
            raise disk_error(error) from error

    def _refused(self, error: OSError, count: int, deadline: float) -> None:
        """The disk has not taken `count` blocks. Return if they are worth another try, under BLOCK after a while."""
        is_full = error.errno in DISK_FULL
        self.disk_full += is_full
        self.disk_failures += not is_full
        if is_full and self._make_disk_room():
            return
        if is_full and self._behavior is FullBehavior.BLOCK and self._wait(deadline, _DISK_RETRY):
            return
        self.drop("disk_full", count)
        raise disk_error(error) from error

    def _make_disk_room(self) -> bool:
        """Have the last chunk deleted, if all of it is done; whether it was. All of the disk that is left may be it."""
        store = self._backlog.store
        if not store.is_drained(store.acked):
            return False
        with suppress(QueueError):  # a chunk goes when it has been read, and what a kill left acked is not, yet
            self._backlog.peek(self._clock.monotonic())
        before, store.changed = store.chunks.size_bytes, True
        self._lock.release()
        try:
            self._keeper.make_room()
        finally:
            self._lock.acquire()
        self.check_open()
        return store.chunks.size_bytes < before

    def drop(self, reason: str, count: int) -> None:
        self.dropped[reason] += count
        self._just_dropped, self._disk_refuses = True, reason == "disk_full"
        if not self.is_dropping:
            self.is_dropping = True
            log.warning("Queue started dropping. queue=%s reason=%s", self._backlog.store.folder, reason)

    def took(self, *, on_disk: bool) -> None:
        """A block came in. If no other had to go for it, and the disk that refused one took it, that is news.

        And only well below the limits: at them it changes by the push.
        """
        just_dropped, self._just_dropped = self._just_dropped, False
        if just_dropped or (self._disk_refuses and not on_disk):
            return
        self._disk_refuses = False
        if self._backlog.count < 0.9 * self.max_size and self._backlog.bytes < 0.9 * self.max_bytes:
            self.is_dropping = False
            log.warning("Queue takes everything again. queue=%s", self._backlog.store.folder)

    def deadline(self, timeout: float | None) -> float:
        return self._clock.monotonic() + (self._block_timeout if timeout is None else timeout)

    def _wait(self, deadline: float, longest: float = threading.TIMEOUT_MAX) -> bool:
        """Wait for room; False if the deadline has passed."""
        left = deadline - self._clock.monotonic()
        if left <= 0:
            return False
        self.waiting += 1
        try:
            self.not_full.wait(min(left, longest))
        finally:
            self.waiting -= 1
        self.check_open()
        return True
