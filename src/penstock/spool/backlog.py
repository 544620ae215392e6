"""What a queue holds: the memory layer, the log behind it, the blocks on lease and those that came back.

push ──► the memory layer ──► the log          every block in memory is younger than every block in the log
lease ◄── redeliveries that are due ◄── the log ◄── the memory layer
"""

import errno
from collections import ChainMap, deque
from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter

from penstock.spool import journal, lease_runs
from penstock.spool.config import Durability, FastQueueConfig, parsed_bytes
from penstock.spool.disk_store import RESERVED_SEQUENCES, DiskStore
from penstock.spool.files import SpoolFiles, disk_error
from penstock.spool.group_commit import StagedBlocks
from penstock.spool.lease import FrameRef, Lease
from penstock.spool.meta import SpoolMeta
from penstock.spool.redeliveries import SpoolRedeliveries

_LARGEST_PIECE = 4 << 20  # of a spill: as much as is written at once
_sequence_of = itemgetter(0)


class Backlog:
    """The blocks of one queue, oldest first. Not thread-safe: the queue's lock guards it.

    Each block is in one place: in `memory`, unread in the log, read from it (`_ready`), in `leased` or in
    `returned`. `count` and `bytes` are those of all blocks that are not acked, wherever they are.
    """

    def __init__(self, files: SpoolFiles, folder: str, config: FastQueueConfig, now: float) -> None:
        self.memory: deque[Lease] = deque()
        self.leased: dict[int, Lease | FrameRef] = {}  # a Lease: the block is in memory only
        self.returned = SpoolRedeliveries()
        self.store = DiskStore(files, folder, config, ChainMap(self.leased, self.returned.held), now)
        self.next_sequence = self.store.next_sequence
        self.sequence_limit = self.next_sequence  # the meta on the disk has reserved the sequences below
        self.largest_batch = 1  # so many sequences at least have to be reserved
        self.count = self.store.unread_count
        self.bytes = self.store.unread_bytes
        self.flushes = 0
        self._staged: StagedBlocks | None = None  # the youngest blocks: they get their sequences from the log's end
        self._keeps_in_memory = config.durability is Durability.MEMORY
        self._memory_blocks = config.inmemory_blocks
        self._memory_bytes = None if config.inmemory_bytes is None else parsed_bytes(config.inmemory_bytes)
        self._piece_bytes = _LARGEST_PIECE
        self._ready: deque[Lease] = deque()  # read from the log, not handed out yet: the rest of a frame
        self._ready_ref = FrameRef(0, 0, 0)
        self._log_has_more = True

    # -- in --------------------------------------------------------------------------------------------------------

    def add_one(self, block: bytes, now: float) -> int:
        """Put one block into memory or the log, as `durability` says.

        Returns its sequence, -1 if memory has to be spilled first. An OSError leaves everything as it was.
        """
        length = len(block)
        if not self._keeps_in_memory:
            return self._write((block,), length, now)
        if len(self.memory) >= self._memory_blocks or (self._memory_bytes is not None and not self._fits(1, length)):
            return -1
        sequence = self.next_sequence
        self.memory.append(Lease(sequence, 1, block, now))
        self.next_sequence = sequence + 1
        self.count += 1
        self.bytes += length
        return sequence

    def add(self, batch: Sequence[bytes], length: int, now: float) -> int:
        """Add all blocks or, with an OSError, none; spills memory to make room. Returns the first sequence."""
        if self._keeps_in_memory:
            if not self._fits(len(batch), length):
                try:
                    self.spill()
                except OSError:
                    if not self._fits(len(batch), length):  # else it has made enough room
                        raise
            if len(batch) <= self._memory_blocks and length <= (self._memory_bytes or length):
                return self._keep(batch, length, now)
        return self._write(batch, length, now)

    def _fits(self, count: int, length: int) -> bool:
        """Whether the memory layer has room for so much more. Blocks on lease take room, too."""
        most = self._memory_bytes
        in_memory = self.bytes - self.store.unread_bytes
        return len(self.memory) + count <= self._memory_blocks and (most is None or in_memory + length <= most)

    def _keep(self, batch: Sequence[bytes], length: int, now: float) -> int:
        first, end = self.next_sequence, self.next_sequence + len(batch)
        self.memory.extend(map(Lease._make, zip(range(first, end), repeat(1), batch, repeat(now))))
        self._count_in(len(batch), length)
        return first

    def _write(self, batch: Sequence[bytes], length: int, now: float) -> int:
        first = self.next_sequence
        one = len(batch) == 1
        self._on_appended(
            [self.store.append_one(batch[0], first, now)] if one else self.store.append(batch, first, now)
        )
        self.store.unread_count += len(batch)
        self.store.unread_bytes += length
        self._count_in(len(batch), length)
        self._log_has_more = True
        return first

    def _count_in(self, count: int, length: int) -> None:
        self.next_sequence += count
        self.count += count
        self.bytes += length

    def stage(self, batch: Sequence[bytes], length: int, now: float) -> tuple[int, StagedBlocks]:
        """Count the blocks and give them sequences, to be written later. Returns the first, and where they wait."""
        if self._staged is None:
            self._staged = StagedBlocks(now)
            self.store.changed = True
        first = self.next_sequence
        self._staged.blocks += batch
        self._staged.bytes += length
        self._count_in(len(batch), length)
        return first, self._staged

    def write_staged(self) -> int:
        """Write the staged blocks, all or none. Returns how many; if none, their `error` says why."""
        staged, self._staged = self._staged, None
        if staged is None:
            return 0
        blocks = staged.blocks
        self._count_in(-len(blocks), -staged.bytes)
        try:
            self._write(blocks, staged.bytes, staged.at)
        except OSError as error:
            staged.error = error
            return 0
        except BaseException:
            staged.error = OSError(errno.EINTR, "the write was interrupted")
            raise
        return len(blocks)

    def spill(self) -> None:
        """Move every block of the memory layer into the log. After an OSError the rest is still in memory.

        Blocks on lease move with the others, so a crash after it loses none of them.
        """
        out = self.taken_from_memory()
        if not (waiting := sorted([*out, *self.memory]) if out else list(self.memory)):
            return
        if out:
            self.store.seen_below = max(self.store.seen_below, max(out).sequence + 1)
        for run in lease_runs.split_leases_for_spill(waiting):
            self._spill_in_pieces(run)
        self.flushes += 1

    def taken_from_memory(self) -> list[Lease]:
        """Blocks on lease or nacked that are not in the log."""
        return [one for part in (self.leased, self.returned.held) for one in part.values() if isinstance(one, Lease)]

    def _spill_in_pieces(self, run: list[Lease]) -> None:
        """Move as much as the disk has room for.

        After a refusal the next piece is one block, then twice as much each time: on a full disk no push pays for
        writing all of the memory layer.
        """
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
        refs = self.store.append_run(run)
        self._on_appended(refs)
        at = 0
        for lease in run:
            while lease.sequence >= refs[at].end:  # there may be frames of nothing but holes between two blocks
                at += 1
            for part, spent in ((self.leased, 1), (self.returned.held, 0)):
                if lease.sequence in part:
                    part[lease.sequence] = refs[at]
                    self.store.attempts[lease.sequence] = lease.attempts - spent
                    break
            else:
                self.memory.popleft()
                self.store.unread_count += 1
                self.store.unread_bytes += len(lease.data)
        self._log_has_more = True

    def _on_appended(self, refs: list[FrameRef]) -> None:
        """For subclasses: frames were appended to the log."""

    # -- out -------------------------------------------------------------------------------------------------------

    def take(self, most: int, now: float, max_bytes: int | None = None) -> list[Lease]:
        """Lease up to `most` blocks, oldest first. `max_bytes` limits all but the first."""
        if most == 1 and not self.returned.held and not self._ready and (lease := self._take_one()) is not None:
            return [lease]
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

    def _take_one(self) -> Lease | None:
        """Lease the next block if it is in memory. Returns None if it has to be read, or if there is none."""
        if self._log_has_more:
            found = self.store.read_cached()
            if found is None:
                return None
            ref, lease = found
            self.leased[ref.first] = ref
            return lease
        if not self.memory:
            return None
        lease = self.memory.popleft()
        self.leased[lease.sequence] = lease
        return lease

    def _take_into(self, taken: list[Lease], most: int, now: float) -> None:
        while self.returned.held and len(taken) < most and (sequence := self.returned.due(now)) is not None:
            lease = self._take_returned(sequence)
            if lease is not None:
                taken.append(lease)
        while len(taken) < most:
            if self._ready:
                part = _take_some(self._ready, most - len(taken))
                self.leased.update(zip(map(_sequence_of, part), repeat(self._ready_ref)))
                taken += part
            elif self._log_has_more and self._read_log():
                continue
            elif self.memory:
                part = _take_some(self.memory, most - len(taken))
                self.leased.update(zip(map(_sequence_of, part), part))
                taken += part
            else:
                return

    def _take_bytes_into(self, taken: list[Lease], most: int, now: float, max_bytes: int) -> None:
        """Lease one by one: where a limit of bytes matters, blocks are large and a peek at each is cheap."""
        total = 0
        while len(taken) < most:
            following = self._peek(now) if taken else None
            if taken and (following is None or total + len(following.data) > max_bytes):
                return
            before = len(taken)
            self._take_into(taken, before + 1, now)
            if len(taken) == before:
                return
            total += len(taken[-1].data)

    def journal_leases(self, taken: list[Lease]) -> None:
        """Write the leases to the journal, so that a crash counts as an attempt."""
        if len(taken) == 1:
            self.store.write_journal(journal.pack_leased(taken[0].sequence, 1, taken[0].attempts))
        else:
            self.store.write_journal(
                b"".join([journal.pack_leased(*run) for run in lease_runs.group_leases_by_attempts(taken)])
            )

    def finish(self, leases: Sequence[Lease]) -> int:
        """Take the leases as done, in any order. Returns how many of them were out; the others were done before."""
        leased, store = self.leased, self.store
        if len(leases) == 1:  # the common case, without a list of runs
            sequence, _, data, _ = leases[0]
            if leased.pop(sequence, None) is None:
                return 0
            store.ack_one(sequence, len(data))
            self.count -= 1
            self.bytes -= len(data)
            return 1
        done = [lease for lease in leases if leased.pop(lease[0], None) is not None]
        if not done:
            return 0
        self.count -= len(done)
        self.bytes -= store.ack(lease_runs.group_leases_with_bytes(done))
        return len(done)

    def give_back(self, lease: Lease, due_at: float | None) -> bool:
        """Let the block go out again, at once or at `due_at`. Returns False if it was not out any more."""
        held = self.leased.pop(lease.sequence, None)
        if held is None:
            return False
        self.returned.add(lease.sequence, held, due_at)
        self.store.attempts[lease.sequence] = lease.attempts
        self.store.changed = True
        return True

    def evict(self, now: float) -> bool:
        """Drop the oldest block that is not on lease, else the oldest of all. Returns False if there is none.

        An OSError (it could not be read) leaves everything as it was.
        """
        if self.returned.held:  # what came back is older than all that was never out
            lease = self._take_returned(min(self.returned.held))
            return lease is None or bool(self.finish([lease]))
        taken: list[Lease] = []
        self._take_into(taken, 1, now)
        return bool(self.finish(taken)) if taken else self._evict_leased()

    def _evict_leased(self) -> bool:
        """Drop the oldest leased block. Its consumer may still finish it; a nack has no effect."""
        if not self.leased:
            return False
        oldest = min(self.leased)
        held = self.leased[oldest]
        lease = held if isinstance(held, Lease) else self.store.read_again(held, oldest)
        self.finish([lease or Lease(oldest, 1, b"", 0.0)])
        return True

    def peek(self, now: float) -> Lease | None:
        """Returns what `take` would hand out first; nothing changes."""
        try:
            return self._peek(now)
        except OSError as error:
            raise disk_error(error) from error

    def _peek(self, now: float) -> Lease | None:
        if self.returned.held and (sequence := self.returned.due(now)) is not None:
            return self._read_returned(sequence)
        if self._ready or (self._log_has_more and self._read_log()):
            return self._ready[0]
        return self.memory[0] if self.memory else None

    def _take_returned(self, sequence: int) -> Lease | None:
        """Lease a block that came back. Returns None if it has been damaged since it was read first."""
        lease = self._read_returned(sequence)
        held = self.returned.remove(sequence)
        self.leased[sequence] = lease if lease is not None and isinstance(held, Lease) else held
        if lease is None:
            self.store.quarantine.lost_blocks += 1
            self.finish([Lease(sequence, 1, b"", 0.0)])
        return lease

    def _read_returned(self, sequence: int) -> Lease | None:
        held = self.returned.held[sequence]
        if isinstance(held, Lease):
            return held._replace(attempts=self.store.attempts[sequence] + 1)
        return self.store.read_again(held, sequence)

    def _read_log(self) -> bool:
        """Fill `_ready` from the next frame. Returns False at the end of the log."""
        if (cached := self.store.read_cached()) is not None:
            self._ready_ref, lease = cached
            self._ready.append(lease)
            return True
        found = self._correct_counts(self.store.read())
        if found is None:
            self._log_has_more = False
            return False
        self._ready_ref, leases = found
        self._ready.extend(leases)
        return True

    def _correct_counts(self, found: tuple[FrameRef, list[Lease]] | None) -> tuple[FrameRef, list[Lease]] | None:
        """Subtract the blocks that were counted and, as reading has shown, are not there."""
        self.count -= self.store.drift_count
        self.bytes -= self.store.drift_bytes
        self.store.drift_count = self.store.drift_bytes = 0
        return found

    # -- remembering -----------------------------------------------------------------------------------------------

    def snapshot(self, *, clean: bool) -> SpoolMeta:
        """Returns the meta as of now. It covers the log only: memory is gone after a crash."""
        only_memory = [*self.memory, *self.taken_from_memory()]
        attempts = {s: n for s, n in self.store.attempts.items() if s not in self.leased}
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


def _take_some(source: deque[Lease], most: int) -> list[Lease]:
    if most >= len(source):
        part = list(source)
        source.clear()
        return part
    return [source.popleft() for _ in range(most)]
