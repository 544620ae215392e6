"""Shapes: metrics that come again and again with the same series in the same order, as a sender's mostly do.

    bytes of a metric   0a 03 cpu 2a 4f 0a 23 19 ········ 21 ········ 3a 0e …     · times, values, counts: free
    its mask            ff ff fff ff ff ff ff ff 00000000 ff 00000000 ff ff

A metric whose bytes are the same under the mask has its fields in the same places and points of the same streams. So a
request that only brings new numbers is compared, not parsed: one comparison covers every byte that is not free. A
metric that differs is read field by field and becomes a shape of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, within
from penstock.decode.otlp.scanned_points import ScannedOtlpPoints
from penstock.decode.otlp.walk import EXPONENTIAL, HISTOGRAM, SUM, SUMMARY, MetricHead, OtlpMetricData
from penstock.decode.series import NO_STREAM

_ABSENT = -(1 << 30)  # a position that no request has, whatever is added to it
_MAX_UNUSED = 8  # shapes of one metric that were never met again, before no more are made
_MAX_SHAPES = 256  # of one metric, which may have to be compared one by one
_PROBE = 512  # bytes at most that are compared before the whole shape
_PATIENCE, _LITTLE_PATIENCE = 10, 2  # sweeps, of a minute each, without a use: with room to spare, and without
_OVERHEAD = 1000  # bytes of the objects of a shape


@dataclass(frozen=True, slots=True)
class _KeptFields:
    """The fields that a shape keeps of its points."""

    places: tuple[str, ...]
    numbers: tuple[str, ...]  # of 8 bytes, the first of the places; they are free
    spans: tuple[str, ...] = ()  # whose content is free
    values: tuple[str, ...] = ()  # varints; they are not


_NUMBERS = ("start", "time", "double", "int")
_TOTALS = ("start", "time", "count", "sum", "min", "max")
_SIDES = ("positive_counts", "negative_counts")
_KEPT = {
    SUM: _KeptFields(_NUMBERS, _NUMBERS),
    HISTOGRAM: _KeptFields((*_TOTALS, "counts", "counts_end", "bounds", "bounds_end"), _TOTALS, ("counts",)),
    EXPONENTIAL: _KeptFields(
        (*_TOTALS, "zeros", *(f"{side}{end}" for side in _SIDES for end in ("", "_end"))),
        (*_TOTALS, "zeros"),
        _SIDES,
        ("scale", "positive_offset", "negative_offset"),
    ),
}
_KEPT[SUMMARY] = _KEPT[SUM]  # a summary is turned into numbers
_FOR_LOOKUP = ("attributes", "attributes_end", "flags")


class OtlpShape:
    """One metric's bytes with holes, where the fields of its points are, and their streams."""

    __slots__ = (
        "fixed",
        "head",
        "hits",
        "hits_before",
        "idle",
        "layout",
        "length",
        "mask",
        "places",
        "points",
        "probe",
        "probe_at",
        "streams",
        "values",
    )

    def __init__(
        self,
        head: MetricHead,
        layout: int,
        data: Bytes,
        free: Ints,
        places: Ints,
        values: Ints,
        streams: NDArray[np.int32],
    ):
        self.head = head
        self.layout = layout
        self.length = len(data)
        self.mask = np.full(len(data), 255, np.uint8)
        self.mask[free] = 0
        self.fixed = (data & self.mask).tobytes()
        # Attributes differ most, and stand between what is free: the probe is the last of the longest fixed stretches.
        holes = np.flatnonzero(np.append(self.mask, 0) == 0)
        gaps = np.diff(holes, prepend=-1)
        widest = len(gaps) - 1 - int(np.argmax(gaps[::-1]))
        self.probe_at = int(holes[widest] - min(_PROBE, gaps[widest] - 1))
        self.probe = self.fixed[self.probe_at : int(holes[widest])]
        self.places = np.where(places > 0, places, _ABSENT).astype(np.int32)
        self.values = values
        self.streams = streams
        self.points = len(streams)
        self.hits = self.hits_before = 0
        self.idle = 0  # sweeps

    @property
    def nbytes(self) -> int:
        head = sum(map(len, self.head))  # counted in full, though shapes may share it
        return head + 2 * self.length + self.places.nbytes + self.values.nbytes + self.streams.nbytes + _OVERHEAD

    def count_sweep(self) -> int:
        """Returns how many sweeps in a row the shape was not used."""
        self.idle = 0 if self.hits > self.hits_before else self.idle + 1
        self.hits_before = self.hits
        return self.idle

    def fits(self, data: Bytes, start: int) -> bool:
        """Says whether the metric that starts there, and is as long, is the same but for the numbers."""
        if (data[start : start + self.length] & self.mask).tobytes() != self.fixed:
            return False
        self.hits += 1
        return True


