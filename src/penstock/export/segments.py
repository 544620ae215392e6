"""Seals what waits in the durable queue into segments for Spark."""

import logging
import threading
from pathlib import Path

from penstock.export.exporters.segments import MAX_BLOCKS, SegmentExporter
from penstock.spool import FastQueue, Lease

log = logging.getLogger(__name__)


class SegmentWriter:
    """A `SegmentExporter` with a thread of its own and nothing around it: the first failure ends it.

    Order and loss: as `SegmentExporter`.
    """

    def __init__(self, queue: FastQueue, folder: Path, *, writer: str = "edge", max_blocks: int = MAX_BLOCKS) -> None:
        self._queue = queue
        self._writer = writer
        self._exporter = SegmentExporter(folder, writer=writer, max_blocks=max_blocks)
        self._exporter.begin(queue.id)
        self.samples = self._exporter.samples
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"penstock-segments-{writer}", daemon=True)

    @property
    def segments(self) -> int:
        return self._exporter.segments

    @property
    def rows(self) -> int:
        return self._exporter.rows

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Seal everything that the queue holds, then stop. Raises what made the thread fail, if anything did."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._exporter.close()
        if self._failure:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(
                f"segments of {self._writer!r} were not all sealed within {timeout} s; the rest is queued"
            )

    def _run(self) -> None:
        try:
            while True:
                stopping = self._stopping.is_set()  # before leasing: what was pushed before `close` is still sealed
                leases = self._queue.lease(self._exporter.max_blocks, timeout=0.0 if stopping else 0.2)
                if leases:
                    self.seal(leases)
                elif stopping:
                    return
        except BaseException as error:
            log.exception("Sealing segments has stopped, what is queued stays queued. writer=%s", self._writer)
            self._failure = error  # close() raises it again

    def seal(self, leases: list[Lease]) -> None:
        """Seal these leases (but not what a segment covers already) and acknowledge them."""
        for lease, reason in self._exporter.send_group(leases):
            self._queue.reject(lease, reason)
        self._queue.ack(leases)
