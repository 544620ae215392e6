"""The disk side of a queue: the log of frames, the acks, and the meta file that records both."""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import accumulate, repeat

from penstock.spool import frames, journal, meta
from penstock.spool.config import Durability, FastQueueConfig, parsed_bytes
from penstock.spool.files import SpoolFiles
from penstock.spool.frame_cache import FrameCache
from penstock.spool.frame_reader import FrameReader
from penstock.spool.frames import Frame, FrameHeader
from penstock.spool.journal import Journal
from penstock.spool.lease import FrameRef, Lease
from penstock.spool.recovery import recover_spool
from penstock.spool.sequence_set import SpoolSequenceSet

log = logging.getLogger(__name__)

RESERVED_SEQUENCES = 1 << 20  # a crash skips so many, so that no sequence is ever given twice
_KEEP_DRAINED = 16 << 20  # a drained queue may keep so much of its last chunk; to begin another one is not free
_ONE_WRITE = 4 << 20
_MOST_BUFFERS = 512  # a frame has two; IOV_MAX is 1024
_ALONE = 32 << 10  # blocks from this size on have a frame of their own: they fit the processor's cache, a joint one not


class DiskStore:
    """One queue folder. Not thread-safe: the queue's lock guards everything but `write_meta`.

    `held` are the sequences that are out on lease or waiting to be delivered again: reading passes over them.
    """

    def __init__(
        self, files: SpoolFiles, folder: str, config: FastQueueConfig, held: Container[int], now: float
    ) -> None:
        self._files = files
        self.folder = folder
        self._codec = frames.CODECS[config.compression]
        self._frame_bytes = parsed_bytes(config.write_buffer_size)
        self._write_bytes = min(_ONE_WRITE, parsed_bytes(config.chunk_size))
        self._keep_drained = min(_KEEP_DRAINED, parsed_bytes(config.chunk_size) // 2)
        self._held = held
        state = recover_spool(files, folder, parsed_bytes(config.chunk_size), now=now)
        self.chunks = state.chunks
        self.quarantine = state.quarantine
        self.acked = state.acked
        self.attempts = state.attempts  # of blocks that were handed out before the folder was opened, or nacked since
        self.log_end = state.log_end
        self.next_sequence = state.next_sequence
        self.unread_count = state.count
        self.unread_bytes = state.bytes
        self.drift_count = self.drift_bytes = 0
        self.unclean = state.unclean
        self.reads_backward = config.order == "freshest"
        self.seen_below = state.seen_below
        self._reader = FrameReader(self.chunks, state.reader_offset, self.quarantine)
        self._expected = state.acked.low
        self._refs: deque[FrameRef] = deque()
        # No cache if frames are read backwards, or if chunks overlap: then an offset may mean two places.
        self._cache = FrameCache(0 if self.reads_backward or self.chunks.overlaps else config.inmemory_blocks)
        self._journal: Journal | None = None
        self._journal_generation = state.journal_generation
        self.journals = config.durability is not Durability.MEMORY
        self.journal_failed = False
        self._cannot_delete = False
        self.meta_syncs = 0
        self.changed = True
        self.chunks.resume_writing()

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(
        self, blocks: Sequence[bytes | None], first: int, enqueued_at: float, times: Sequence[float] | None = None
    ) -> list[FrameRef]:
        """Write all blocks or, with an OSError, none. None among them is a hole."""
        mark, log_end = self.chunks.mark(), self.log_end
        refs: list[FrameRef] = []
        pending: list[bytes] = []
        pending_refs: list[tuple[int, int, int]] = []
        length = 0
        try:
            for start, stop in self._groups(blocks):
                part = blocks if stop - start == len(blocks) else blocks[start:stop]
                at = enqueued_at if times is None else times[start]
                encoded = frames.encode_frame(
                    part, first + start, self.log_end, at, self._codec, times and times[start:stop]
                )  # fmt: skip
                self.log_end = first + stop
                frame_length = sum(map(len, encoded))
                if pending and (length + frame_length > self._write_bytes or len(pending) > _MOST_BUFFERS):
                    self._write(pending, length, pending_refs, refs)
                    pending, pending_refs, length = [], [], 0
                pending_refs.append((length, first + start, first + stop))
                pending += encoded
                length += frame_length
            self._write(pending, length, pending_refs, refs)
        except BaseException:  # Control-C too: sequences that were given back must not lie in the log
            self.chunks.rollback(mark)
            self.log_end = log_end
            raise
        self.changed = True
        return refs

    def append_run(self, run: list[Lease]) -> list[FrameRef]:
        """Write leases in order of sequence, with holes where some are missing; all or, with an OSError, none."""
        first, end = run[0].sequence, run[-1].sequence + 1
        at = run[0].enqueued_at
        blocks: list[bytes | None] = [None] * (end - first)
        times = [at] * (end - first)
        for lease in run:
            blocks[lease.sequence - first] = lease.data
            times[lease.sequence - first] = lease.enqueued_at
        return self.append(blocks, first, at, times if max(times) > at else None)

    def append_one(self, block: bytes, first: int, at: float) -> FrameRef:
        """Write one block in a frame of its own. An OSError leaves everything as it was."""
        follows = self.log_end
        header, body = frames.encode_one_block_frame(block, first, follows, at, self._codec)
        length = len(header) + len(body)
        offset = self.chunks.append((header, body), length, first)
        self.log_end = end = first + 1
        self.changed = True
        ref = FrameRef(offset, first, end)
        if first == follows:  # else reading it has to pass the sequences before it that were never given
            self._cache.add(ref, offset + length, Lease(first, 1, block, at), self._reader.offset)
        return ref

    def _write(
        self, pending: list[bytes], length: int, pending_refs: list[tuple[int, int, int]], refs: list[FrameRef]
    ) -> None:
        offset = self.chunks.append(pending, length, pending_refs[0][1])
        refs += [FrameRef(offset + at, first, end) for at, first, end in pending_refs]

    def _groups(self, blocks: Sequence[bytes | None]) -> list[tuple[int, int]]:
        """Cut a batch into frames of about `write_buffer_size`, so that small blocks share one."""
        if len(blocks) == 1:
            return [(0, 1)]
        if self._codec and blocks[0] is not None and len(blocks[0]) >= _ALONE:
            return [(at, at + 1) for at in range(len(blocks))]
        ends = list(accumulate(4 if block is None else len(block) + 4 for block in blocks))
        if ends[-1] <= self._frame_bytes and len(blocks) <= frames.MOST_HOLES:
            return [(0, len(blocks))]
        groups = []
        start = done = 0
        while start < len(blocks):
            stop = max(start + 1, bisect_right(ends, done + self._frame_bytes))
            stop = min(stop, start + frames.MOST_HOLES)
            groups.append((start, stop))
            start, done = stop, ends[stop - 1]
        return groups

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, *, is_counted: bool = True) -> tuple[FrameRef, list[Lease]] | None:
        """Returns the blocks of the next frame that are still to be delivered, None at the end of the log.

        They count as read then, unless `is_counted` is False: then another read will count them.
        """
        while (found := self._reader.next_header()) is not None:
            offset, header = found
            first, end = header.first, header.end
            if first > self._expected:
                self._pass_gap(header)
            may_be_done = first < self.seen_below or self.reads_backward
            if may_be_done and self.acked.covers(first, end):
                self._reader.skip(header)
                continue
            frame = self._reader.read(header)
            if frame is None:
                continue  # how many are lost, the next frame says: it knows where this one ended
            ref = FrameRef(offset, first, end)
            self._refs.append(ref)
            self._expected = end
            leases = self.leases_of(frame)
            if is_counted:
                self.count_read(leases)
            if leases:
                return ref, leases
        if is_counted:
            self.settle_at_end()
        return None

    def read_cached(self) -> tuple[FrameRef, Lease] | None:
        """Returns the next frame's block if it is in the cache. It counts as read then."""
        found = self._cache.take(self._reader.offset)
        if found is None:
            return None
        ref, frame_end, lease = found
        self._reader.jump(frame_end)
        self._refs.append(ref)
        self._expected = ref.end
        self.unread_count -= 1
        self.unread_bytes -= len(lease.data)
        return ref, lease

    def is_done_or_held(self, sequence: int) -> bool:
        return sequence in self.acked or sequence in self._held

    def count_read(self, leases: Sequence[Lease]) -> None:
        self.unread_count -= len(leases)
        self.unread_bytes -= sum([len(lease.data) for lease in leases])

    def read_again(self, ref: FrameRef, sequence: int) -> Lease | None:
        """Returns a block that was read before, to be handed out once more; None if it is damaged by now."""
        reader = FrameReader(self.chunks, ref.offset, None)
        found = reader.next_header()
        if found is None or found[0] != ref.offset or found[1].first != ref.first:
            return None
        frame = reader.read(found[1])
        if frame is None:
            return None
        index = sequence - ref.first
        block = frame.blocks[index]
        at = frame.times[index] if frame.times else frame.header.enqueued_at
        return None if block is None else Lease(sequence, self.attempts.get(sequence, 0) + 1, block, at)

    def leases_of(self, frame: Frame) -> list[Lease]:
        header = frame.header
        times = frame.times or repeat(header.enqueued_at)
        if header.first >= self.seen_below and not header.holes and header.checked and not self.reads_backward:
            if header.block_count == 1:
                return [Lease(header.first, 1, frame.blocks[0], header.enqueued_at)]  # type: ignore[arg-type]
            rows = zip(range(header.first, header.end), repeat(1), frame.blocks, times)
            return list(map(Lease._make, rows))
        if not header.checked:
            self.acked.add(header.first + 1, header.end)
        attempts, held, acked = self.attempts, self._held, self.acked
        leases = []
        for sequence, block, at in zip(range(header.first, header.end), frame.blocks, times):
            if block is None:
                acked.add(sequence, sequence + 1)
            elif sequence not in held and sequence not in acked:
                leases.append(Lease(sequence, attempts.get(sequence, 0) + 1, block, at))
        return leases

    def _pass_gap(self, header: FrameHeader) -> None:
        """Take sequences between two frames as done: never given, acked before they were written, or lost to damage."""
        expected = self._expected
        if header.follows > expected:
            self.count_lost(expected, header.follows)
        self.acked.add(expected, header.first)
        self._expected = header.first

    def settle_at_end(self) -> None:
        """Set the unread counts to 0 at the end of the log: what they still counted was lost."""
        if self._expected < self.log_end:
            self.count_lost(self._expected, self.log_end)
            self.acked.add(self._expected, self.log_end)
            self._expected = self.log_end
        self.drift_count += self.unread_count
        self.drift_bytes += self.unread_bytes
        self.unread_count = self.unread_bytes = 0

    def count_lost(self, first: int, end: int) -> None:
        lost = end - first - self.acked.overlap(first, end)
        if lost:
            self.quarantine.lost_blocks += lost
            self.drift_count += lost
            self.unread_count -= lost
            log.error("Blocks lost to damage. folder=%s first=%d blocks=%d", self.folder, first, lost)

    # -- remembering -----------------------------------------------------------------------------------------------

    def ack_one(self, sequence: int, length: int) -> None:
        """Take a block of `length` bytes as done."""
        self.acked.add(sequence, sequence + 1)
        self.changed = True
        if self.attempts:
            self.attempts.pop(sequence, None)
        if self.journals:
            self.write_journal(journal.pack_acked(sequence, 1, length))

    def ack(self, done: list[tuple[int, int, int]]) -> int:
        """Take runs of blocks, (first, count, bytes) each, as done. Returns the bytes of all."""
        total = 0
        for first, count, length in done:
            self.acked.add(first, first + count)
            total += length
            if self.attempts:
                for sequence in range(first, first + count):
                    self.attempts.pop(sequence, None)
        self.changed = True
        if self.journals:
            self.write_journal(b"".join([journal.pack_acked(*run) for run in done]))
        return total

    def write_journal(self, records: bytes) -> None:
        """Write the records to the journal. If that fails, only the next meta records them."""
        if (self._journal is None or not self._journal.append(records)) and records:
            self._write_next_journals(records)

    def _write_next_journals(self, records: bytes) -> None:
        """Write the records to the next generation, or to several if they are too long for one."""
        try:
            for at in range(0, len(records), journal.FILE_BYTES):
                self._begin_journal().append(records[at : at + journal.FILE_BYTES])
        except OSError as error:
            if not self.journal_failed:
                log.warning("Journal cannot be written: a crash now would deliver acked blocks again. error=%s", error)
            self.journal_failed = self.changed = True

    def _begin_journal(self) -> Journal:
        """Begin the next generation. After an OSError (its room has to be reserved) the current one stays in use."""
        following = Journal(self._files, self.folder, self._journal_generation)
        self._journal_generation += 1
        if self._journal is not None:
            self._journal.close()
        self._journal = following
        return following

    def snapshot(
        self, next_sequence: int, count: int, size_bytes: int, attempts: list[tuple[int, int]], *, clean: bool
    ) -> meta.SpoolMeta:
        """Returns the meta as of now. `count` and `size_bytes` are those of blocks in the log that are not acked."""
        while self._refs and self._refs[0].end <= self.acked.low:
            self._refs.popleft()
        if self._journal is not None and self._journal.offset >= journal.ROTATE_BYTES and not clean:
            with suppress(OSError):  # then this one goes on: half of it is left
                self._begin_journal()
        self.journal_failed = self.changed = False
        return meta.SpoolMeta(
            reader_offset=self._resume_offset(),
            writer_offset=self.chunks.end,
            entry_count=count,
            total_bytes=size_bytes,
            log_end=self.log_end,
            next_sequence=next_sequence,
            clean=clean,
            low=self.acked.low,
            acked=self.acked.ranges,
            attempts=meta.lease_attempt_ranges(attempts),
            seed_end=self.chunks.seed_end,
            journal=self._journal.generation if self._journal else self._journal_generation,
            journal_offset=self._journal.offset if self._journal else 0,
        )

    def _resume_offset(self) -> int:
        if self.chunks.overlaps and self.chunks.chunks:
            return self.chunks.chunks[0].start  # what is acked is passed over again
        return self._refs[0].offset if self._refs else self._reader.offset

    def write_meta(self, snapshot: meta.SpoolMeta) -> None:
        meta.store_spool_meta(self._files, self.folder, snapshot)
        self.meta_syncs += 1
        for generation in journal.journal_generations(self._files, self.folder):
            if generation < snapshot.journal or snapshot.clean:
                with suppress(OSError):
                    self._files.unlink(journal.journal_path(self.folder, generation))

    def is_marked_closed(self) -> bool:
        """Whether the meta in the folder says that the queue was closed."""
        with suppress(meta.DamagedSpoolMeta):
            known = meta.load_spool_meta(self._files, self.folder)
            return known is not None and known.clean
        return False

    def is_drained(self, acked: SpoolSequenceSet) -> bool:
        """Whether every block in the log is done, and some of it is still there."""
        return acked.low >= self.log_end and self.chunks.size_bytes > 0

    def reclaim(self, acked: SpoolSequenceSet, *, is_disk_full: bool = False) -> int:
        """Delete the chunks in which every block is in `acked`. Returns how many.

        That is what the meta on the disk says: sequences that a kill has skipped are in no journal. The last chunk
        stays, unless all of it is done and it is large or its room is wanted: then the next frame has a new chunk.
        """
        if self.is_drained(acked) and self.chunks.last_size > (0 if is_disk_full else self._keep_drained):
            with suppress(OSError):
                self.chunks.begin_empty_chunk(self.log_end)
        done = []
        first = 0
        for chunk, end in self.chunks.with_ends():
            first = chunk.first if chunk.first is not None else first
            is_passed = end is not None and (self.reads_backward or self._reader.has_passed(chunk))
            if is_passed and acked.covers(first, end or 0):
                done.append(chunk)
        for chunk in done:
            try:
                self.chunks.delete(chunk)
            except OSError as error:
                if not self._cannot_delete:
                    log.warning("Chunk that is done with cannot be deleted. folder=%s error=%s", self.folder, error)
                self._cannot_delete = True
        return len(done)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self.chunks.close()
