"""FastQueue: memory first, disk behind it, nothing accepted is lost.

    push ──► memory layer ──overflow, stale──► frames in chunk files      (Durability.MEMORY)
    push ──────────────────────────────────► frames in chunk files        (Durability.DISK, FSYNC)

This file is what users call. `queue_state` has the lock and all that it guards, `backlog` the blocks, `disk_store` how
they lie on the disk, `syncer` when they get there, `capacity_policy` what happens at the limits.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.errors import QueueError, QueueFull
from penstock.spool import dead_letters, folder, open_queues
from penstock.spool.capacity_policy import Demand, SequencesExhausted
from penstock.spool.config import Durability, FastQueueConfig, parsed_seconds
from penstock.spool.dead_letters import DeadLetterQueue
from penstock.spool.files import DISK_FULL, OsSpoolFiles, SpoolFiles, disk_error
from penstock.spool.lease import Lease, pushed_as_block
from penstock.spool.queue_state import SpoolState
from penstock.spool.stats import QueueStats
from penstock.spool.syncer import Syncer

log = logging.getLogger(__name__)

_LEAST_ROOM = 1 << 20  # bytes: with less, requests of usual size are refused
DEAD_LETTER_RETRY = 1.0  # seconds until a block whose dead letter could not be written comes again


class FastQueue:
    """A queue of byte blocks that outlives the process.

    Order: blocks come out as they went in, across restarts (`order="freshest"`: the newest first). A nacked block
        keeps its place: it comes back before younger ones as soon as its delay is over.
    Loss: none but what `Durability` says for a crash and what `FullBehavior` says for a full queue, and that is
        counted. Delivery is at least once: what was leased and not acked comes again after a restart.
    Threads: every method may be called from any thread. One thread of its own syncs the meta file.
    Blocks: `push` under `FullBehavior.BLOCK` while the queue is full; `lease` for `timeout` while it is empty. On an
        event loop `push_async`, `lease_async` and `async with` do not.
    Processes: one at a time, QueueLocked otherwise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: FastQueueConfig | None = None,
        *,
        clock: Clock | None = None,
        files: SpoolFiles | None = None,
    ) -> None:
        self.path, self.config = os.fspath(path), config or FastQueueConfig()
        self._clock, self._files = clock or SystemClock(), files or OsSpoolFiles()
        self._syncs = self.config.durability is Durability.FSYNC
        self._block_timeout = parsed_seconds(self.config.block_timeout)
        self._dead = DeadLetterQueue(self._open_dead_letters, self._clock)
        self._dead_letters_refused = False
        with folder.name_spool_in_errors(self.path):
            self._folder_lock = folder.lock_spool_folder(self._files, self.path)
        try:
            with folder.name_spool_in_errors(self.path):
                self._state = SpoolState(self._files, self.path, self.config, self._clock)
        except BaseException:
            self._files.close(self._folder_lock)
            raise
        backlog = self._state.backlog
        self._syncer = Syncer(self._state, backlog.store, self._files)
        if backlog.store.unclean:
            log.warning("Queue was not closed properly. queue=%s blocks=%d", self.path, backlog.count)
        try:
            with suppress(OSError):  # a full disk must not prevent draining the queue
                self._syncer.sync()
            name = f"penstock-spool-{os.path.basename(self.path)}"
            self._syncer.start(name, parsed_seconds(self.config.meta_sync_interval))
        except BaseException:  # the system has no thread left: the folder must not stay locked for that
            self._state.end_close()
            self._files.close(self._folder_lock)
            raise
        open_queues.register_open_spool(self)

    @property
    def id(self) -> str:
        """What tells this queue's sequences from every other queue's, for as long as its folder lives."""
        return folder.read_or_create_spool_id(self._files, self.path)

    # -- in --------------------------------------------------------------------------------------------------------

    def push(self, block: bytes, *, timeout: float | None = None) -> int:
        """Take one block. Returns its sequence. `timeout` replaces `block_timeout` under FullBehavior.BLOCK.

        Raises QueueFull, BlockTooLarge, DiskFull, DiskFailed or QueueClosed: the block was not taken (after a failed
        sync at FSYNC it may be delivered all the same).
        """
        if type(block) is not bytes:
            block = pushed_as_block(block)
        if not self._syncs and (sequence := self._state.push_one(block)) >= 0:
            return sequence
        return self._push_batch((block,), timeout)

    def push_many(self, blocks: Iterable[bytes], *, timeout: float | None = None) -> range:
        """Take all of the blocks or none. Returns their sequences. Raises as `push` does."""
        batch = [block if type(block) is bytes else pushed_as_block(block) for block in blocks]
        if not batch:
            return range(0)
        first = self._push_batch(batch, timeout)
        return range(first, first + len(batch))

    async def push_async(self, block: bytes, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as `push`
        """`push` for a coroutine: the event loop goes on while the block waits for room or for the disk to sync.

        At FSYNC all that a loop pushes during one sync shares the next sync and one thread; at MEMORY and DISK it is
        done at once. A block that has to wait for room, or for the memory layer to be spilled, waits in a thread, and
        later ones may overtake it. After a cancellation the block may have been taken or not.
        """
        block = pushed_as_block(block)
        if not self._syncs:
            sequence = self._state.push_one(block)
            if sequence >= 0:
                return sequence
        elif (found := self._state.stage_at_once(block)) is not None:
            sequence, staged, gathering = found
            try:
                await self._syncer.wait_for_async(gathering)
            except OSError as error:
                if staged.error is None:
                    self._state.sync_failed(error, 1)
            if staged.error is None:
                return sequence
        return await asyncio.to_thread(self.push, block, timeout=timeout)

    def _push_batch(self, batch: Sequence[bytes], timeout: float | None, *, may_drop: bool = True) -> int:
        """Take the blocks as `full_behavior` and `durability` say. Returns the first sequence."""
        lengths = list(map(len, batch))
        deadline = self._clock.monotonic() + (self._block_timeout if timeout is None else timeout)
        demand = Demand(len(batch), sum(lengths), max(lengths), deadline, may_drop)
        push = self._push_synced if self._syncs else self._state.push
        while True:
            try:
                try:
                    return push(batch, demand)
                except SequencesExhausted:
                    self._syncer.sync()
            except OSError as error:
                if not (self._state.record_disk_error(error) and self._syncer.free_last_chunk()):
                    self._state.wait_for_disk(error, demand)

    def _push_synced(self, batch: Sequence[bytes], demand: Demand) -> int:
        """Take the blocks with all others that come before the next sync, and wait for it. Returns the first sequence.

        An OSError says that they could not be written. What was written and could not be synced is not tried again:
        it may be delivered as it is.
        """
        first, staged, gathering = self._state.stage(batch, demand)
        try:
            self._syncer.wait_for(gathering)
        except OSError as error:
            if staged.error is None:
                self._state.sync_failed(error, demand.blocks)
        if staged.error is not None:
            raise staged.error
        return first

    # -- out -------------------------------------------------------------------------------------------------------

    def lease(self, max_blocks: int = 1, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Lease]:
        """Lease up to `max_blocks` blocks, in order. Returns an empty list if there is none.

        With `max_bytes` they are no more than that together, unless the first one is by itself.
        With `timeout` it waits so long for the first one; without, not at all. What is not acked in the end is
        delivered again: after `nack`, or when the queue is opened the next time.
        """
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be >= 1, got {max_blocks}")
        deadline = self._clock.monotonic() + timeout if timeout else None
        while True:
            taken, spent = self._state.lease(max_blocks, max_bytes, deadline)
            for lease in spent:
                self.reject(lease, "too many attempts")
            if taken or not spent:
                return taken

    async def lease_async(
        self,
        max_blocks: int = 1,
        *,
        max_bytes: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as `lease`
    ) -> list[Lease]:
        """`lease` for a coroutine: the event loop goes on while there is no block. A cancellation leases nothing.

        Blocks that are not in memory any more are read back from the disk as `lease` reads them, before it returns.
        """
        deadline = self._clock.monotonic() + (timeout or 0.0)
        while not (leases := self.lease(max_blocks, max_bytes=max_bytes)) and self._clock.monotonic() < deadline:
            await self._state.wait_for_block(deadline)
        return leases

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        """Take the blocks as done. A lease that is not out any more (acked, nacked, dropped) is passed over."""
        if type(leases) is not list:
            leases = [leases] if isinstance(leases, Lease) else list(leases)
        if leases:
            self._state.ack(leases)

    def nack(self, lease: Lease, delay: float = 0.0, *, keep: bool = False) -> None:
        """Deliver the block again, in its order, `delay` seconds from now; after `max_attempts` it is a dead letter.

        With `keep` it is not, this time: for a failure that had nothing to do with the block.
        """
        if self.is_last_attempt(lease):
            if not keep:
                self.reject(lease, "too many attempts")
                return
            lease = lease._replace(attempts=lease.attempts - 1)
        self._state.nack(lease, delay)

    @property
    def max_attempts(self) -> int | None:
        """How often a block is handed out before it is a dead letter; None: as often as it takes."""
        return self.config.max_attempts

    def is_last_attempt(self, lease: Lease) -> bool:
        """Whether the block has had its `max_attempts` with this one."""
        most = self.config.max_attempts
        return most is not None and lease.attempts >= most

    def reject(self, lease: Lease, reason: str) -> None:
        """Move a block that can never succeed to the dead-letter queue.

        It is written there first, then acked here. If writing fails it stays here and comes again.
        """
        if not self._state.is_leased(lease):
            return
        try:
            self._dead.push(lease, reason)
        except QueueError as error:
            if not self._dead_letters_refused:  # one line, however many there are and however often each is tried
                self._dead_letters_refused = True
                log.warning("Dead letters cannot be written, their blocks stay. queue=%s error=%s", self.path, error)
            self._state.defer(lease, DEAD_LETTER_RETRY)
            return
        self._dead_letters_refused = False
        self.ack(lease)

    def bury(self, block: bytes, reason: str) -> None:
        """Keep a block that is not in the queue as a dead letter. Raises QueueError if it is not kept."""
        self._state.check_open()
        self._dead.push(Lease(-1, 1, block, self._clock.time()), reason)

    def replay_dead_letters(
        self, reason: str = "", *, advance: Callable[[int], object] = lambda count: None
    ) -> tuple[int, int]:
        """Put dead letters whose reason contains `reason` back, with no attempts counted; how many, how many stay.

        A letter leaves the dead-letter queue only when this one has it. No block is evicted for it, whatever
        `full_behavior` says: where there is no room (under BLOCK none in time) the rest stays, and so does a letter
        that exceeds `max_block_bytes`. Raises DiskFull, DiskFailed or QueueClosed as `push` does: those that it has
        taken by then are here, the others stay. `advance` gets the number of letters of every portion.
        """
        return self._dead.replay(self._put_back, self._state.capacity.max_block, reason, advance)

    def _put_back(self, blocks: Sequence[bytes]) -> int:
        """Take as many of the blocks, from the first on, as there is room for. Returns how many."""
        while True:
            count = self._state.count_fitting(blocks)
            try:
                self._push_batch(blocks[:count], None, may_drop=False)
            except QueueFull:
                if count == 1:  # else another push has come between
                    return 0
            else:
                return count

    def pop(self) -> bytes | None:
        """Lease and ack the next block. Returns None if there is none. A crash after it has lost the block."""
        leases = self.lease()
        if not leases:
            return None
        self.ack(leases)
        return leases[0].data

    def peek(self) -> bytes | None:
        """The block that `lease` would hand out first; None if there is none. Nothing changes."""
        lease = self._state.peek()
        return None if lease is None else lease.data

    # -- state -----------------------------------------------------------------------------------------------------

    def resize(self, max_size: int) -> None:
        """Change the limit of blocks, from the next push on."""
        self._state.resize(max_size)

    def __len__(self) -> int:
        """Blocks that are not acked: waiting, on lease or nacked."""
        return self._state.backlog.count

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks that are not acked. After a full disk and a kill an estimate, until all is read."""
        return max(0, self._state.backlog.bytes)

    @property
    def dropped(self) -> int:
        """Blocks that were evicted or refused, for every reason."""
        return sum(self._state.capacity.dropped.values())

    def stats(self) -> QueueStats:
        """A frozen snapshot; its `samples()` are what `Telemetry.watch` wants."""
        return self._state.stats(
            disk_available_bytes=self._files.free_bytes(self.path),
            sync_failures=self._syncer.failures,
            dead_lettered=self._dead.pushed,
            dead_letters_dropped=self._dead.dropped,
        )

    # -- disk ------------------------------------------------------------------------------------------------------

    def disk_fault(self) -> str:
        """Why the disk would refuse a block now: it is full, read-only, gone. Empty if it would not."""
        try:
            self._files.check_room(self.path, _LEAST_ROOM)
        except OSError as error:
            is_full = error.errno in DISK_FULL
            if is_full and self._state.prepare_to_free_log() and self._syncer.free_last_chunk():
                return ""
            return error.strerror or str(error)
        return ""

    def flush(self) -> None:
        """Bring everything to the disk, the memory layer too: what was pushed before survives a power cut."""
        self._state.check_open()
        self._flush(clean=False)

    def close(self) -> None:
        """Flush, and let another process open the folder. After DiskFull or DiskFailed the queue is still open."""
        if not self._state.begin_close():
            return
        try:
            self._dead.close()  # first: a queue that is closed itself could not be closed once more
            self._flush(clean=True)
        except QueueError:
            self._state.reopen()
            raise
        self._syncer.close()
        open_queues.unregister_open_spool(self)
        self._state.end_close()
        self._files.close(self._folder_lock)

    def leave_to_parent(self, parent: int) -> None:
        """Called in a forked child: here the queue is closed, and its folder is the parent's alone."""
        self._state.leave_to_parent(parent)
        self._files.close(self._folder_lock)  # else the child would keep the folder locked when the parent is gone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def _flush(self, *, clean: bool) -> None:
        try:
            self._state.spill()
            self._syncer.sync(clean=clean)
        except OSError as error:
            raise disk_error(error) from error

    def _open_dead_letters(self) -> "FastQueue":
        path = self.config.dead_letter or f"{self.path}/{dead_letters.FOLDER_NAME}"
        return FastQueue(path, dead_letters.dead_letter_config(self.config), clock=self._clock, files=self._files)
