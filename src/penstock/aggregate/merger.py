"""Chunks become partials, and their points are counted by metric."""

import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.definition import Definition
from penstock.model.gathering import merged_chunks
from penstock.model.partial import encoded
from penstock.model.point import Chunk
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

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

    def add_failed(self, chunk: Chunk, error: BaseException) -> None:
        self.add(chunk.metric, failed_chunks=1)
        log.error("A chunk cannot be merged. metric=%s", chunk.metric, exc_info=error)

    def samples(self) -> Iterator[Sample]:
        with self._lock:
            found = [(metric, tuple(counts)) for metric, counts in self._counts.items()]
        for metric, counts in found:
            yield from (Sample(name, count, (metric,)) for name, count in zip(_COUNTERS, counts))


def plain_partials(chunks: Sequence[Chunk], counts: PointCounts) -> pa.Table:
    """Chunks of any metrics by their own labels: one group-by over all of them, one row per identity."""
    finite = [_finite(chunk) for chunk in chunks]
    table = merged_chunks(finite)
    _count(chunks, finite, counts)
    return table


def defined_partials(chunks: Sequence[Chunk], definitions: Sequence[Definition], counts: PointCounts) -> list[pa.Table]:
    """Chunks of one metric and kind: a table for each definition."""
    finite = [_finite(chunk) for chunk in chunks]
    points = pa.concat_tables([chunk.points for chunk in finite])
    made = [encoded(definition.partials(points)) for definition in definitions] if points.num_rows else []
    _count(chunks, finite, counts)
    return [partials for partials in made if partials.num_rows]


def _finite(chunk: Chunk) -> Chunk:
    """Without NaN and infinities: one of them would make the sum of its series useless for good."""
    if chunk.columns is not None:
        is_finite = np.isfinite(chunk.columns.values)
        return chunk if is_finite.all() else type(chunk)(chunk.columns.take(is_finite))
    mask = pc.is_finite(chunk.points["value"])
    return chunk if pc.all(mask).as_py() else type(chunk)(chunk.points.filter(mask))


def _count(chunks: Sequence[Chunk], finite: Sequence[Chunk], counts: PointCounts) -> None:
    totals: dict[str, list[int]] = {}
    for chunk, left in zip(chunks, finite, strict=True):
        total = totals.setdefault(chunk.metric, [0, 0])
        total[0] += len(chunk)
        total[1] += 0 if left is chunk else len(chunk) - len(left)
    for metric, (points, not_numbers) in totals.items():
        counts.add(metric, points, not_numbers)
