"""Freshest first: the newest block goes out first, so that after an outage dashboards are right again at once.

Frames know where they begin, not where the one before does. So the newest chunk that is not read yet is walked
through, header by header, and the offsets of its frames are kept on a stack (8 bytes a frame, one chunk at a time).
"""

from array import array
from collections import deque

from penstock.spool.backlog import Backlog
from penstock.spool.config import FastQueueConfig
from penstock.spool.disk_store import DiskStore
from penstock.spool.files import SpoolFiles
from penstock.spool.frame_reader import FrameReader
from penstock.spool.lease import FrameRef, Lease


class BackwardFrameReader:
    """Walks the log from its end to its beginning; frames that are appended in the meantime come next."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._offsets = array("Q")  # of frames to be read, the newest last
        self._indexed_from = store.chunks.end  # all frames from here on have been put on the stack
        self._above = (store.log_end, store.log_end)  # what the frame there follows, and its first sequence

    @property
    def newest_offset(self) -> int:
        """Where the next frame lies, as far as that is known; -1 if an older chunk would have to be looked through."""
        return self._offsets[-1] if self._offsets else -1

    def appended(self, refs: list[FrameRef]) -> None:
        self._offsets.extend(ref.offset for ref in refs)

    def read(self) -> tuple[FrameRef, list[Lease]] | None:
        """The blocks of the newest frame that are still to be delivered, None when there is none left."""
        store = self._store
        while self._offsets or self._index_chunk():
            if not self._offsets:
                continue
            offset = self._offsets.pop()
            reader = FrameReader(store.chunks, offset, store.quarantine)
            found = reader.next_header()
            if found is None or found[0] != offset or store.acked.covers(found[1].first, found[1].end):
                continue
            header = found[1]
            frame = reader.read(header)
            if frame is None:
                store.count_lost(header.first, header.end)
                store.acked.add(header.first, header.end)
                continue
            leases = store.leases_of(frame)
            store.count_read(leases)
            if leases:
                return FrameRef(offset, header.first, header.end), leases
        self._pass_between(store.acked.low, *self._above)
        store.drift_count += store.unread_count
        store.drift_bytes += store.unread_bytes
        store.unread_count = store.unread_bytes = 0
        return None

    def _index_chunk(self) -> bool:
        """Put the frames of the newest chunk that is not on the stack there; False if there is none."""
        store = self._store
        chunk = next((c for c in reversed(store.chunks.chunks) if c.start < self._indexed_from), None)
        if chunk is None:
            return False
        above, limit = self._above, min(chunk.end, self._indexed_from)
        reader = FrameReader(store.chunks, chunk.start, store.quarantine)
        end = None
        while reader.offset < limit and (found := reader.next_header()) is not None and found[0] < limit:
            offset, header = found
            if end is None:
                self._above = (header.follows, header.first)
            else:
                self._pass_between(end, header.follows, header.first)
            end = header.end
            self._offsets.append(offset)
            reader.skip(header)
        if end is not None:
            self._pass_between(end, *above)
        self._indexed_from = chunk.start
        return True

    def _pass_between(self, end: int, follows: int, first: int) -> None:
        """What lies between two frames: never given, acked before it was written, or lost to damage."""
        if follows > end:
            self._store.count_lost(end, follows)
        if first > end:
            self._store.acked.add(end, first)


class FreshestBacklog(Backlog):
    """A backlog that hands out the newest block first. What has to be dropped is still the oldest."""

    def __init__(self, files: SpoolFiles, folder: str, config: FastQueueConfig, now: float) -> None:
        super().__init__(files, folder, config, now)
        self._backward = BackwardFrameReader(self.store)
        self._refs: dict[int, FrameRef] = {}  # of the blocks in `_ready`
        self._oldest: deque[Lease] = deque()  # read from the other end, to be dropped

    def _on_appended(self, refs: list[FrameRef]) -> None:
        self._backward.appended(refs)

    def _read_if_newer(self) -> None:
        """Fill `_ready` if the newest block that is not in memory may still be in the log."""
        while not self.memory and (
            not self._ready or self._backward.newest_offset > self._refs[self._ready[-1].sequence].offset
        ):
            if not self._read_log():
                return

    def _take_into(self, taken: list[Lease], most: int, now: float) -> None:
        while len(taken) < most:
            self._read_if_newer()
            due = self.returned.due(now, newest=True)
            older_than = -1 if due is None else due
            if self.memory and self.memory[-1].sequence > older_than:
                lease = self.memory.pop()
                self.leased[lease.sequence] = lease
            elif self._ready and self._ready[-1].sequence > older_than:
                lease = self._ready.pop()
                self.leased[lease.sequence] = self._refs.pop(lease.sequence)
            elif due is not None:
                again = self._take_returned(due)
                if again is None:
                    continue
                lease = again
            else:
                return
            taken.append(lease)

    def _peek(self, now: float) -> Lease | None:
        self._read_if_newer()
        candidates = [source[-1] for source in (self.memory, self._ready) if source]
        due = self.returned.due(now, newest=True)
        if due is not None and (again := self._read_returned(due)) is not None:
            candidates.append(again)
        return max(candidates, default=None)

    def evict(self, now: float) -> bool:
        oldest = self._oldest_in_log()
        waiting = oldest or (self.memory[0] if self.memory else None)
        returned = self.returned.held
        if returned and (waiting is None or min(returned) < waiting.sequence):
            self._oldest.extendleft([oldest] if oldest is not None else [])
            lease = self._take_returned(min(returned))
            return lease is None or bool(self.finish([lease]))
        if oldest is not None:
            self.leased[oldest.sequence] = self._refs.pop(oldest.sequence, self._ready_ref)
            if self._ready and self._ready[0].sequence == oldest.sequence:
                self._ready.popleft()
            else:
                self.store.count_read([oldest])
            return bool(self.finish([oldest]))
        if self.memory:
            lease = self.memory.popleft()
            self.leased[lease.sequence] = lease
            return bool(self.finish([lease]))
        return self._evict_leased()

    def _oldest_in_log(self) -> Lease | None:
        while True:
            while self._oldest:
                if not self.store.is_done_or_held(self._oldest[0].sequence):
                    return self._oldest.popleft()
                self._oldest.popleft()
            found = self.store.read(is_counted=False)
            if found is None:
                return None
            self._oldest.extend(found[1])

    def _read_log(self) -> bool:
        found = self._correct_counts(self._backward.read())
        if found is None:
            return False
        ref, leases = found
        is_older = bool(self._ready) and leases[0] < self._ready[-1]  # the newer frames turned out to be done with
        self._ready.extend(leases)
        self._refs.update(dict.fromkeys((lease.sequence for lease in leases), ref))
        if is_older:
            self._ready = deque(sorted(self._ready))
        return True
