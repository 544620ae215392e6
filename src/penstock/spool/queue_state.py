"""The state of one queue behind its one lock: every critical section of the queue is a method here.

`FastQueue` and `Syncer` call these methods and never see the lock. What `QueueState` is made of (`Backlog`, `Store`,
`CapacityPolicy`, ...) is plain state: it has no lock and starts nothing.
"""

import errno
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from penstock.clock import Clock
from penstock.errors import QueueClosed, QueueError
from penstock.spool.acked import Acked
from penstock.spool.backlog import Backlog
from penstock.spool.capacity_policy import CapacityPolicy, Demand, SequencesExhausted
from penstock.spool.chunk_files import ChunkFile
from penstock.spool.config import Durability, FastQueueConfig, FullBehavior, seconds
from penstock.spool.files import DISK_FULL, Files, disk_error
from penstock.spool.freshest import FreshestBacklog
from penstock.spool.group_commit import Staged, SyncRound
from penstock.spool.lease import Lease
from penstock.spool.meta import Meta
from penstock.spool.stats import Counters, QueueStats, snapshot

_DISK_RETRY = 0.25  # how often a blocked push looks whether the disk has room again


class QueueState:
    """Blocks, limits and counters of one queue.

    Threads: every method may be called from any thread.
    Blocks: `push` and `stage` under `FullBehavior.BLOCK` while the queue is full; `lease` until its deadline.
    """

    def __init__(self, files: Files, folder: str, config: FastQueueConfig, clock: Clock) -> None:
        self._time, self._monotonic = clock.time, clock.monotonic
        self._folder = folder
        self._in_memory = config.durability is Durability.MEMORY
        self._max_attempts = config.max_attempts
        self._stale_flush = seconds(config.stale_flush)
        kind = FreshestBacklog if config.order == "freshest" else Backlog
        backlog = kind(files, folder, config, clock.time())
        # _lock guards everything below. It is held while blocks are moved in memory, written to the page cache or read
        # back: never during a sync, and no callback runs under it. Whenever it is free:
        #   - every block that is not acked is in exactly one place of the backlog, or staged; `backlog.count` and
        #     `backlog.bytes` count each of them once;
        #   - staged blocks are the youngest of all, so that they can still get their sequences from the log's end;
        #   - every sequence that was given is below `backlog.sequence_limit`, which a meta on the disk has reserved;
        #   - every write that no sync has covered is in a chunk that is dirty or being synced.
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._waiting_to_lease = self._waiting_to_push = 0
        self._is_closed = False
        self._closed_because = "is closed"
        self._counters = Counters()
        self.backlog = backlog
        self.capacity = CapacityPolicy(backlog, config)
        self._gathering = SyncRound()  # the round that covers what is written now
        self._staged: Staged | None = None
        self._memory_empty_at = clock.monotonic()

    def check_open(self) -> None:
        """Raise QueueClosed if the queue is closed."""
        if self._is_closed:
            raise QueueClosed(f"the queue in {self._folder} {self._closed_because}")

    # -- in --------------------------------------------------------------------------------------------------------

    def push_one(self, block: bytes) -> int:
        """Take a block for which there is room into memory or the page cache; -1 if that takes more than this."""
        backlog, capacity = self.backlog, self.capacity
        with self._lock:
            length = len(block)
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
                self._accepted_locked(1, not self._in_memory)
            return sequence

    def push(self, batch: Sequence[bytes], demand: Demand) -> int:
        """Take the blocks as soon as there is room; the first sequence.

        Raises OSError if the disk refuses them, SequencesExhausted, and QueueFull and the like as the policy says.
        """
        with self._lock:
            self._make_room_locked(demand)
            first = self.backlog.add(batch, demand.bytes, self._time())
            self._accepted_locked(demand.blocks, True)
            return first

    def stage(self, batch: Sequence[bytes], demand: Demand) -> tuple[int, Staged, SyncRound]:
        """Take the blocks as soon as there is room, to be written with all that come before the next sync.

        Their first sequence, the object that says whether they could be written, and the round to wait for. Raises as
        `push` does, but for OSError. A later write delays no push: a push waits for the sync, not for the write.
        """
        with self._lock:
            self._make_room_locked(demand)
            return self._stage_locked(batch, demand.bytes)

    def stage_at_once(self, block: bytes) -> tuple[int, Staged, SyncRound] | None:
        """`stage` for one block; None if it would have to wait or to evict."""
        backlog, capacity, length = self.backlog, self.capacity, len(block)
        with self._lock:
            has_room = length <= capacity.max_block and not capacity.is_full_for(1, length)
            if not has_room or self._is_closed or backlog.next_sequence >= backlog.sequence_limit:
                return None
            return self._stage_locked((block,), length)

    def _stage_locked(self, batch: Sequence[bytes], length: int) -> tuple[int, Staged, SyncRound]:
        if self._staged is None:
            self._staged = Staged(self._time())
            self.backlog.store.changed = True
        return self.backlog.stage(self._staged, batch, length), self._staged, self._gathering

    def _write_staged_locked(self) -> None:
        """Write what is staged. If that fails, `Staged.error` says so to the pushes that wait for it."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            self.backlog.write_staged(staged)
        except OSError as error:
            staged.error = error
        except BaseException:
            staged.error = OSError(errno.EINTR, "the write was interrupted")
            raise
        else:
            self._accepted_locked(len(staged.blocks), True)

    def _accepted_locked(self, count: int, on_disk: bool) -> None:
        self._counters.pushed += count
        if self.capacity.is_dropping:
            self.capacity.accepted(on_disk=on_disk)
        if self._waiting_to_lease:
            self._not_empty.notify(count)

    def _make_room_locked(self, demand: Demand) -> None:
        """Return when the blocks may come in, as the policy says."""
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
            self.capacity.drop("disk_full", demand.blocks)
            raise disk_error(error) from error
        if is_evicted:
            self.capacity.drop("oldest", 1)
        return is_evicted

    def _wait_for_room_locked(self, deadline: float, longest: float = threading.TIMEOUT_MAX) -> bool:
        """Wait for a change; False if the deadline has passed."""
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

    def deadline(self, timeout: float | None) -> float:
        """Until when a push may wait for room."""
        return self._monotonic() + (self.capacity.block_timeout if timeout is None else timeout)

    def fitting(self, blocks: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, there is room for now; 1 if there is none."""
        with self._lock:
            return self.capacity.fitting(blocks)

    def wake_blocked_pushes(self) -> None:
        """Let pushes that wait for the disk look again."""
        with self._lock:
            self._not_full.notify_all()

    # -- out -------------------------------------------------------------------------------------------------------

    def lease(self, most: int, max_bytes: int | None, deadline: float | None) -> tuple[list[Lease], Sequence[Lease]]:
        """Lease blocks, waiting for the first one until `deadline`: those to hand out, and those to give up on.

        The latter have had all their attempts, each of them ended by a crash.
        """
        backlog = self.backlog
        with self._lock:
            if self._is_closed:
                self.check_open()
            taken = backlog.take(most, self._monotonic() if backlog.returned.held else 0.0, max_bytes)
            if not taken:
                if deadline is not None:
                    taken = self._wait_to_lease_locked(most, max_bytes, deadline)
                if not taken:
                    return taken, ()
            spent = self._withhold_spent_locked(taken) if backlog.store.attempts else ()
            if self._in_memory:
                backlog.store.changed = True
            elif taken:
                backlog.note_leased(taken)
            return taken, spent

    def _wait_to_lease_locked(self, most: int, max_bytes: int | None, deadline: float) -> list[Lease]:
        self._waiting_to_lease += 1
        try:
            while True:
                now = self._monotonic()
                taken = self.backlog.take(most, now, max_bytes)
                if taken or now >= deadline:
                    return taken
                due_at = self.backlog.returned.next_due_at()
                self._not_empty.wait((deadline if due_at is None else min(due_at, deadline)) - now)
                self.check_open()
        finally:
            self._waiting_to_lease -= 1

    def _withhold_spent_locked(self, taken: list[Lease]) -> list[Lease]:
        """Take out of `taken` what has had all its attempts; count the others that come again."""
        most = self._max_attempts
        spent = [] if most is None else [lease for lease in taken if lease.attempts > most]
        if spent:
            taken[:] = [lease for lease in taken if lease not in spent]
        self._counters.redelivered += sum(lease.attempts > 1 for lease in taken)
        return spent

    def ack(self, leases: Sequence[Lease]) -> None:
        """Take the leases as done; those that are not out any more are passed over."""
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

    def put_off(self, lease: Lease, delay: float) -> None:
        """`nack` for a failure of ours: it is not counted, and a closed queue keeps the block as it is."""
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

    def can_free_last_chunk(self, error: OSError) -> bool:
        """Count the refusal. True if the disk is full and all of the log is done: then the next sync may free it."""
        backlog = self.backlog
        with self._lock:
            is_full = error.errno in DISK_FULL
            self.capacity.disk_full += is_full
            self.capacity.disk_failures += not is_full
            if not is_full or not backlog.store.is_drained(backlog.store.acked):
                return False
            with suppress(QueueError):  # a chunk goes when it has been read, and what a kill left acked is not, yet
                backlog.peek(self._monotonic())
            backlog.store.changed = True
            return True

    def wait_for_disk(self, error: OSError, demand: Demand) -> None:
        """Return when a push is worth another try, which is under BLOCK only; else raise what the disk said."""
        with self._lock:
            may_wait = error.errno in DISK_FULL and self.capacity.behavior is FullBehavior.BLOCK
            if may_wait and self._wait_for_room_locked(demand.deadline, _DISK_RETRY):
                return
            self.capacity.drop("disk_full", demand.blocks)
        raise disk_error(error) from error

    def sync_failed(self, error: OSError, count: int) -> NoReturn:
        """`count` blocks were written and could not be synced: they are refused, though they may be delivered."""
        with self._lock:
            self.capacity.disk_failures += 1
            self.capacity.drop("disk_full", count)
        raise disk_error(error) from error

    # -- syncing ---------------------------------------------------------------------------------------------------

    def begin_round(self, current: SyncRound) -> tuple[list[ChunkFile], bool]:
        """Close the gathering round: what its sync has to cover, and whether names of files have changed."""
        with self._lock:
            current.following = self._gathering = SyncRound()
            self._write_staged_locked()
            return self.backlog.store.chunks.take_dirty()

    def end_round(self, dirty: list[ChunkFile], *, is_refused: bool = False, is_interrupted: bool = False) -> list[int]:
        """The sync of these chunks is over; handles to close."""
        chunks = self.backlog.store.chunks
        with self._lock:
            if is_interrupted:
                chunks.not_synced(dirty)
            chunks.synced(dirty)
            if is_refused:  # the kernel has given up on those pages; another sync of this file would claim success
                chunks.begin_chunk()
            return chunks.take_gone()

    def begin_meta(self, *, clean: bool) -> tuple[Meta, SyncRound] | None:
        """The meta as of now and the round that has to be on the disk before it; None if nothing has changed."""
        with self._lock:
            if not self.backlog.store.changed and not clean:
                return None
            self._write_staged_locked()  # the meta speaks of the log alone
            return self.backlog.snapshot(clean=clean), self._gathering

    def end_meta(self, written: Meta, *, is_disk_full: bool) -> list[int]:
        """The meta is on the disk: give sequences up to its limit, delete the chunks it does not need; handles to
        close."""
        store = self.backlog.store
        with self._lock:
            self.backlog.sequence_limit = written.next_sequence
            store.reclaim(Acked(written.low, written.acked), is_disk_full=is_disk_full)
            return store.chunks.take_gone()

    def meta_says_closed(self) -> None:
        """Only the name of a clean meta could not be synced: it has no sequences to spare."""
        with self._lock:
            self.backlog.sequence_limit = self.backlog.next_sequence

    def reclaim_after(self, error: OSError) -> tuple[bool, list[int]]:
        """A write or a sync has failed. If the disk is full, delete what is done; whether that was anything, and
        handles to close. No meta says so yet: the room for that meta has to come from somewhere."""
        store = self.backlog.store
        with self._lock:
            store.changed, before = True, store.chunks.size_bytes
            if error.errno in DISK_FULL:
                store.reclaim(store.acked, is_disk_full=True)
            return store.chunks.size_bytes < before, store.chunks.take_gone()

    def spill(self) -> None:
        """Move the memory layer into the log; OSError if there is no room for all of it."""
        with self._lock:
            self.backlog.spill()
            self.backlog.store.changed = True

    def spill_stale(self) -> None:
        """`spill` if a block in memory may be older than `stale_flush`: if memory was not seen empty for so long.

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
        """Take and hand out nothing any more; False if that was so already."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()
            return True

    def reopen(self) -> None:
        """It could not be closed after all."""
        with self._lock:
            self._is_closed = False

    def end_close(self) -> None:
        with self._lock:
            self.backlog.store.close()

    def leave_to_parent(self, parent: int) -> None:
        """This process is a fork of the one that has the queue: here it is closed."""
        self._lock = threading.Lock()  # a thread that held the other one does not exist here
        self._is_closed = True
        self._closed_because = f"belongs to process {parent}, of which this one is a fork: open queues after forking"

    def resize(self, max_size: int) -> None:
        """Have another limit of blocks."""
        with self._lock:
            self.capacity.max_size = max_size
            self._not_full.notify_all()

    def stats(self, **outside: int) -> QueueStats:
        """A frozen snapshot; `outside` is what this object does not know of it."""
        with self._lock:
            oldest = None
            with suppress(QueueError):
                oldest = self.backlog.peek(self._monotonic()) if not self._is_closed else None
            age = max(0.0, self._time() - oldest.enqueued_at) if oldest is not None else 0.0
            return snapshot(self.backlog, self.capacity, self._counters, age, **outside)
