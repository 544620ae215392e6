"""Segments for Spark: blocks of partials, sealed many at a time as one immutable file.

`.<writer>.owner` in the folder holds the id of the queue whose sequences the writer's segments cover, and is locked
while the writer works: sequences of another queue mean other blocks, and would be taken for sealed.
"""

import fcntl
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from penstock.errors import ConfigError, PermanentExportError, QueueLocked, TransientExportError
from penstock.model.segment import (
    QUARANTINE,
    Segment,
    check_segment_writer,
    decode_partials_block_encoded,
    parse_segment_name,
    requests_of_partials_block,
    seal,
    sealed,
    sync_segment_folder,
)
from penstock.spool import Lease
from penstock.telemetry import Sample
from penstock.units import parse_bytes

MAX_BLOCKS = 1000
MAX_BYTES = 64 << 20  # of blocks in one segment: what a Spark task reads at a time without spilling


class SegmentExporter:
    """Seals blocks of partials as segments: a `GroupExporter`, for `SendQueue(queue, SegmentExporter(folder))`.

    Order: segments cover the queue's sequences in order, without overlap and without a gap.
    Loss: none. `send_group` returns when the segment survives a power cut; blocks that a sealed segment covers already
        are not written again, however they are grouped by then. So a crash between seal and ack doubles nothing.
    Threads: one at a time, but for `close`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        writer: str = "edge",
        max_blocks: int = MAX_BLOCKS,
        max_bytes: int | str = MAX_BYTES,
    ) -> None:
        self._folder = Path(folder)
        self.destination = str(folder)
        self._writer = check_segment_writer(writer)
        self.max_blocks = max_blocks
        self.max_bytes = parse_bytes(max_bytes, "segments.max_bytes")
        if max_blocks < 1 or self.max_bytes < 1:
            raise ConfigError(f"segments need max_blocks and max_bytes >= 1, got {max_blocks!r} and {max_bytes!r}")
        self.segments = 0
        self.rows = 0
        self._owner: int | None = None  # the descriptor that holds the lock
        self._is_closed = False
        self._sealing = threading.Lock()
        self._queue = ""
        self._covered_before = self._covered = -1
        self._is_unsynced = False  # a segment has its name, but the folder could not be synced

    def begin(self, queue_id: str) -> None:
        """Take the writer's name for the queue of that id, and learn what its segments cover already.

        QueueLocked while another process writes under that name, ConfigError if its segments are another queue's.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f".{self._writer}.owner"
        owner = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            known = os.pread(owner, 64, 0).decode("ascii", "replace")
            aside = self._folder / QUARANTINE
            everything = sealed(self._folder) + (sealed(aside) if aside.is_dir() else [])
            mine = [segment for segment in everything if segment.writer == self._writer]
            if mine and known != queue_id:
                raise ConfigError(
                    f"segments.writer {self._writer!r} has segments of another queue in {self._folder}: "
                    "give this queue a writer name or a segment folder of its own"
                )
            os.truncate(path, os.pwrite(owner, queue_id.encode(), 0))
            os.fsync(owner)
        except BlockingIOError:
            os.close(owner)
            raise QueueLocked(f"another process writes segments as {self._writer!r} in {self._folder}") from None
        except BaseException:
            os.close(owner)
            raise
        self._owner = owner
        self._is_closed = False
        self._queue = queue_id
        for entry in self._folder.glob(f".{self._writer}-*.arrow"):  # of a seal that was interrupted
            if (left := parse_segment_name(entry.name[1:])) and left.writer == self._writer:
                entry.unlink()
        self._covered_before = self._covered = max((segment.last for segment in mine), default=-1)

    def send_group(self, leases: Sequence[Lease]) -> list[tuple[Lease, str]]:
        """Seal these blocks as one segment, but for those that one covers already and those that cannot be read."""
        try:
            with self._sealing:
                if self._is_closed:
                    raise TransientExportError("the segment exporter is closed")
                return self._seal_group(leases)
        finally:
            if self._is_closed:
                self.close()

    def _seal_group(self, leases: Sequence[Lease]) -> list[tuple[Lease, str]]:
        if self._is_unsynced:
            sync_segment_folder(self._folder)
            self._is_unsynced = False
        refused = []
        fresh = []
        tables = []
        requests = []  # their digests, which stay with their points
        for lease in leases:
            try:
                table, digests = decode_partials_block_encoded(lease.data), requests_of_partials_block(lease.data)
            except (pa.ArrowException, ValueError) as error:
                refused.append((lease, f"not a block of partials: {error}"))
                continue
            if lease.sequence <= self._covered_before:
                continue  # sealed before a crash, not yet acknowledged then
            if lease.sequence <= self._covered:
                raise PermanentExportError(
                    f"block {lease.sequence} came after {self._covered} was sealed: not in order"
                )
            fresh.append(lease)
            tables.append(table)
            requests.append(digests)
        if fresh:
            segment = Segment(self._writer, self._covered + 1, fresh[-1].sequence)
            partials = pa.concat_tables(tables)
            try:
                seal(self._folder, segment, partials, (self._queue, fresh[0].sequence), b"".join(requests))
            except OSError:
                if (self._folder / segment.name).exists():  # whole, but not known to survive a power cut
                    self._covered_before = self._covered = segment.last
                    self._is_unsynced = True
                raise
            self._covered = segment.last
            self.segments += 1
            self.rows += partials.num_rows
        return refused

    def close(self) -> None:
        """Let go of the writer's name, after a segment that is being sealed: no other writer may seal its blocks."""
        self._is_closed = True
        if self._sealing.acquire(blocking=False):
            try:
                if self._owner is not None:
                    os.close(self._owner)
                    self._owner = None
            finally:
                self._sealing.release()

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_segments_sealed_total", self.segments)
        yield Sample("penstock_segment_rows_total", self.rows)
