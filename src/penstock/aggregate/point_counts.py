"""What L1 counts of each metric."""

import threading
from collections.abc import Iterator

from penstock.telemetry import Sample

OTHERS = "(others)"
_COUNTERS = ("penstock_points_received_total", "penstock_points_not_numbers_total", "penstock_l1_failed_chunks_total")


class PointCounts:
    """Points, points that are no numbers, and failed chunks of each metric; beyond `max_metrics`, of all others."""

    def __init__(self, max_metrics: int) -> None:
        self._max_metrics = max_metrics
        # _lock guards the counts.
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}

    def add(self, metric: str, points: int = 0, not_numbers: int = 0, failed_chunks: int = 0) -> None:
        with self._lock:
            if metric not in self._counts and len(self._counts) >= self._max_metrics:
                metric = OTHERS
            counts = self._counts.setdefault(metric, [0, 0, 0])
            for place, more in enumerate((points, not_numbers, failed_chunks)):
                counts[place] += more

    def samples(self) -> Iterator[Sample]:
        with self._lock:
            found = [(metric, tuple(counts)) for metric, counts in self._counts.items()]
        for metric, counts in found:
            yield from (Sample(name, count, (metric,)) for name, count in zip(_COUNTERS, counts))