class OtlpShapeCache:
    """The shapes that are known, at most `max_bytes` of them.

    Threads: one at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: dict[MetricHead, list[OtlpShape]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, list(self._known.values())))

    def find(self, head: MetricHead, body: bytes, data: Bytes, start: int, end: int) -> OtlpShape | None:
        """Returns the shape of the metric there; `data` is `body` as numbers."""
        for shape in self._known.get(head, ()):
            if (
                shape.length == end - start
                and body.startswith(shape.probe, start + shape.probe_at)
                and shape.fits(data, start)
            ):
                return shape
        return None

    def wants(self, head: MetricHead) -> bool:
        """Says whether one more shape of that metric is worth its memory."""
        known = self._known.get(head, ())
        if self.nbytes >= self._max_bytes or len(known) >= _MAX_SHAPES:
            return False
        return sum(not shape.hits for shape in known) < _MAX_UNUSED

    def add(self, shape: OtlpShape) -> None:
        self._known.setdefault(shape.head, []).append(shape)
        self.nbytes += shape.nbytes

    def learn(self, layout: int, read: Mapping[int, OtlpMetricData], scanned: ScannedOtlpPoints, streams: Ints) -> None:
        """Makes shapes of the metrics that were read field by field and all of whose points were taken."""
        kept = _KEPT[layout]
        order = np.argsort(scanned.metrics, kind="stable")
        numbers, firsts = np.unique(scanned.metrics[order], return_index=True)
        for number, first, last in zip(numbers.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(order)]):
            metric = read.get(number)
            if metric is None or not self.wants(metric.head):
                continue
            rows = order[first:last]
            start, end = metric.whole
            places = np.stack([scanned.fields[name][rows] for name in kept.places])
            places = np.where(places > 0, places - start, 0)
            if NO_STREAM in streams[rows] or not _has_all_numbers(layout, places):
                continue
            free = _free_bytes(layout, kept, places)
            values = np.stack([scanned.fields[name][rows] for name in kept.values]) if kept.values else places[:0]
            stands_for = SUM if layout == SUMMARY else layout
            data = scanned.data[start:end]
            self.add(OtlpShape(metric.head, stands_for, data, free, places, values, streams[rows].astype(np.int32)))

    def sweep(self, gone: NDArray[np.bool_]) -> None:
        """Forgets shapes that are not used, sooner where there is little room, and those with a stream that is gone."""
        patience = _PATIENCE if self.nbytes < self._max_bytes // 2 else _LITTLE_PATIENCE
        for head, shapes in list(self._known.items()):
            kept = [shape for shape in shapes if shape.count_sweep() < patience and not gone[shape.streams].any()]
            self.nbytes -= sum(shape.nbytes for shape in shapes) - sum(shape.nbytes for shape in kept)
            if kept:
                self._known[head] = kept
            else:
                del self._known[head]


class ShapeHit(NamedTuple):
    """A metric that has a known shape."""

    shape: OtlpShape
    start: int
    request: int
    number: int  # of the metric in its group


class OtlpPointColumns(NamedTuple):
    """The columns of `ScannedOtlpPoints` that come from shapes or from scanning."""

    fields: dict[str, Ints]
    requests: Ints
    metrics: Ints
    streams: Ints
    family: Ints

    def take(self, rows: Ints) -> "OtlpPointColumns":
        fields = {name: column[rows] for name, column in self.fields.items()}
        return OtlpPointColumns(fields, *(column[rows] for column in self[1:]))


def otlp_points_of_shapes(hits: Sequence[ShapeHit], layout: int) -> OtlpPointColumns:
    """Returns the points of metrics whose shapes are known."""
    kept = _KEPT[layout]
    shapes = [hit.shape for hit in hits]
    counts = [shape.points for shape in shapes]
    starts, requests, metrics = (np.repeat(np.array(column), counts) for column in list(zip(*hits))[1:])
    places = np.concatenate([shape.places for shape in shapes], axis=1) + starts
    np.maximum(places, 0, out=places)
    fields = dict(zip(kept.places, places))
    if kept.values:
        fields |= dict(zip(kept.values, np.concatenate([shape.values for shape in shapes], axis=1)))
    zeros = np.zeros(len(starts), np.int64)
    fields |= dict.fromkeys(_FOR_LOOKUP, zeros)
    return OtlpPointColumns(fields, requests, metrics, np.concatenate([shape.streams for shape in shapes]), zeros)


def join_otlp_points(known: OtlpPointColumns, read: OtlpPointColumns, layout: int) -> OtlpPointColumns:
    """Returns the points of known shapes and those that were read, in the order of their metrics."""
    kept = _KEPT[layout]
    names = (*kept.places, *kept.values, *_FOR_LOOKUP)
    fields = {name: np.concatenate([known.fields[name], read.fields[name]]) for name in names}
    both = OtlpPointColumns(fields, *(np.concatenate(pair) for pair in zip(known[1:], read[1:])))
    return both.take(np.argsort(both.metrics, kind="stable"))


def _has_all_numbers(layout: int, places: Ints) -> bool:
    """Says whether every number has a place: a summary leaves out what is 0."""
    return layout not in (SUM, SUMMARY) or bool((places[2:] > 0).any(axis=0).all())


def _free_bytes(layout: int, kept: _KeptFields, places: Ints) -> Ints:
    starts = places[: len(kept.numbers)]
    if layout == SUMMARY:
        # A number is read as signed and a summary's count is not: its highest byte must not change.
        wide, counts = starts[:3], starts[3]
        found = [_bytes_at(wide, 8), _bytes_at(counts, 7)]
    else:
        found = [_bytes_at(starts, 8)]
    for name in kept.spans:
        at = kept.places.index(name)
        found.append(within(places[at], places[at + 1] - places[at]))
    return np.concatenate(found)


def _bytes_at(starts: Ints, size: int) -> Ints:
    return (starts[starts > 0][:, None] + np.arange(size)).ravel()
