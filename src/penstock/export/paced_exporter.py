"""Segments at a measured pace: few that hold much, instead of one for every request."""

import threading
from collections.abc import Sequence

from penstock.clock import Clock, SystemClock
from penstock.export.exporter import GroupExporter
from penstock.spool import Lease


class PacedExporter:
    """A `GroupExporter` that lets `interval` seconds pass between two groups. Blocks in between go with the next one.

    A file costs the disk a sync and Spark a look at it, however little it holds. The first group after a rest goes at
    once, and nothing waits after `skip_pauses`.
    """

    def __init__(self, exporter: GroupExporter, interval: float, *, clock: Clock | None = None) -> None:
        self._exporter = exporter
        self._interval = interval
        self._clock: Clock = clock or SystemClock()
        self._due = 0.0
        self._pauses_skipped = threading.Event()
        self.max_blocks, self.max_bytes = exporter.max_blocks, exporter.max_bytes

    @property
    def destination(self) -> str:
        """What log lines call the destination."""
        return str(getattr(self._exporter, "destination", type(self._exporter).__name__))

    def begin(self, queue_id: str) -> None:
        self._exporter.begin(queue_id)

    def send_group(self, leases: Sequence[Lease]) -> list[tuple[Lease, str]]:
        self._pauses_skipped.wait(max(0.0, self._due - self._clock.monotonic()))
        refused = self._exporter.send_group(leases)
        self._due = self._clock.monotonic() + self._interval
        return refused

    def skip_pauses(self) -> None:
        """Send everything at once from now on: the service is closing."""
        self._pauses_skipped.set()

    def close(self) -> None:
        self.skip_pauses()
        self._exporter.close()
