"""What L1 counts: points in all, and of the metrics that bring most of them."""

import threading
from collections.abc import Iterator

from penstock.telemetry import Sample

OTHERS = "(others)"
MOST_NAMED = 20  # metrics by name for each counter: senders name metrics, and a scrape must not grow with them
_RIVALS = 1_000  # further metrics that are counted on the quiet
_LEAD = 2  # times the least count that is named: then another takes its name's place, and not at every scrape


class TopCounter:
    """Counts by metric, and names those with the greatest counts; the others are counted together.

    A metric that gets a name begins at 0, and one that loses it takes its count along: no line ever falls.
    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._others = 0
        self._named: dict[str, int] = {}
        self._sizes: dict[str, int] = {}  # of all metrics that are known, to compare them

    def add(self, metric: str, count: int) -> None:
        if not count:
            return
        size = self._sizes.get(metric, 0) + count
        if metric in self._sizes or len(self._sizes) < _RIVALS:
            self._sizes[metric] = size
        if metric not in self._named and not self._gets_name(metric, size):
            self._others += count
            return
        self._named[metric] = self._named.get(metric, 0) + count

    def _gets_name(self, metric: str, size: int) -> bool:
        if len(self._named) < MOST_NAMED:
            return True
        least = min(self._named, key=lambda name: self._sizes[name])
        if metric not in self._sizes or size < _LEAD * self._sizes[least]:
            return False
        del self._named[least]
        return True

    def samples(self, name: str) -> Iterator[Sample]:
        yield Sample(name, self._others, (OTHERS,))
        yield from (Sample(name, count, (metric,)) for metric, count in self._named.items())


class PointCounts:
    """Points, points that are no numbers, and failed chunks.

    Threads: every method may be called from any thread.
    """

    def __init__(self) -> None:
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.points = 0
        self._received = TopCounter()
        self._not_numbers = TopCounter()
        self._failed_chunks = TopCounter()

    def add(self, metric: str, points: int = 0, not_numbers: int = 0, failed_chunks: int = 0) -> None:
        with self._lock:
            self.points += points
            self._received.add(metric, points)
            self._not_numbers.add(metric, not_numbers)
            self._failed_chunks.add(metric, failed_chunks)

    def samples(self) -> Iterator[Sample]:
        with self._lock:
            found = [
                Sample("penstock_l1_points_total", self.points),
                *self._received.samples("penstock_points_received_total"),
                *self._not_numbers.samples("penstock_points_not_numbers_total"),
                *self._failed_chunks.samples("penstock_l1_failed_chunks_total"),
            ]
        yield from found
