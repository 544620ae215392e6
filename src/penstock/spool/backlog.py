"""What a queue holds and who has it: the memory layer, the log behind it, leases and blocks that came back.

    lease ◄── nacked blocks that are due ◄── the log ◄── the memory layer

This file is how blocks are handed out, settled and remembered; `intake` is how they come in.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter

from penstock.spool import journal, runs
from penstock.spool.backlog_intake import Intake
from penstock.spool.config import FastQueueConfig
from penstock.spool.files import Files, disk_error
from penstock.spool.lease import Lease
from penstock.spool.meta import Meta
from penstock.spool.store import RESERVED_SEQUENCES
from penstock.spool.upcoming import FrameRef

_sequence_of = itemgetter(0)


class Backlog(Intake):
    """The state of one queue. Not thread-safe: the queue's lock guards it."""

    def __init__(self, files: Files, folder: str, config: FastQueueConfig, now: float) -> None:
        super().__init__(files, folder, config, now)
        # Read from the log, not handed out yet: the rest of a frame, or frames of one block each. At most one of the
        # two holds anything, since reading goes on only when both are empty.
        self._ready: deque[Lease] = deque()
        self._ready_ref = FrameRef(0, 0, 0)
        self._ahead: deque[tuple[Lease, FrameRef]] = deque()
        self._due: list[int] = []  # heap of returned sequences that may go out again
        self._delayed: list[tuple[float, int]] = []  # heap of those that may not yet

    # -- out -------------------------------------------------------------------------------------------------------

    def take(self, most: int, now: float, max_bytes: int | None = None) -> list[Lease]:
        """Lease up to `most` blocks, oldest first; the first, and of the others what `max_bytes` allows."""
        if most == 1 and not self.returned:
            lease = self.take_next()
            return [] if lease is None else [lease]
        return self._take(most, now, max_bytes)

    def take_next(self) -> Lease | None:
        """Lease the next block, where none has come back; None if there is none."""
        if self._ahead:
            lease, ref = self._ahead.popleft()
            self.leased[lease.sequence] = ref
            return lease
        if not self._log_has_more and not self._ready:
            if not self.memory:
                return None
            lease = self.memory.popleft()
            self.leased[lease.sequence] = lease
            return lease
        if not self._ready:
            if (upcoming := self.store.read_upcoming()) is not None:
                ref, leases = upcoming
                self.leased[ref.first] = ref
                return leases[0]
            if found := self.store.read_ahead():
                self._ahead.extend(found)
                lease, ref = self._ahead.popleft()
                self.leased[lease.sequence] = ref
                return lease
        taken = self._take(1, 0.0, None)
        return taken[0] if taken else None

    def take_behind(self, done: Lease) -> Lease | None:
        """Lease the next block, if there is one at once and none was handed out before, and tell the journal of it and
        of the one that was settled just now, in one record where it can be."""
        store = self.store
        found = None
        try:
            if not self.returned and not store.attempts:
                found = self.take_next()
        finally:
            if not store.journals:
                pass
            elif found is None:
                store.note(journal.acked(done.sequence, 1, len(done.data)))
            else:
                store.note(journal.exchanged(done.sequence, len(done.data), found.sequence))
        return found

    def _take(self, most: int, now: float, max_bytes: int | None) -> list[Lease]:
        taken: list[Lease] = []
        try:
            if max_bytes is None:
                self._take_into(taken, most, now)
            else:
                self._take_bytes_into(taken, most, now, max_bytes)
        except OSError as error:
            if not taken:  # else they go out, and the next call says what is wrong
                raise disk_error(error) from error
        return taken

    def _take_into(self, taken: list[Lease], most: int, now: float) -> None:
        if self.returned:
            self._take_returned(most, now, taken)
        while len(taken) < most:
            if self._ahead:
                lease, ref = self._ahead.popleft()
                self.leased[lease.sequence] = ref
                taken.append(lease)
                continue
            if self._ready:
                if len(self._ready) == 1:
                    part = [self._ready.popleft()]
                    self.leased[part[0].sequence] = self._ready_ref
                else:
                    part = self._take_some(self._ready, most - len(taken))
                    self.leased.update(zip(map(_sequence_of, part), repeat(self._ready_ref)))
            elif self._log_has_more and self._read_log():
                continue
            elif self.memory:
                part = self._take_some(self.memory, most - len(taken))
                self.leased.update(zip(map(_sequence_of, part), part))
            else:
                return
            taken += part

    def _take_bytes_into(self, taken: list[Lease], most: int, now: float, max_bytes: int) -> None:
        """One by one: who limits the bytes has large blocks, or so many of them that a peek at each is nothing."""
        size = 0
        while len(taken) < most:
            following = self._peek(now) if taken else None
            if taken and (following is None or size + len(following.data) > max_bytes):
                return
            before = len(taken)
            self._take_into(taken, before + 1, now)
            if len(taken) == before:
                return
            size += len(taken[-1].data)

    def note_leased(self, taken: list[Lease]) -> None:
        """Write down who has been handed out, so that a crash counts as an attempt."""
        if len(taken) == 1:
            lease = taken[0]
            self.store.note(journal.leased(lease.sequence, 1, lease.attempts))
            return
        self.store.note(b"".join([journal.leased(*run) for run in runs.by_attempts(taken)]))

    def next_due(self) -> float | None:
        """When the next delayed block may go out."""
        return self._delayed[0][0] if self._delayed else None

    def finish(self, leases: Sequence[Lease]) -> int:
        """Take the leases as done, in any order; how many of them were out. The others were done or dropped before."""
        if len(leases) == 1:
            return self._finish_one(leases[0])
        popped = list(map(self.leased.pop, map(_sequence_of, leases), repeat(None)))
        if None in popped:
            leases = [lease for lease, held in zip(leases, popped) if held is not None]
            if not leases:
                return 0
        if self.store.attempts:
            for lease in leases:
                self.store.attempts.pop(lease.sequence, None)
        records = [
            self.store.ack(first, first + count, length)
            for first, count, length in runs.with_bytes(leases)
        ]  # fmt: skip
        self.store.note(b"".join(records))
        self.count -= len(leases)
        self.bytes -= sum(len(lease.data) for lease in leases)
        return len(leases)

    def _finish_one(self, lease: Lease) -> int:
        is_out = self.settle(lease)
        if is_out and self.store.journals:
            self.store.note(journal.acked(lease.sequence, 1, len(lease.data)))
        return is_out

    def settle(self, lease: Lease) -> bool:
        """Take one lease as done; False if it was not out. The journal is yet to be told."""
        sequence, _, data, _ = lease
        if self.leased.pop(sequence, None) is None:
            return False
        store = self.store
        if store.attempts:
            store.attempts.pop(sequence, None)
        store.acked.add_one(sequence)
        store.changed = True
        self.count -= 1
        self.bytes -= len(data)
        return True

    def give_back(self, lease: Lease, due_at: float | None) -> bool:
        """Let the block go out again, at once or at `due_at`; False if it was not out any more."""
        held = self.leased.pop(lease.sequence, None)
        if held is None:
            return False
        self.returned[lease.sequence] = held
        self.store.attempts[lease.sequence] = lease.attempts
        self.store.changed = True
        if due_at is None:
            heapq.heappush(self._due, lease.sequence)
        else:
            heapq.heappush(self._delayed, (due_at, lease.sequence))
        return True

    def evict(self, now: float) -> bool:
        """Drop the oldest block that nobody has on lease, else the oldest of all; False if there is none.

        An OSError (it could not be read) leaves everything as it was.
        """
        if self.returned:  # what came back is older than all that was never out
            return self._evict_returned()
        taken: list[Lease] = []
        self._take_into(taken, 1, now)
        return bool(self.finish(taken)) if taken else self._evict_leased()

    def _evict_returned(self) -> bool:
        oldest = min(self.returned)
        lease = self._take_again(oldest)
        self._due = [sequence for sequence in self._due if sequence != oldest]
        self._delayed = [entry for entry in self._delayed if entry[1] != oldest]
        heapq.heapify(self._due)
        heapq.heapify(self._delayed)
        return lease is None or bool(self.finish([lease]))

    def _evict_leased(self) -> bool:
        """Everything is on lease: let go of the oldest. Its holder may still succeed with it, only not fail."""
        if not self.leased:
            return False
        oldest = min(self.leased)
        held = self.leased[oldest]
        lease = held if isinstance(held, Lease) else self.store.read_again(held, oldest)
        self.finish([lease or Lease(oldest, 1, b"", 0.0)])
        return True

    def peek(self, now: float) -> Lease | None:
        """What `take` would hand out first; nothing changes."""
        try:
            return self._peek(now)
        except OSError as error:
            raise disk_error(error) from error

    def _peek(self, now: float) -> Lease | None:
        self._wake_delayed(now)
        if self._due:
            return self._again(self._due[0])
        if self._ready or self._ahead or (self._log_has_more and self._read_log()):
            return self._ready[0] if self._ready else self._ahead[0][0]
        return self.memory[0] if self.memory else None

    def _take_some(self, source: deque[Lease], most: int) -> list[Lease]:
        if most == 1:
            return [source.popleft()]
        if most >= len(source):
            part = list(source)
            source.clear()
            return part
        return [source.popleft() for _ in range(most)]

    def _take_returned(self, most: int, now: float, taken: list[Lease]) -> None:
        self._wake_delayed(now)
        while self._due and len(taken) < most:
            lease = self._take_again(self._due[0])
            heapq.heappop(self._due)
            if lease is not None:
                taken.append(lease)

    def _take_again(self, sequence: int) -> Lease | None:
        """Lease a block that came back; None if it has been damaged since it was read first."""
        lease = self._again(sequence)
        held = self.returned.pop(sequence)
        self.leased[sequence] = lease if lease is not None and isinstance(held, Lease) else held
        if lease is None:
            self.store.quarantine.lost_blocks += 1
            self.finish([Lease(sequence, 1, b"", 0.0)])
        return lease

    def _again(self, sequence: int) -> Lease | None:
        held = self.returned[sequence]
        if isinstance(held, Lease):
            return held._replace(attempts=self.store.attempts[sequence] + 1)
        return self.store.read_again(held, sequence)

    def _wake_delayed(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappush(self._due, heapq.heappop(self._delayed)[1])

    def _read_log(self) -> bool:
        """Fill `_ready` from the next frame, or `_ahead` from the next ones; False at the end of the log."""
        store = self.store
        found = store.read_upcoming()
        if found is None:
            self._ahead.extend(store.read_ahead())
            if self._ahead:
                return True
            found = self._correct_counts(store.read())
        if found is None:
            self._log_has_more = False
            return False
        self._ready_ref, leases = found
        self._ready.extend(leases)
        return True

    def _correct_counts(self, found: tuple[FrameRef, list[Lease]] | None) -> tuple[FrameRef, list[Lease]] | None:
        """Reading has shown what was counted and is not there."""
        self.count -= self.store.drift_count
        self.bytes -= self.store.drift_bytes
        self.store.drift_count = self.store.drift_bytes = 0
        return found

    # -- remembering -----------------------------------------------------------------------------------------------

    def snapshot(self, *, clean: bool) -> Meta:
        """The meta as of now; the log's part only, memory is gone after a crash."""
        only_memory = list(self.memory)
        attempts = {s: n for s, n in self.store.attempts.items() if s not in self.leased}
        for part in (self.leased, self.returned):
            only_memory += [held for held in part.values() if isinstance(held, Lease)]
        for sequence, held in self.leased.items():
            if not isinstance(held, Lease):
                attempts[sequence] = self.store.attempts.get(sequence, 0) + 1
        return self.store.snapshot(
            self.next_sequence + (0 if clean else max(RESERVED_SEQUENCES, self.largest_batch)),
            self.count - len(only_memory),
            self.bytes - sum(len(lease.data) for lease in only_memory),
            list(attempts.items()),
            clean=clean,
        )
