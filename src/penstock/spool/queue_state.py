"""The state of one queue behind its one lock: every critical section of the queue is a method here.

`FastQueue` and `Syncer` call these methods and never see the lock. The parts of `SpoolState` (`Backlog`, `DiskStore`,
`CapacityPolicy`, ...) are plain state: they have no lock and start nothing.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from penstock.clock import Clock
from penstock.errors import QueueClosed, QueueError
from penstock.spool.backlog import Backlog
from penstock.spool.block_condition import SpoolCondition
from penstock.spool.capacity_policy import CapacityPolicy, Demand, SequencesExhausted
from penstock.spool.chunk_files import ChunkFile
from penstock.spool.config import Durability, FastQueueConfig, FullBehavior, parsed_seconds
from penstock.spool.files import DISK_FULL, SpoolFiles, disk_error
from penstock.spool.freshest import FreshestBacklog
from penstock.spool.group_commit import StagedBlocks, SyncRound
from penstock.spool.lease import Lease
from penstock.spool.meta import SpoolMeta
from penstock.spool.sequence_set import SpoolSequenceSet
from penstock.spool.stats import QueueStats, SpoolCounters, spool_snapshot

_DISK_RETRY = 0.25  # how often a blocked push looks whether the disk has room again


class SpoolState:
    """Blocks, limits and counters of one queue.

    Threads: every method may be called from any thread.
    Blocks: `push` and `stage` under `FullBehavior.BLOCK` while the queue is full; `lease` until its deadline.
    """

    def __init__(self, files: SpoolFiles, folder: str, config: FastQueueConfig, clock: Clock) -> None:
        self._folder, self._time, self._monotonic = folder, clock.time, clock.monotonic
        self._in_memory = config.durability is Durability.MEMORY
        self._max_attempts = config.max_attempts
        self._stale_flush = parsed_seconds(config.stale_flush)
        kind = FreshestBacklog if config.order == "freshest" else Backlog
        # _lock guards everything below. It is held while blocks are moved in memory, written to the page cache or read
        # back: never during a sync, and no callback runs under it. Whenever it is free:
        #   - every block that is not acked is in exactly one place of the backlog, or staged; `backlog.count` and
        #     `backlog.bytes` count each of them once;
        #   - staged blocks are the youngest of all, so that they can still get their sequences from the log's end;
        #   - every sequence that was given is below `backlog.sequence_limit`, which a meta on the disk has reserved;
        #   - every write that no sync has covered is in a chunk that is dirty or being synced.
        self._lock = threading.Lock()
        self._not_empty = SpoolCondition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._waiting_to_push = 0
        self._is_closed, self._closed_because = False, "is closed"
        self._counters = SpoolCounters()
        self.backlog = kind(files, folder, config, clock.time())
        self.capacity = CapacityPolicy(self.backlog, config)
        self._gathering = SyncRound()  # the round that covers what is written now
        self._memory_empty_at = clock.monotonic()

    def check_open(self) -> None:
        """Raise QueueClosed if the queue is closed."""
        if self._is_closed:
            raise QueueClosed(f"the queue in {self._folder} {self._closed_because}")

    # -- in --------------------------------------------------------------------------------------------------------

    def push_one(self, block: bytes) -> int:
        """Take one block if it needs no waiting, evicting or syncing. Returns its sequence, -1 otherwise."""
        backlog, capacity, length = self.backlog, self.capacity, len(block)
        with self._lock:
            if (
                backlog.count >= capacity.max_size
                or backlog.bytes + length > capacity.max_bytes
                or length > capacity.max_block
                or self._is_closed
                or backlog.next_sequence >= backlog.sequence_limit
            ):
                return -1
            try:
                sequence = backlog.add_one(block, self._time())
            except OSError:
                return -1  # once more, and then as the policy says
            if sequence >= 0:
                self._counters.pushed += 1
                if capacity.is_dropping or self._not_empty.waiting:
                    self._announce_locked(1, not self._in_memory)
            return sequence

    def push(self, batch: Sequence[bytes], demand: Demand) -> int:
        """Take the blocks as soon as there is room. Returns the first sequence.

        Raises OSError if the disk refuses them, SequencesExhausted, and QueueFull and the like as the policy says.
        """
        with self._lock:
            self._make_room_locked(demand)
            first = self.backlog.add(batch, demand.bytes, self._time())
            self._counters.pushed += demand.blocks
            self._announce_locked(demand.blocks, True)
            return first

    def stage(self, batch: Sequence[bytes], demand: Demand) -> tuple[int, StagedBlocks, SyncRound]:
        """Take the blocks as soon as there is room, to be written with all that come before the next sync.

        Returns the first sequence, the object that will say whether they could be written, and the round to wait for.
        Raises as `push` does, but for OSError. Writing later delays no push: it waits for the sync anyway.
        """
        with self._lock:
            self._make_room_locked(demand)
            return *self.backlog.stage(batch, demand.bytes, self._time()), self._gathering

    def stage_at_once(self, block: bytes) -> tuple[int, StagedBlocks, SyncRound] | None:
        """`stage` for one block. Returns None if it would have to wait or to evict."""
        backlog, capacity, length = self.backlog, self.capacity, len(block)
        with self._lock:
            has_room = length <= capacity.max_block and not capacity.is_full_for(1, length)
            if not has_room or self._is_closed or backlog.next_sequence >= backlog.sequence_limit:
                return None
            return *backlog.stage((block,), length, self._time()), self._gathering

    def _write_staged_locked(self) -> None:
        count = self.backlog.write_staged()
        if count:
            self._counters.pushed += count
            self._announce_locked(count, True)

    def _announce_locked(self, count: int, on_disk: bool) -> None:
        if self.capacity.is_dropping:
            self.capacity.accepted(on_disk=on_disk)
        if self._not_empty.waiting:
            self._not_empty.notify(count)

    def _make_room_locked(self, demand: Demand) -> None:
        """Wait or evict, as the policy says, until there is room for the blocks."""
        self.check_open()
        backlog, capacity = self.backlog, self.capacity
        capacity.check(demand)
        while capacity.is_full_for(demand.blocks, demand.bytes):
            if capacity.behavior is FullBehavior.DROP_OLDEST and demand.may_drop:
                if not self._evict_locked(demand):
                    break  # there is nothing to evict, whatever the counts may say
            elif capacity.behavior is not FullBehavior.BLOCK or not self._wait_for_room_locked(demand.deadline):
                raise capacity.refuse(demand)
        if backlog.next_sequence + demand.blocks > backlog.sequence_limit:
            backlog.largest_batch = max(backlog.largest_batch, demand.blocks)
            backlog.store.changed = True
            raise SequencesExhausted

    def _evict_locked(self, demand: Demand) -> bool:
        self._write_staged_locked()  # else a block on lease would have to go though others wait
        try:
            is_evicted = self.backlog.evict(self._monotonic())
        except OSError as error:
            self.capacity.disk_failures += 1
            self.capacity.refused_by_disk(error, demand.blocks)
            raise disk_error(error) from error
        if is_evicted:
            self.capacity.drop("oldest", 1)
        return is_evicted

    def _wait_for_room_locked(self, deadline: float, longest: float = threading.TIMEOUT_MAX) -> bool:
        """Wait for a change. Returns False if the deadline has passed."""
        left = deadline - self._monotonic()
        if left <= 0:
            return False
        self._waiting_to_push += 1
        try:
            self._not_full.wait(min(left, longest))
        finally:
            self._waiting_to_push -= 1
        self.check_open()
        return True

    def count_fitting(self, blocks: Sequence[bytes]) -> int:
        """Returns how many of the blocks, from the first on, there is room for now; 1 if there is none."""
        with self._lock:
            return self.capacity.count_fitting(blocks)

    # -- out -------------------------------------------------------------------------------------------------------

    def lease(self, most: int, max_bytes: int | None, deadline: float | None) -> tuple[list[Lease], Sequence[Lease]]:
        """Lease blocks, waiting for the first one until `deadline`.

        Returns the leases to hand out, and those to reject: they have had all their attempts, each ended by a crash.
        """
        backlog = self.backlog
        with self._lock:
            if self._is_closed:
                self.check_open()
            now = self._monotonic() if deadline is not None or backlog.returned.held else 0.0
            while not (taken := backlog.take(most, now, max_bytes)):
                if deadline is None or now >= deadline:
                    return taken, ()
                self._not_empty.wait(backlog.returned.next_look(deadline) - now)
                self.check_open()
                now = self._monotonic()
            spent = self._withhold_spent_locked(taken) if backlog.store.attempts else ()
            if self._in_memory:
                backlog.store.changed = True
            elif taken:
                backlog.journal_leases(taken)
            return taken, spent

    async def wait_for_block(self, deadline: float) -> None:
        """Wait, without a thread, until a block may have come or be due again."""
        with self._lock:
            self.check_open()
            if self.backlog.peek(now := self._monotonic()) is not None:
                return
            woken, seconds = self._not_empty.new_future(), self.backlog.returned.next_look(deadline) - now
        await self._not_empty.wait_async(woken, seconds)

    def _withhold_spent_locked(self, taken: list[Lease]) -> list[Lease]:
        """Move leases that have had all their attempts out of `taken`. Counts redeliveries among the others."""
        most = self._max_attempts
        spent = [] if most is None else [lease for lease in taken if lease.attempts > most]
        if spent:
            taken[:] = [lease for lease in taken if lease not in spent]
        self._counters.redelivered += sum(lease.attempts > 1 for lease in taken)
        return spent

    def ack(self, leases: Sequence[Lease]) -> None:
        """Take the leases as done. Those that are not out any more are passed over."""
        with self._lock:
            if self._is_closed:
                self.check_open()
            self._counters.acked += self.backlog.finish(leases)
            if self._waiting_to_push:
                self._not_full.notify_all()

    def nack(self, lease: Lease, delay: float) -> None:
        """Let the block go out again, `delay` seconds from now."""
        with self._lock:
            self.check_open()
            if self.backlog.give_back(lease, self._monotonic() + delay if delay > 0 else None):
                self._counters.nacked += 1
                self._not_empty.notify()

    def defer(self, lease: Lease, delay: float) -> None:
        """`nack` for a failure of the queue itself: it is not counted, and no error if the queue is closed."""
        with self._lock:
            self.backlog.give_back(lease, self._monotonic() + delay)

    def is_leased(self, lease: Lease) -> bool:
        """Whether the lease is still out."""
        with self._lock:
            self.check_open()
            return lease.sequence in self.backlog.leased

    def peek(self) -> Lease | None:
        """What `lease` would hand out first; nothing changes."""
        with self._lock:
            self.check_open()
            return self.backlog.peek(self._monotonic())

    # -- a disk that refuses ---------------------------------------------------------------------------------------

    def record_disk_error(self, error: OSError) -> bool:
        """Count the error. Returns True if the disk is full and all of the log is done: a sync can free it then."""
        is_full = error.errno in DISK_FULL
        with self._lock:
            self.capacity.disk_full += is_full
            self.capacity.disk_failures += not is_full
        return is_full and self.prepare_to_free_log()

    def prepare_to_free_log(self) -> bool:
        """Returns whether all of the log is done: then the next sync frees it."""
        with self._lock:
            store = self.backlog.store
            if is_drained := store.is_drained(store.acked):
                with suppress(QueueError):  # a chunk goes when it has been read: what a kill left acked is not, yet
                    self.backlog.peek(self._monotonic())
                store.changed = True
            return is_drained

    def wait_for_disk(self, error: OSError, demand: Demand) -> None:
        """Wait, under BLOCK, until a push is worth another try. Otherwise raises DiskFull or DiskFailed."""
        with self._lock:
            may_wait = error.errno in DISK_FULL and self.capacity.behavior is FullBehavior.BLOCK
            if may_wait and self._wait_for_room_locked(demand.deadline, _DISK_RETRY):
                return
            self.capacity.refused_by_disk(error, demand.blocks)
        raise disk_error(error) from error

    def sync_failed(self, error: OSError, count: int) -> NoReturn:
        """Refuse `count` blocks that were written and could not be synced. They may be delivered all the same."""
        with self._lock:
            self.capacity.disk_failures += 1
            self.capacity.refused_by_disk(error, count)
        raise disk_error(error) from error

    # -- syncing ---------------------------------------------------------------------------------------------------

    def begin_round(self, current: SyncRound) -> tuple[list[ChunkFile], bool]:
        """Close the gathering round. Returns what its sync has to cover, and whether names of files have changed."""
        with self._lock:
            current.following = self._gathering = SyncRound()
            self._write_staged_locked()
            return self.backlog.store.chunks.begin_sync()

    def end_round(self, dirty: list[ChunkFile], *, is_refused: bool, is_interrupted: bool) -> list[int]:
        """The sync of these chunks is over. Returns handles to close."""
        with self._lock:
            return self.backlog.store.chunks.end_sync(dirty, is_refused=is_refused, is_interrupted=is_interrupted)

    def begin_meta(self, *, clean: bool) -> tuple[SpoolMeta, SyncRound] | None:
        """Returns the meta as of now and the round that has to be synced before it; None if nothing has changed."""
        with self._lock:
            if not self.backlog.store.changed and not clean:
                return None
            self._write_staged_locked()  # the meta speaks of the log alone
            return self.backlog.snapshot(clean=clean), self._gathering

    def end_meta(self, written: SpoolMeta, *, is_disk_full: bool) -> list[int]:
        """Use the sequences that the meta reserves, delete the chunks that are done. Returns handles to close."""
        store = self.backlog.store
        with self._lock:
            self.backlog.sequence_limit = written.next_sequence
            store.reclaim(SpoolSequenceSet(written.low, written.acked), is_disk_full=is_disk_full)
            return store.chunks.take_deleted_handles()

    def forget_reserved_sequences(self) -> None:
        """A clean meta lies in the folder, though its sync has failed: it reserves no sequences."""
        with self._lock:
            self.backlog.sequence_limit = self.backlog.next_sequence

    def reclaim_after(self, error: OSError) -> tuple[bool, list[int]]:
        """If the disk is full, delete the chunks that are done. Returns whether there were any; handles to close."""
        store = self.backlog.store
        with self._lock:
            store.changed, before = True, store.chunks.size_bytes
            if error.errno in DISK_FULL:
                store.reclaim(store.acked, is_disk_full=True)
            return store.chunks.size_bytes < before, store.chunks.take_deleted_handles()

    def spill(self) -> None:
        """Move the memory layer into the log. Raises OSError if there is no room for all of it."""
        with self._lock:
            self.backlog.spill()
            self.backlog.store.changed = True

    def spill_stale(self) -> None:
        """`spill` if memory was not seen empty for `stale_flush` seconds: a block in it may be that old.

        By the monotonic clock: setting the time of day must not keep blocks in memory.
        """
        with self._lock:
            now = self._monotonic()
            if self.backlog.memory and now - self._memory_empty_at < self._stale_flush:
                return
            self.backlog.spill()
            self._memory_empty_at = now

    # -- the end ---------------------------------------------------------------------------------------------------

    def begin_close(self) -> bool:
        """Refuse every call from now on. Returns False if the queue was closed already."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()
            return True

    def reopen(self) -> None:
        """Accept calls again: closing has failed."""
        with self._lock:
            self._is_closed = False

    def end_close(self) -> None:
        with self._lock:
            self.backlog.store.close()

    def leave_to_parent(self, parent: int) -> None:
        """Close the queue in a fork of the process that has it."""
        self._lock = threading.Lock()  # a thread that held the other one does not exist here
        self._is_closed = True
        self._closed_because = f"belongs to process {parent}, of which this one is a fork: open queues after forking"

    def resize(self, max_size: int) -> None:
        """Change the limit of blocks."""
        with self._lock:
            self.capacity.max_size = max_size
            self._not_full.notify_all()

    def stats(self, **outside: int) -> QueueStats:
        """Returns a frozen snapshot; `outside` has the fields that other objects count."""
        with self._lock:
            oldest = None
            with suppress(QueueError):
                oldest = self.backlog.peek(self._monotonic()) if not self._is_closed else None
            age = max(0.0, self._time() - oldest.enqueued_at) if oldest is not None else 0.0
            return spool_snapshot(self.backlog, self.capacity, self._counters, age, **outside)
