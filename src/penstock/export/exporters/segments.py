"""Segments for Spark: blocks of partials, sealed many at a time as one immutable file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from penstock.model.segment import Segment, check_writer, decode, seal, sealed
from penstock.spool import Lease
from penstock.telemetry import Sample

MAX_BLOCKS = 1000  # about 50 MB of blocks of 50 KB: what one Spark task reads at a time without spilling


class SegmentExporter:
    """Seals blocks of partials as segments: a `GroupExporter`, for `SendQueue(queue, SegmentExporter(folder))`.

    Order: segments cover the queue's sequences in order, without overlap.
    Loss: none. `send_group` returns when the segment survives a power cut; blocks that a sealed segment covers already
        are not written again, however they are grouped by then. So a crash between seal and ack doubles nothing.
    Threads: one at a time.
    """

    def __init__(self, folder: Path, *, writer: str = "edge", max_blocks: int = MAX_BLOCKS) -> None:
        self._folder = folder
        self._writer = check_writer(writer)
        self.max_blocks = max_blocks
        self.segments = 0
        self.rows = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = [segment for segment in sealed(folder) if segment.writer == writer]
        self._covered = mine[-1].last if mine else -1

    def send_group(self, leases: Sequence[Lease]) -> list[tuple[Lease, str]]:
        """Seal these blocks as one segment, but for those that one covers already and those that cannot be read."""
        refused = []
        fresh = []
        tables = []
        for lease in leases:
            try:
                table = decode(lease.data)
            except (pa.ArrowException, ValueError) as error:
                refused.append((lease, f"not a block of partials: {error}"))
                continue
            if lease.sequence > self._covered:
                fresh.append(lease)
                tables.append(table)
        if fresh:
            segment = Segment(self._writer, fresh[0].sequence, fresh[-1].sequence)
            partials = pa.concat_tables(tables)
            seal(self._folder, segment, partials)
            self._covered = segment.last
            self.segments += 1
            self.rows += partials.num_rows
        return refused

    def close(self) -> None:
        """There is nothing to let go of."""

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_segments_sealed_total", self.segments)
        yield Sample("penstock_segment_rows_total", self.rows)
