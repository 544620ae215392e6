"""FastQueue: memory first, disk behind it, nothing accepted is lost.

    push ──► memory layer ──overflow, stale──► frames in chunk files      (Durability.MEMORY)
    push ──────────────────────────────────► frames in chunk files        (Durability.DISK, FSYNC)

This file is what callers see. `gate` has the policies, `backlog` knows what is held and by whom, `store` how it lies
on the disk, `keeper` when it gets there.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.errors import QueueError
from penstock.spool import dead_letters, folder, process
from penstock.spool.backlog import Backlog
from penstock.spool.config import Durability, FastQueueConfig, seconds, size
from penstock.spool.dead_letters import DeadLetters
from penstock.spool.files import Files, OsFiles, disk_error
from penstock.spool.freshest import FreshestBacklog
from penstock.spool.gate import Gate
from penstock.spool.keeper import Keeper
from penstock.spool.lease import Lease, as_block
from penstock.spool.stats import QueueStats, snapshot

log = logging.getLogger(__name__)

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
        self._time, self._monotonic = self._clock.time, self._clock.monotonic
        self._files = files or OsFiles()
        self._in_memory = config.durability is Durability.MEMORY
        self._syncs = config.durability is Durability.FSYNC
        self._inmemory_blocks = config.inmemory_blocks
        self._inmemory_bytes = None if config.inmemory_bytes is None else size(config.inmemory_bytes)
        with folder.opening(self.path):
            self._folder_lock = folder.take(self._files, self.path)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._waiting_to_lease = 0
        self._pushed = self._acked = self._nacked = self._redelivered = 0
        try:
            with folder.opening(self.path):
                backlog_type = FreshestBacklog if config.order == "freshest" else Backlog
                self._backlog = backlog_type(self._files, self.path, config)
        except BaseException:
            self._files.close(self._folder_lock)
            raise
        stale_flush = seconds(config.stale_flush)
        self._keeper = Keeper(self._lock, self._backlog, self._files, stale_flush, self._monotonic())
        self._gate = Gate(self._lock, self._backlog, self._keeper, config, self._clock)
        self._dead = DeadLetters(self._open_dead_letters, self._clock)
        if self._backlog.store.unclean:
            log.warning("Queue was not closed properly. queue=%s blocks=%d", self.path, self._backlog.count)
        with suppress(OSError):  # a full disk must not keep anyone from draining the queue
            self._keeper.sync()
        interval = seconds(config.meta_sync_interval)
        self._keeper.start(f"penstock-spool-{os.path.basename(self.path)}", interval, self._keep)
        process.watch(self)

    @property
    def id(self) -> str:
        """What tells this queue's sequences from every other queue's, for as long as its folder lives."""
        return folder.identity(self._files, self.path)

    # -- in --------------------------------------------------------------------------------------------------------

    def push(self, block: bytes, *, timeout: float | None = None) -> int:
        """Take one block; its sequence. `timeout` replaces `block_timeout` under FullBehavior.BLOCK.

        Raises QueueFull, BlockTooLarge, DiskFull, DiskFailed or QueueClosed: the block was not taken (after a failed
        sync, DiskFailed at FSYNC, it may be delivered all the same).
        """
        if type(block) is not bytes:
            block = as_block(block)
        length = len(block)
        backlog, gate = self._backlog, self._gate
        with self._lock:
            if (
                backlog.count >= gate.max_size
                or backlog.bytes + length > gate.max_bytes
                or length > gate.max_block
                or gate.is_closed
                or backlog.next_sequence >= backlog.sequence_limit
            ):
                gate.make_room(1, length, length, timeout)
            if (
                self._in_memory
                and len(backlog.memory) < self._inmemory_blocks
                and (self._inmemory_bytes is None or self._fits_memory_locked(length))
            ):
                sequence = backlog.next_sequence
                backlog.memory.append(Lease(sequence, 1, block, self._time()))
                backlog.next_sequence = sequence + 1
                backlog.count += 1
                backlog.bytes += length
                self._pushed += 1
                if gate.is_dropping:
                    gate.took(on_disk=False)
                if self._waiting_to_lease:
                    self._not_empty.notify()
                return sequence
            try:
                sequence = backlog.write_one(block, self._time()) if not self._in_memory else -1
            except OSError:
                sequence = -1  # once more, and then as the policy says
            if sequence < 0:
                sequence = self._take_in_locked([block], timeout)
            else:
                self._pushed += 1
                if gate.is_dropping:
                    gate.took(on_disk=True)
                if self._waiting_to_lease:
                    self._not_empty.notify()
            gathering = self._keeper.gathering
        if self._syncs:
            gate.wait_for_disk(gathering, 1)
        return sequence

    def push_many(self, blocks: Iterable[bytes], *, timeout: float | None = None) -> range:
        """Take all of the blocks or none; their sequences. Raises as `push` does."""
        batch = [block if type(block) is bytes else as_block(block) for block in blocks]
        if not batch:
            return range(0)
        backlog, gate = self._backlog, self._gate
        largest = max(map(len, batch))
        length = sum(map(len, batch))
        with self._lock:
            if (
                backlog.count + len(batch) > gate.max_size
                or backlog.bytes + length > gate.max_bytes
                or largest > gate.max_block
                or gate.is_closed
                or backlog.next_sequence + len(batch) > backlog.sequence_limit
            ):
                gate.make_room(len(batch), length, largest, timeout)
            first = self._take_in_locked(batch, timeout)
            gathering = self._keeper.gathering
        if self._syncs:
            gate.wait_for_disk(gathering, len(batch))
        return range(first, first + len(batch))

    def _take_in_locked(self, batch: Sequence[bytes], timeout: float | None) -> int:
        """Put the blocks where the durability level wants them; the first sequence."""
        backlog = self._backlog

        def take_in() -> int:
            if self._in_memory:
                length = sum(map(len, batch))
                if len(backlog.memory) + len(batch) > self._inmemory_blocks or not self._fits_memory_locked(length):
                    backlog.spill()
                if len(batch) <= self._inmemory_blocks and length <= (self._inmemory_bytes or length):
                    return backlog.keep(batch, self._time())
            return backlog.write(batch, self._time())

        first = self._gate.on_disk(take_in, len(batch), timeout)
        if self._gate.is_dropping:
            self._gate.took(on_disk=True)
        self._pushed += len(batch)
        if self._waiting_to_lease:
            self._not_empty.notify(len(batch))
        return first

    def _fits_memory_locked(self, length: int) -> bool:
        """Whether memory may hold so many bytes more. What is on lease is in memory, too."""
        most, backlog = self._inmemory_bytes, self._backlog
        return most is None or backlog.bytes - backlog.store.unread_bytes + length <= most

    # -- out -------------------------------------------------------------------------------------------------------

    def lease(self, max_blocks: int = 1, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Lease]:
        """Take up to `max_blocks` blocks on loan, in order; empty if there is none.

        With `max_bytes` they are no more than that together, unless the first one is by itself.
        With `timeout` it waits so long for the first one; without, not at all. What is not acked in the end is
        delivered again: after `nack`, or when the queue is opened the next time.
        """
        deadline = None
        while True:
            with self._lock:
                backlog = self._backlog
                if self._gate.is_closed:
                    self._gate.check_open()
                taken = backlog.take(max_blocks, self._monotonic() if backlog.returned else 0.0, max_bytes)
                if not taken and timeout:
                    deadline = self._monotonic() + timeout if deadline is None else deadline
                    taken = self._wait_to_lease_locked(max_blocks, max_bytes, deadline)
                if not taken:
                    if max_blocks < 1:
                        raise ValueError(f"max_blocks must be >= 1, got {max_blocks}")
                    return taken
                spent = self._withhold_spent_locked(taken) if backlog.store.attempts else ()
                if self._in_memory:
                    backlog.store.changed = True
                elif taken:
                    backlog.note_leased(taken)
            for lease in spent:
                self.reject(lease, "too many attempts")
            if taken:
                return taken

    def _wait_to_lease_locked(self, max_blocks: int, max_bytes: int | None, deadline: float) -> list[Lease]:
        self._waiting_to_lease += 1
        try:
            while True:
                now = self._monotonic()
                taken = self._backlog.take(max_blocks, now, max_bytes)
                if taken or now >= deadline:
                    return taken
                due = self._backlog.next_due()
                self._not_empty.wait((deadline if due is None else min(due, deadline)) - now)
                self._gate.check_open()
        finally:
            self._waiting_to_lease -= 1

    def _withhold_spent_locked(self, taken: list[Lease]) -> list[Lease]:
        """Keep back what has had all its attempts, each of them ended by a crash; count the others that come again."""
        most = self.config.max_attempts
        spent = [] if most is None else [lease for lease in taken if lease.attempts > most]
        if spent:
            taken[:] = [lease for lease in taken if lease not in spent]
        self._redelivered += sum(lease.attempts > 1 for lease in taken)
        return spent

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        """The blocks are done with. A lease that is not out any more (acked, nacked, dropped) is passed over."""
        if type(leases) is not list:
            leases = [leases] if isinstance(leases, Lease) else list(leases)
        if not leases:
            return
        gate = self._gate
        with self._lock:
            if gate.is_closed:
                gate.check_open()
            self._acked += self._backlog.finish(leases)
            if gate.waiting:
                gate.not_full.notify_all()

    def nack(self, lease: Lease, delay: float = 0.0, *, keep: bool = False) -> None:
        """Deliver the block again, in its order, `delay` seconds from now; after `max_attempts` it is a dead letter.

        With `keep` it is not, this time: for a failure that had nothing to do with the block.
        """
        most = self.config.max_attempts
        if most is not None and lease.attempts >= most:
            if not keep:
                self.reject(lease, "too many attempts")
                return
            lease = lease._replace(attempts=most - 1)
        with self._lock:
            self._gate.check_open()
            due_at = self._monotonic() + delay if delay > 0 else None
            if self._backlog.give_back(lease, due_at):
                self._nacked += 1
                self._not_empty.notify()

    def reject(self, lease: Lease, reason: str) -> None:
        """The block can never succeed: move it to the dead-letter queue.

        First it is written there, then acked here; if the first fails it stays here and comes again.
        """
        with self._lock:
            self._gate.check_open()
            if lease.sequence not in self._backlog.leased:
                return
        try:
            self._dead.push(lease, reason)
        except QueueError as error:
            log.warning("Dead letter cannot be written, the block stays. queue=%s error=%s", self.path, error)
            with self._lock:
                self._backlog.give_back(lease, self._monotonic() + _DEAD_LETTER_RETRY)
            return
        self.ack(lease)

    def bury(self, block: bytes, reason: str) -> None:
        """Keep a block that is not in the queue as a dead letter; a QueueError says that it is not kept."""
        self._gate.check_open()
        self._dead.push(Lease(-1, 1, block, self._time()), reason)

    def replay_dead_letters(
        self, reason: str = "", *, advance: Callable[[int], object] = lambda count: None
    ) -> tuple[int, int]:
        """Put dead letters whose reason contains `reason` back, with no attempts counted; how many, how many stay.

        A letter leaves the dead-letter queue only when this one has it. `advance` is told of every few.
        """
        return self._dead.replay(self.push_many, reason, advance)

    def pop(self) -> bytes | None:
        """The next block, lease and ack in one; None if there is none. A crash after it has lost the block."""
        leases = self.lease()
        if not leases:
            return None
        self.ack(leases)
        return leases[0].data

    def peek(self) -> bytes | None:
        """The block that `lease` would hand out first; None if there is none. Nothing changes."""
        with self._lock:
            self._gate.check_open()
            lease = self._backlog.peek(self._monotonic())
            return None if lease is None else lease.data

    # -- state -----------------------------------------------------------------------------------------------------

    def resize(self, max_size: int) -> None:
        """Have another limit of blocks, from the next push on."""
        with self._lock:
            self._gate.max_size = max_size
            self._gate.not_full.notify_all()

    def __len__(self) -> int:
        """Blocks that are not acked: waiting, on lease or nacked."""
        return self._backlog.count

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks that are not acked."""
        return self._backlog.bytes

    @property
    def dropped(self) -> int:
        """Blocks that had to go or were not taken, for every reason."""
        return sum(self._gate.dropped.values())

    def stats(self) -> QueueStats:
        """A frozen snapshot; its `samples()` are what `Telemetry.watch` wants."""
        with self._lock:
            return snapshot(
                self._backlog,
                self._gate,
                self._keeper,
                now=(self._monotonic(), self._time()),
                disk_available_bytes=self._files.free_bytes(self.path),
                pushed=self._pushed,
                acked=self._acked,
                nacked=self._nacked,
                redelivered=self._redelivered,
                dead_lettered=self._dead.pushed,
                dead_letters_dropped=self._dead.dropped,
            )

    # -- disk ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring everything to the disk, the memory layer too: what was pushed before survives a power cut."""
        with self._lock:
            self._gate.check_open()
        self._flush(clean=False)

    def close(self) -> None:
        """Flush, and let another process open the folder. After DiskFull or DiskFailed the queue is still open."""
        with self._lock:
            if self._gate.is_closed:
                return
            self._gate.is_closed = True
            self._not_empty.notify_all()
            self._gate.not_full.notify_all()
        try:
            self._flush(clean=True)
        except QueueError:
            with self._lock:
                self._gate.is_closed = False
            raise
        self._keeper.close()
        self._dead.close()
        process.unwatch(self)
        with self._lock:
            self._backlog.store.close()
            self._files.close(self._folder_lock)

    def leave_to_parent(self, parent: int) -> None:
        """Called in a forked child: here the queue is closed, and its folder is the parent's alone."""
        self._lock = threading.Lock()  # a thread that held the other one does not exist here
        self._gate.leave_to_parent(parent)
        self._files.close(self._folder_lock)  # else the child would keep the folder locked when the parent is gone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self, *, clean: bool) -> None:
        try:
            with self._lock:
                self._backlog.spill()
                self._backlog.store.changed = True
            self._keeper.sync(clean=clean)
        except OSError as error:
            raise disk_error(error) from error

    def _keep(self) -> None:
        """What the queue's own thread does every `meta_sync_interval`."""
        with suppress(OSError):  # the keeper has logged and counted it; the next turn tries again
            self._keeper.spill_stale(self._monotonic())
        with suppress(OSError):  # also if there is no room to spill: the sync may free some
            self._keeper.sync()
        with self._lock:
            self._gate.not_full.notify_all()

    def _open_dead_letters(self) -> "FastQueue":
        path = self.config.dead_letter or f"{self.path}/{dead_letters.FOLDER_NAME}"
        return FastQueue(path, dead_letters.settings_of(self.config), clock=self._clock, files=self._files)
