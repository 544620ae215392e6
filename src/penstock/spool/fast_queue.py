"""FastQueue: memory first, disk behind it, nothing accepted is lost.

    push ──► memory layer ──overflow, stale──► frames in chunk files      (Durability.MEMORY)
    push ──────────────────────────────────► frames in chunk files        (Durability.DISK, FSYNC)

This file is what callers see: one lock, the policies, waiting. `backlog` knows what is held, `store` how it lies.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.errors import BlockTooLarge, DiskFailed, DiskFull, QueueClosed, QueueError, QueueFull
from penstock.spool.backlog import Backlog
from penstock.spool.commit import GroupCommit, Round
from penstock.spool.config import Durability, FastQueueConfig, FullBehavior, seconds, size
from penstock.spool.dead_letters import OVERHEAD, DeadLetters
from penstock.spool.files import Files, OsFiles
from penstock.spool.keeper import DISK_FULL, Keeper
from penstock.spool.lease import Lease
from penstock.spool.stats import QueueStats

log = logging.getLogger(__name__)

LOCK_NAME = "fastqueue.lock"
DEAD_LETTERS_NAME = "dead-letters"
_MOST_DEAD_LETTERS = 100_000
_DISK_RETRY = 0.25  # how often a blocked push looks whether the disk has room again
_DEAD_LETTER_RETRY = 1.0


class FastQueue:
    """A queue of byte blocks that outlives the process.

    Order: blocks come out as they went in, across restarts (`order="freshest"`: the newest first). A nacked block
        keeps its place: it comes back before younger ones as soon as its delay is over.
    Loss: none but what `Durability` says for a crash and what `FullBehavior` says for a full queue, and that is
        counted. Delivery is at least once: what was leased and not acked comes again after a restart.
    Threads: every method may be called from any thread. One thread of its own syncs the meta file.
    Blocks: `push` under `FullBehavior.BLOCK` while the queue is full; `lease` for `timeout` while it is empty.
    Processes: one at a time, QueueLocked otherwise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: FastQueueConfig | None = None,
        *,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        self.config = config = config or FastQueueConfig()
        self.path = os.fspath(path)
        self._clock = clock or SystemClock()
        self._files = files or OsFiles()
        self._in_memory = config.durability is Durability.MEMORY
        self._syncs = config.durability is Durability.FSYNC
        self._max_size = config.max_size
        self._max_bytes = size(config.max_bytes)
        self._max_block = size(config.max_block_bytes)
        self._inmemory_blocks = config.inmemory_blocks
        self._interval = seconds(config.meta_sync_interval)
        self._files.make_folder(self.path)
        self._folder_lock = self._files.lock(f"{self.path}/{LOCK_NAME}")
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._waiting_to_lease = 0
        self._closed = False
        self._dropping = False
        self._pushed = self._acked = self._nacked = self._redelivered = self._disk_full = self._disk_failures = 0
        self._dropped = dict.fromkeys(("oldest", "newest", "timeout", "disk_full"), 0)
        self._gathering = Round()
        try:
            self._backlog = Backlog(self._files, self.path, config)
            self._commit = GroupCommit(self._begin_sync)
            self._dead = DeadLetters(self._open_dead_letters, self._clock)
            self._keeper = Keeper(self._lock, self._backlog, self._sync_log)
        except BaseException as error:
            self._files.close(self._folder_lock)
            if isinstance(error, OSError):
                raise _disk_error(error) from error
            raise
        if self._backlog.store.unclean:
            log.warning("Queue was not closed properly. queue=%s recovered_blocks=%d", self.path, self._backlog.count)
        self._sync_if_possible()
        self._keeper.start(f"penstock-spool-{os.path.basename(self.path)}", self._interval, self._keep)

    # -- in --------------------------------------------------------------------------------------------------------

    def push(self, block: bytes, *, timeout: float | None = None) -> int:
        """Take one block; its sequence. `timeout` replaces `block_timeout` under FullBehavior.BLOCK.

        Raises QueueFull, BlockTooLarge, DiskFull, DiskFailed or QueueClosed: the block was not taken (after a failed
        sync, DiskFailed at FSYNC, it may be delivered all the same).
        """
        if type(block) is not bytes:
            block = _as_bytes(block)
        length = len(block)
        backlog = self._backlog
        with self._lock:
            if (
                backlog.count >= self._max_size
                or backlog.bytes + length > self._max_bytes
                or length > self._max_block
                or self._closed
                or backlog.next_sequence >= backlog.sequence_limit
            ):
                self._make_room_locked(1, length, length, timeout)
            if self._in_memory and len(backlog.memory) < self._inmemory_blocks:
                sequence = backlog.next_sequence
                backlog.memory.append(Lease(sequence, 1, block, self._clock.time()))
                backlog.next_sequence = sequence + 1
                backlog.count += 1
                backlog.bytes += length
                self._pushed += 1
                if self._waiting_to_lease:
                    self._not_empty.notify()
                return sequence
            sequence = self._take_in_locked([block], timeout)
            gathering = self._gathering
        if self._syncs:
            self._wait_for_disk(gathering, 1)
        return sequence

    def push_many(self, blocks: Iterable[bytes], *, timeout: float | None = None) -> range:
        """Take all of the blocks or none; their sequences. Raises as `push` does."""
        batch = [block if type(block) is bytes else _as_bytes(block) for block in blocks]
        if not batch:
            return range(0)
        backlog = self._backlog
        largest = max(map(len, batch))
        length = sum(map(len, batch))
        with self._lock:
            if (
                backlog.count + len(batch) > self._max_size
                or backlog.bytes + length > self._max_bytes
                or largest > self._max_block
                or self._closed
                or backlog.next_sequence + len(batch) > backlog.sequence_limit
            ):
                self._make_room_locked(len(batch), length, largest, timeout)
            first = self._take_in_locked(batch, timeout)
            gathering = self._gathering
        if self._syncs:
            self._wait_for_disk(gathering, len(batch))
        return range(first, first + len(batch))

    def _take_in_locked(self, batch: Sequence[bytes], timeout: float | None) -> int:
        """Put the blocks where the durability level wants them; the first sequence."""
        backlog = self._backlog

        def take_in() -> int:
            if self._in_memory:
                if len(backlog.memory) + len(batch) > self._inmemory_blocks:
                    backlog.spill()
                if len(batch) <= self._inmemory_blocks:
                    return backlog.keep(batch, self._clock.time())
            return backlog.write(batch, self._clock.time())

        first = self._on_disk_locked(take_in, len(batch), timeout)
        self._pushed += len(batch)
        self._dropping = False
        if self._waiting_to_lease:
            self._not_empty.notify(len(batch))
        return first

    def _on_disk_locked(self, write: Callable[[], int], count: int, timeout: float | None) -> int:
        """Do what writes. A disk that refuses costs the new blocks only, under BLOCK after waiting for it."""
        deadline = self._deadline(timeout)
        while True:
            try:
                return write()
            except OSError as error:
                is_full = error.errno in DISK_FULL
                self._disk_full += is_full
                self._disk_failures += not is_full
                now = self._clock.monotonic()
                if is_full and self.config.full_behavior is FullBehavior.BLOCK and now < deadline:
                    self._wait_locked(self._not_full, min(deadline, now + _DISK_RETRY))
                    self._check_open_locked()
                    continue
                self._drop_locked("disk_full", count)
                raise _disk_error(error) from error

    def _make_room_locked(self, count: int, length: int, largest: int, timeout: float | None) -> None:
        """Return when `count` blocks of `length` bytes together may come in, as the policy says."""
        self._check_open_locked()
        if largest > self._max_block:
            raise BlockTooLarge(f"a block of {largest} bytes exceeds max_block_bytes = {self._max_block}")
        if count > self._max_size or length > self._max_bytes:
            raise QueueFull(
                f"{count} blocks of {length} bytes never fit max_size = {self._max_size}, max_bytes = {self._max_bytes}"
            )
        backlog, behavior, deadline = self._backlog, self.config.full_behavior, self._deadline(timeout)
        while backlog.next_sequence + count > backlog.sequence_limit:
            self._on_disk_locked(self._reserve_locked, count, timeout)
        while backlog.count + count > self._max_size or backlog.bytes + length > self._max_bytes:
            if behavior is FullBehavior.DROP_OLDEST:
                if not backlog.evict(self._clock.monotonic()):
                    break
                self._drop_locked("oldest", 1)
                continue
            if behavior is FullBehavior.BLOCK and self._wait_locked(self._not_full, deadline):
                self._check_open_locked()
                continue
            self._drop_locked("newest" if behavior is FullBehavior.DROP_NEWEST else "timeout", count)
            raise QueueFull(f"no room: the queue in {self.path} holds {backlog.count} blocks, {backlog.bytes} bytes")

    def _reserve_locked(self) -> int:
        """Let the meta promise that more sequences are spoken for. The lock is free meanwhile."""
        self._backlog.store.changed = True
        self._lock.release()
        try:
            self._keeper.sync()
        finally:
            self._lock.acquire()
        self._check_open_locked()
        return 0

    def _drop_locked(self, reason: str, count: int) -> None:
        self._dropped[reason] += count
        if not self._dropping:
            self._dropping = True
            log.warning("Queue started dropping. queue=%s reason=%s", self.path, reason)

    # -- out -------------------------------------------------------------------------------------------------------

    def lease(self, max_blocks: int = 1, *, timeout: float | None = None) -> list[Lease]:
        """Take up to `max_blocks` blocks on loan, in order; empty if there is none.

        With `timeout` it waits so long for the first one; without, not at all. What is not acked in the end is
        delivered again: after `nack`, or when the queue is opened the next time.
        """
        deadline = None
        while True:
            with self._lock:
                self._check_open_locked()
                taken = self._backlog.take(max_blocks, self._clock.monotonic())
                if not taken and timeout:
                    deadline = self._clock.monotonic() + timeout if deadline is None else deadline
                    taken = self._wait_to_lease_locked(max_blocks, deadline)
                if not taken:
                    return taken
                if taken[0].attempts > 1:
                    self._redelivered += sum(lease.attempts > 1 for lease in taken)
                    taken, spent = self._without_spent(taken)
                else:
                    spent = []
                if taken:
                    self._backlog.note_leased(taken)
            for lease in spent:
                self._bury(lease, "too many attempts")
            if taken:
                return taken

    def _wait_to_lease_locked(self, max_blocks: int, deadline: float) -> list[Lease]:
        self._waiting_to_lease += 1
        try:
            while True:
                due = self._backlog.next_due()
                waited_for = deadline if due is None else min(due, deadline)
                self._wait_locked(self._not_empty, waited_for)
                self._check_open_locked()
                now = self._clock.monotonic()
                taken = self._backlog.take(max_blocks, now)
                if taken or now >= deadline:
                    return taken
        finally:
            self._waiting_to_lease -= 1

    def _without_spent(self, taken: list[Lease]) -> tuple[list[Lease], list[Lease]]:
        """Blocks to hand out, and those that have had all their attempts: a crash each time, no nack."""
        most = self.config.max_attempts
        if most is None:
            return taken, []
        return [one for one in taken if one.attempts <= most], [one for one in taken if one.attempts > most]

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        """The blocks are done with. A lease that is not out any more (acked, nacked, dropped) is passed over."""
        done = (leases,) if isinstance(leases, Lease) else tuple(leases)
        if not done:
            return
        with self._lock:
            self._check_open_locked()
            self._acked += self._backlog.finish(done)
            self._not_full.notify_all()

    def nack(self, lease: Lease, delay: float = 0.0) -> None:
        """Deliver the block again, in its order, `delay` seconds from now; after `max_attempts` it is a dead letter."""
        if self.config.max_attempts is not None and lease.attempts >= self.config.max_attempts:
            self._bury(lease, "too many attempts")
            return
        with self._lock:
            self._check_open_locked()
            due_at = self._clock.monotonic() + delay if delay > 0 else None
            if self._backlog.give_back(lease, due_at):
                self._nacked += 1
                self._not_empty.notify()

    def reject(self, lease: Lease, reason: str) -> None:
        """The block can never succeed: move it to the dead-letter queue."""
        self._bury(lease, reason)

    def _bury(self, lease: Lease, reason: str) -> None:
        """First into the dead-letter queue, then out of this one; if that fails, it stays here and comes again."""
        with self._lock:
            self._check_open_locked()
            if lease.sequence not in self._backlog.leased:
                return
        try:
            self._dead.push(lease, reason)
        except QueueError as error:
            log.warning("Dead letter cannot be written, the block stays. queue=%s error=%s", self.path, error)
            with self._lock:
                self._backlog.give_back(lease, self._clock.monotonic() + _DEAD_LETTER_RETRY)
            return
        self.ack(lease)

    def pop(self) -> bytes | None:
        """The next block, lease and ack in one; None if there is none. A crash after it has lost the block."""
        leases = self.lease()
        if not leases:
            return None
        self.ack(leases[0])
        return leases[0].data

    def peek(self) -> bytes | None:
        """The block that `lease` would hand out first; None if there is none. Nothing changes."""
        with self._lock:
            self._check_open_locked()
            lease = self._backlog.peek(self._clock.monotonic())
            return None if lease is None else lease.data

    # -- state -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks that are not acked: waiting, on lease or nacked."""
        return self._backlog.count

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks that are not acked."""
        return self._backlog.bytes

    def stats(self) -> QueueStats:
        """A frozen snapshot; `samples()` of it is what `Telemetry.watch` wants."""
        with self._lock:
            backlog, store = self._backlog, self._backlog.store
            oldest = backlog.peek(self._clock.monotonic()) if not self._closed else None
            return QueueStats(
                size=backlog.count,
                bytes=backlog.bytes,
                max_size=self._max_size,
                max_bytes=self._max_bytes,
                leased=len(backlog.leased),
                delayed=len(backlog.returned),
                inmemory_blocks=len(backlog.memory),
                disk_bytes=store.chunks.size_bytes,
                disk_available_bytes=self._files.free_bytes(self.path),
                chunks=len(store.chunks.chunks),
                pushed=self._pushed,
                acked=self._acked,
                nacked=self._nacked,
                redelivered=self._redelivered,
                dead_lettered=self._dead.pushed,
                dropped=dict(self._dropped),
                disk_full=self._disk_full,
                disk_failures=self._disk_failures + self._keeper.failures,
                meta_syncs=store.meta_syncs,
                chunk_rotations=store.chunks.rotations,
                inmemory_flushes=backlog.flushes,
                damaged_regions=store.quarantine.regions,
                damaged_bytes=store.quarantine.bytes,
                lost_blocks=store.quarantine.lost_blocks,
                unclean_start=store.unclean,
                oldest_age=max(0.0, self._clock.time() - oldest.enqueued_at) if oldest is not None else 0.0,
            )

    def flush(self) -> None:
        """Bring everything to the disk, the memory layer too: what was pushed before survives a power cut."""
        with self._lock:
            self._check_open_locked()
        self._flush(clean=False)

    def close(self) -> None:
        """Flush, and let another process open the folder. After DiskFull or DiskFailed the queue is still open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()
        try:
            self._flush(clean=True)
        except QueueError:
            with self._lock:
                self._closed = False
            raise
        self._keeper.close()
        self._dead.close()
        with self._lock:
            self._backlog.store.close()
            self._files.close(self._folder_lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- disk ------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """What the queue's own thread does every `meta_sync_interval`."""
        with self._lock:
            memory = self._backlog.memory
            is_stale = memory and self._clock.time() - memory[0].enqueued_at >= seconds(self.config.stale_flush)
            if is_stale:
                with suppress(OSError):  # it is tried again at the next turn
                    self._backlog.spill()
        self._sync_if_possible()

    def _sync_if_possible(self) -> None:
        with suppress(OSError):  # the keeper has logged and counted it
            self._keeper.sync()
        with self._lock:
            self._not_full.notify_all()

    def _flush(self, *, clean: bool) -> None:
        try:
            with self._lock:
                self._backlog.spill()
                self._backlog.store.changed = True
            self._keeper.sync(clean=clean)
        except OSError as error:
            raise _disk_error(error) from error

    def _sync_log(self) -> None:
        with self._lock:
            gathering = self._gathering
        self._commit.wait(gathering)

    def _wait_for_disk(self, gathering: Round, count: int) -> None:
        try:
            self._commit.wait(gathering)
        except OSError as error:
            with self._lock:
                self._disk_failures += 1
                self._drop_locked("disk_full", count)
            raise _disk_error(error) from error

    def _begin_sync(self) -> tuple[Round, Callable[[], None]]:
        """The round of those who have written by now, and what syncs their chunks."""
        with self._lock:
            current, self._gathering = self._gathering, Round()
            chunks = self._backlog.store.chunks
            dirty, names_changed = chunks.take_dirty()

        def sync() -> None:
            try:
                for chunk in dirty:
                    self._files.sync(chunk.handle)
                if names_changed:
                    self._files.sync_folder(self.path)
            except OSError:
                # The kernel has given up on those pages; another sync of this file would claim success.
                with self._lock:
                    chunks.begin_chunk()
                raise
            finally:
                with self._lock:
                    chunks.synced(dirty)

        return current, sync

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed(f"the queue in {self.path} is closed")

    def _deadline(self, timeout: float | None) -> float:
        return self._clock.monotonic() + (seconds(self.config.block_timeout) if timeout is None else timeout)

    def _wait_locked(self, condition: threading.Condition, deadline: float) -> bool:
        """Wait for a notification until `deadline`; False if that has passed."""
        left = deadline - self._clock.monotonic()
        return left > 0 and condition.wait(left) | True

    def _open_dead_letters(self) -> "FastQueue":
        """At least as durable as this queue, and never in its way: letters have no letters of their own."""
        config = replace(
            self.config,
            durability=Durability.FSYNC if self._syncs else Durability.DISK,
            max_size=max(self._max_size, _MOST_DEAD_LETTERS),
            max_bytes=self._max_bytes + OVERHEAD,
            max_block_bytes=self._max_block + OVERHEAD,
            full_behavior=FullBehavior.DROP_OLDEST,
            max_attempts=None,
            order="fifo",
        )
        folder = self.config.dead_letter or f"{self.path}/{DEAD_LETTERS_NAME}"
        return FastQueue(folder, config, clock=self._clock, files=self._files)


def _as_bytes(block: object) -> bytes:
    if isinstance(block, (bytes, bytearray, memoryview)):
        return bytes(block)
    raise TypeError(f"a block is bytes, not {type(block).__name__}")


def _disk_error(error: OSError) -> QueueError:
    if error.errno in DISK_FULL:
        return DiskFull(f"no room on the disk, what was accepted is safe: {error}")
    return DiskFailed(f"the disk failed, what was accepted before is safe: {error}")
