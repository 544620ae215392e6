"""Seals what waits in the durable queue into segments for Spark."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from penstock.model.segment import Segment, check_writer, decode, seal, sealed
from penstock.spool import FastQueue, Lease
from penstock.telemetry import Sample

MAX_BLOCKS = 1000  # about 50 MB of blocks of 50 KB: what one Spark task reads at a time without spilling


class SegmentWriter:
    """Leases blocks of partials, seals them as one segment, acknowledges them: one thread, in order.

    Order: segments cover the queue's sequences in order, without overlap.
    Loss: none. A block is acknowledged only when its segment survives a power cut; after a crash in between, blocks
    that a sealed segment covers already are acknowledged and not written again, however they are grouped by then.
    """

    def __init__(self, queue: FastQueue, folder: Path, *, writer: str = "edge", max_blocks: int = MAX_BLOCKS) -> None:
        self._queue = queue
        self._folder = folder
        self._writer = check_writer(writer)
        self._max_blocks = max_blocks
        self.segments = 0
        self.rows = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = [segment for segment in sealed(folder) if segment.writer == writer]
        self._covered = mine[-1].last if mine else -1
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"penstock-segments-{writer}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Seal everything that the queue holds, then stop. Raises what made the thread fail, if anything did."""
        self._stopping.set()
        self._thread.join(timeout)
        if self._failure:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(
                f"segments of {self._writer!r} were not all sealed within {timeout} s; the rest is queued"
            )

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_segments_sealed_total", self.segments)
        yield Sample("penstock_segment_rows_total", self.rows)

    def _run(self) -> None:
        try:
            while True:
                stopping = self._stopping.is_set()  # before leasing: what was pushed before `close` is still sealed
                leases = self._queue.lease(self._max_blocks, timeout=0.0 if stopping else 0.2)
                if leases:
                    self.seal(leases)
                elif stopping:
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised again by close()
            self._failure = error

    def seal(self, leases: list[Lease]) -> None:
        """Seal these leases (but not what a segment covers already) and acknowledge them."""
        fresh = [lease for lease in leases if lease.sequence > self._covered]
        if fresh:
            segment = Segment(self._writer, fresh[0].sequence, fresh[-1].sequence)
            partials = pa.concat_tables([decode(lease.data) for lease in fresh])
            seal(self._folder, segment, partials)
            self._covered = segment.last
            self.segments += 1
            self.rows += partials.num_rows
        self._queue.ack(leases)
