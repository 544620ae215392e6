"""FastQueue: memory first, disk behind it, nothing accepted is lost.

    push ──► memory layer ──overflow, stale──► frames in chunk files      (Durability.MEMORY)
    push ──────────────────────────────────► frames in chunk files        (Durability.DISK, FSYNC)

This file is how blocks come in and how a queue begins and ends; `leasing` is how they leave. `gate` has the policies,
`backlog` knows what is held and by whom, `store` how it lies on the disk, `keeper` when it gets there.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.errors import QueueError, QueueFull
from penstock.spool import dead_letters, folder, process
from penstock.spool.backlog import Backlog
from penstock.spool.capacity_policy import Gate
from penstock.spool.config import Durability, FastQueueConfig, seconds, size
from penstock.spool.dead_letters import DeadLetters
from penstock.spool.files import Files, OsFiles, disk_error
from penstock.spool.freshest import FreshestBacklog
from penstock.spool.lease import Lease, as_block
from penstock.spool.leasing import LeaseSide
from penstock.spool.stats import QueueStats, snapshot
from penstock.spool.syncer import Keeper

log = logging.getLogger(__name__)


class FastQueue(LeaseSide):
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
        config, path = config or FastQueueConfig(), os.fspath(path)
        self._clock = clock = clock or SystemClock()
        self._files = files = files or OsFiles()
        self._syncs = config.durability is Durability.FSYNC
        self._inmemory_blocks = config.inmemory_blocks
        self._inmemory_bytes = None if config.inmemory_bytes is None else size(config.inmemory_bytes)
        with folder.opening(path):
            self._folder_lock = folder.take(files, path)
        try:
            with folder.opening(path):
                kind = FreshestBacklog if config.order == "freshest" else Backlog
                backlog = kind(files, path, config, clock.time())
        except BaseException:
            files.close(self._folder_lock)
            raise
        lock = threading.Lock()
        self._keeper = Keeper(
            lock, backlog, files, seconds(config.stale_flush), clock.monotonic(), self._written_locked
        )
        gate = Gate(lock, backlog, self._keeper, config, clock)
        super().__init__(path, config, lock, backlog, gate, DeadLetters(self._open_dead_letters, clock), clock)
        self._pushed = 0  # guarded by _lock, as what is in `LeaseSide`
        if backlog.store.unclean:
            log.warning("Queue was not closed properly. queue=%s blocks=%d", path, backlog.count)
        interval = seconds(config.meta_sync_interval)
        try:
            with suppress(OSError):  # a full disk must not keep anyone from draining the queue
                self._keeper.sync()
            self._keeper.start(f"penstock-spool-{os.path.basename(self.path)}", interval, self._keep)
        except BaseException:  # the system has no thread left: the folder must not stay locked for that
            backlog.store.close()
            files.close(self._folder_lock)
            raise
        process.watch(self)

    @property
    def id(self) -> str:
        """What tells this queue's sequences from every other queue's, for as long as its folder lives."""
        return folder.identity(self._files, self.path)

    # -- in --------------------------------------------------------------------------------------------------------

    def push(self, block: bytes, *, timeout: float | None = None) -> int:
        """Take one block; its sequence. `timeout` replaces `block_timeout` under FullBehavior.BLOCK.

        Raises QueueFull, BlockTooLarge, DiskFull, DiskFailed or QueueClosed: the block was not taken (after a failed
        sync at FSYNC it may be delivered all the same).
        """
        if type(block) is not bytes:
            block = as_block(block)
        length = len(block)
        if self._syncs:
            return self._push_synced((block,), length, length, timeout)
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
        return sequence

    def push_many(self, blocks: Iterable[bytes], *, timeout: float | None = None) -> range:
        """Take all of the blocks or none; their sequences. Raises as `push` does."""
        batch = [block if type(block) is bytes else as_block(block) for block in blocks]
        return self._push_batch(batch, timeout) if batch else range(0)

    def _push_batch(self, batch: Sequence[bytes], timeout: float | None, *, may_drop: bool = True) -> range:
        gate = self._gate
        largest = max(map(len, batch))
        length = sum(map(len, batch))
        if self._syncs:
            first = self._push_synced(batch, length, largest, timeout, may_drop=may_drop)
            return range(first, first + len(batch))
        with self._lock:
            if not gate.has_room(len(batch), length, largest):
                gate.make_room(len(batch), length, largest, timeout, may_drop=may_drop)
            first = self._take_in_locked(batch, timeout)
        return range(first, first + len(batch))

    async def push_async(self, block: bytes, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as `push`
        """`push` for a coroutine: the event loop goes on while the block waits for room or for the disk to sync.

        At FSYNC all that a loop pushes meanwhile shares one sync and one thread; at MEMORY and DISK it is done at once.
        What has to wait for room, or for the memory layer to be spilled, waits in a thread, and those that come next
        may overtake it. Whoever is cancelled cannot know whether the block was taken.
        """
        block = as_block(block)
        length = len(block)
        with self._lock:
            has_room = self._gate.has_room(1, length, length)
            if has_room and self._syncs:
                sequence, staged, gathering = self._keeper.stage((block,), length, self._time())
            elif has_room:
                sequence = self._push_at_once_locked(block, length)
                if sequence >= 0:
                    return sequence
        if has_room and self._syncs:
            try:
                await self._keeper.wait_for_async(gathering)
            except OSError as error:
                self._gate.not_synced(error, staged, 1)
            if staged.error is None:
                return sequence
        return await asyncio.to_thread(self.push, block, timeout=timeout)

    def _push_at_once_locked(self, block: bytes, length: int) -> int:
        """Take a block for which there is room into memory or the page cache; -1 if there is more to do than that."""
        backlog = self._backlog
        if self._in_memory:
            if len(backlog.memory) >= self._inmemory_blocks or not self._fits_memory_locked(length):
                return -1
            sequence = backlog.keep((block,), self._time())
        else:
            try:
                sequence = backlog.write_one(block, self._time())
            except OSError:
                return -1  # once more, and then as the policy says
        self._written_locked(1)
        return sequence

    def _push_synced(
        self, batch: Sequence[bytes], length: int, largest: int, timeout: float | None, *, may_drop: bool = True
    ) -> int:
        """Take the blocks in with those of all who come before the next sync, and wait for it; the first sequence."""
        gate = self._gate
        deadline = gate.deadline(timeout)
        while True:
            with self._lock:
                if not gate.has_room(len(batch), length, largest):
                    gate.make_room(len(batch), length, largest, timeout, may_drop=may_drop)
                first, staged, gathering = self._keeper.stage(batch, length, self._time())
            if gate.is_on_disk(staged, gathering, len(batch), deadline):
                return first

    def _written_locked(self, count: int) -> None:
        """So many blocks are in the log that were not before."""
        self._pushed += count
        if self._gate.is_dropping:
            self._gate.took(on_disk=True)
        if self._waiting_to_lease:
            self._not_empty.notify(count)

    def _take_in_locked(self, batch: Sequence[bytes], timeout: float | None) -> int:
        """Put the blocks where the durability level wants them; the first sequence."""
        backlog = self._backlog

        def has_room(length: int) -> bool:
            return len(backlog.memory) + len(batch) <= self._inmemory_blocks and self._fits_memory_locked(length)

        def take_in() -> int:
            if self._in_memory:
                length = sum(map(len, batch))
                if not has_room(length):
                    try:
                        backlog.spill()
                    except OSError:
                        if not has_room(length):  # else it has made enough
                            raise
                if len(batch) <= self._inmemory_blocks and length <= (self._inmemory_bytes or length):
                    return backlog.keep(batch, self._time())
            return backlog.write(batch, self._time())

        first = self._gate.on_disk(take_in, len(batch), timeout)
        self._written_locked(len(batch))
        return first

    def _fits_memory_locked(self, length: int) -> bool:
        """Whether memory may hold so many bytes more. What is on lease is in memory, too."""
        most, backlog = self._inmemory_bytes, self._backlog
        return most is None or backlog.bytes - backlog.store.unread_bytes + length <= most

    def replay_dead_letters(
        self, reason: str = "", *, advance: Callable[[int], object] = lambda count: None
    ) -> tuple[int, int]:
        """Put dead letters whose reason contains `reason` back, with no attempts counted; how many, how many stay.

        A letter leaves the dead-letter queue only when this one has it. No block has to go for it, whatever
        `full_behavior` says: where there is no room (under BLOCK none in time) the rest stays, and so does a letter
        that exceeds `max_block_bytes`. Raises DiskFull, DiskFailed or QueueClosed as `push` does: those that it has
        taken by then are here, the others stay. `advance` is told of every few.
        """
        return self._dead.replay(self._put_back, self._gate.max_block, reason, advance)

    def _put_back(self, blocks: Sequence[bytes]) -> int:
        """Take as many of the blocks, from the first on, as there is room for; how many, 0 if there is none."""
        while True:
            with self._lock:
                count = self._gate.fitting(blocks)
            try:
                return len(self._push_batch(blocks[:count], None, may_drop=False))
            except QueueFull:
                if count == 1:  # else somebody has come between
                    return 0

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
        """Bytes of the blocks that are not acked. After a full disk and a kill an estimate, until all is read."""
        return max(0, self._backlog.bytes)

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
            self._dead.close()  # first: a queue that is closed itself could not be closed once more
            self._flush(clean=True)
        except QueueError:
            with self._lock:
                self._gate.is_closed = False
            raise
        self._keeper.close()
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
