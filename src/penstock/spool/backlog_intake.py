"""How blocks come into a backlog: into the memory layer, into the log, and from the one into the other.

A block in the memory layer is younger than every block in the log: a spill moves all of them, those on lease
included, so a crash after it loses none of them.
"""

from collections import deque
from collections.abc import Sequence
from itertools import repeat

from penstock.spool import runs
from penstock.spool.config import FastQueueConfig
from penstock.spool.files import Files
from penstock.spool.group_commit import Staged
from penstock.spool.lease import Lease
from penstock.spool.store import Store
from penstock.spool.upcoming import FrameRef

_LARGEST_PIECE = 4 << 20  # of a spill: as much as is written at once


class _Held:
    """The sequences that are out on lease or waiting to go out again."""

    def __init__(self, *parts: dict[int, Lease | FrameRef]) -> None:
        self._parts = parts

    def __contains__(self, sequence: object) -> bool:
        return any(sequence in part for part in self._parts)


class Intake:
    """What a queue holds, and the side on which it grows. Not thread-safe: the queue's lock guards it."""

    def __init__(self, files: Files, folder: str, config: FastQueueConfig, now: float) -> None:
        self.memory: deque[Lease] = deque()
        self.leased: dict[int, Lease | FrameRef] = {}  # a Lease: the block is in memory only
        self.returned: dict[int, Lease | FrameRef] = {}
        self.store = Store(files, folder, config, _Held(self.leased, self.returned), now)
        self._log_has_more = True
        self.next_sequence = self.store.next_sequence
        self.sequence_limit = self.next_sequence
        self.largest_batch = 1  # so many sequences at least have to be reserved
        self.count = self.store.unread_count
        self.bytes = self.store.unread_bytes
        self.flushes = 0
        self._piece_bytes = _LARGEST_PIECE

    def keep(self, batch: Sequence[bytes], now: float) -> int:
        """Put the blocks into the memory layer; the first sequence."""
        first = self.next_sequence
        self.next_sequence = end = first + len(batch)
        self.memory.extend(map(Lease._make, zip(range(first, end), repeat(1), batch, repeat(now))))
        self.count += len(batch)
        self.bytes += sum(map(len, batch))
        return first

    def write(self, batch: Sequence[bytes], now: float) -> int:
        """Put the blocks into the log, all or (with an OSError) none; the first sequence."""
        first = self.next_sequence
        self._appended(self.store.append(batch, first, now))
        length = sum(map(len, batch))
        self.next_sequence = first + len(batch)
        self.store.unread_count += len(batch)
        self.store.unread_bytes += length
        self.count += len(batch)
        self.bytes += length
        self._log_has_more = True
        return first

    def write_one(self, block: bytes, now: float) -> int:
        """Put one block into the log, or (with an OSError) not; its sequence."""
        first, length, store = self.next_sequence, len(block), self.store
        ref = store.append_one(block, first, now)
        if store.reads_backward:
            self._appended([ref])
        self.next_sequence = first + 1
        store.unread_count += 1
        store.unread_bytes += length
        self.count += 1
        self.bytes += length
        self._log_has_more = True
        return first

    def stage(self, staged: Staged, batch: Sequence[bytes], length: int) -> int:
        """Count the blocks and give them sequences, though they are not in the log yet; the first sequence."""
        first = self.next_sequence
        staged.blocks += batch
        staged.bytes += length
        self.next_sequence = first + len(batch)
        self.count += len(batch)
        self.bytes += length
        return first

    def write_staged(self, staged: Staged) -> None:
        """Put what was staged last into the log, all or (with an OSError) none: then it was never counted."""
        blocks = staged.blocks
        self.next_sequence = staged.first
        self.count -= len(blocks)
        self.bytes -= staged.bytes
        if len(blocks) == 1:
            self.write_one(blocks[0], staged.at)
        else:
            self.write(blocks, staged.at)

    def spill(self) -> None:
        """Move every block of the memory layer into the log; after an OSError what is not there is still in memory."""
        out = [lease for part in (self.leased, self.returned) for lease in part.values() if isinstance(lease, Lease)]
        waiting = sorted([*out, *self.memory]) if out else list(self.memory)
        if not waiting:
            return
        if out:
            self.store.seen_below = max(self.store.seen_below, max(out).sequence + 1)
        for run in runs.to_spill(waiting):
            self._spill_in_pieces(run)
        self.flushes += 1

    def _spill_in_pieces(self, run: list[Lease]) -> None:
        """Move as much as the disk has room for. Behind a refusal it is one block, then twice as much each time: a full
        disk must not cost the writing of all that is in memory whenever somebody pushes."""
        at = 0
        while at < len(run):
            stop, length = at, 0
            while stop < len(run) and (stop == at or length + len(run[stop].data) <= self._piece_bytes):
                length += len(run[stop].data)
                stop += 1
            try:
                self._spill_run(run[at:stop])
            except OSError:
                self._piece_bytes = 1
                if stop - at == 1:
                    raise
                continue
            self._piece_bytes = min(2 * max(length, self._piece_bytes), _LARGEST_PIECE)
            at = stop

    def _spill_run(self, run: list[Lease]) -> None:
        first, end = run[0].sequence, run[-1].sequence + 1
        blocks: list[bytes | None] = [lease.data for lease in run]
        times = [lease.enqueued_at for lease in run]
        if end - first > len(run):
            by_sequence = {lease.sequence: lease for lease in run}
            blocks = [by_sequence[s].data if s in by_sequence else None for s in range(first, end)]
            times = [by_sequence[s].enqueued_at if s in by_sequence else times[0] for s in range(first, end)]
        refs = self.store.append(blocks, first, times[0], times if max(times) > times[0] else None)
        self._appended(refs)
        at = 0
        for lease in run:
            while lease.sequence >= refs[at].end:  # there may be frames of nothing but holes between two blocks
                at += 1
            for part, spent in ((self.leased, 1), (self.returned, 0)):
                if lease.sequence in part:
                    part[lease.sequence] = refs[at]
                    self.store.attempts[lease.sequence] = lease.attempts - spent
                    break
            else:
                self.memory.popleft()
                self.store.unread_count += 1
                self.store.unread_bytes += len(lease.data)
        self._log_has_more = True

    def _appended(self, refs: list[FrameRef]) -> None:
        """Frames have come to the end of the log."""
