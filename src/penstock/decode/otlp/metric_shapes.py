"""Shapes of OTLP metrics: the points of those that are known, and shapes made of those that were read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.decode.column_scan import Ints, within
from penstock.decode.otlp.walk import EXPONENTIAL, HISTOGRAM, SUM, SUMMARY, Data
from penstock.decode.scanned_points import Found
from penstock.decode.shapes import Shape, Shapes


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a shape keeps of its points."""

    places: tuple[str, ...]
    numbers: tuple[str, ...]  # of 8 bytes, at the first so many places; they are free
    spans: tuple[str, ...] = ()  # whose content is free
    values: tuple[str, ...] = ()  # varints; they are not


_NUMBERS = ("start", "time", "double", "int")
_STATED = ("start", "time", "count", "sum", "min", "max")
_SIDES = ("positive_counts", "negative_counts")
_KEPT = {
    SUM: _Kept(_NUMBERS, _NUMBERS),
    HISTOGRAM: _Kept((*_STATED, "counts", "counts_end", "bounds", "bounds_end"), _STATED, ("counts",)),
    EXPONENTIAL: _Kept(
        (*_STATED, "zeros", *(f"{side}{end}" for side in _SIDES for end in ("", "_end"))),
        (*_STATED, "zeros"),
        _SIDES,
        ("scale", "positive_offset", "negative_offset"),
    ),
}
_KEPT[SUMMARY] = _KEPT[SUM]  # which it has become
_OF_STRANGERS = ("attributes", "attributes_end", "flags")


class Hit(NamedTuple):
    """A metric that has a known shape."""

    shape: Shape
    start: int
    request: int
    number: int  # of the metric in its group


class Columns(NamedTuple):
    """The columns of `Found` that differ between what is known and what was read."""

    fields: dict[str, Ints]
    requests: Ints
    metrics: Ints
    streams: Ints
    which: Ints

    def take(self, rows: Ints) -> "Columns":
        fields = {name: column[rows] for name, column in self.fields.items()}
        return Columns(fields, *(column[rows] for column in self[1:]))


def points_of(hits: Sequence[Hit], layout: int) -> Columns:
    """The points of metrics whose shapes are known."""
    kept = _KEPT[layout]
    shapes = [hit.shape for hit in hits]
    counts = [shape.points for shape in shapes]
    starts, requests, metrics = (np.repeat(np.array(column), counts) for column in list(zip(*hits))[1:])
    places = np.concatenate([shape.places for shape in shapes], axis=1) + starts
    np.maximum(places, 0, out=places)
    fields = dict(zip(kept.places, places))
    if kept.values:
        fields |= dict(zip(kept.values, np.concatenate([shape.values for shape in shapes], axis=1)))
    nothing = np.zeros(len(starts), np.int64)
    fields |= dict.fromkeys(_OF_STRANGERS, nothing)
    return Columns(fields, requests, metrics, np.concatenate([shape.streams for shape in shapes]), nothing)


def together(known: Columns, read: Columns, layout: int) -> Columns:
    """Both in the order of their metrics."""
    kept = _KEPT[layout]
    names = (*kept.places, *kept.values, *_OF_STRANGERS)
    fields = {name: np.concatenate([known.fields[name], read.fields[name]]) for name in names}
    both = Columns(fields, *(np.concatenate(pair) for pair in zip(known[1:], read[1:])))
    return both.take(np.argsort(both.metrics, kind="stable"))


def learn(shapes: Shapes, layout: int, read: Mapping[int, Data], found: Found, streams: Ints) -> None:
    """Make shapes of the metrics that were read and all of whose points were taken."""
    kept = _KEPT[layout]
    order = np.argsort(found.metrics, kind="stable")
    numbers, firsts = np.unique(found.metrics[order], return_index=True)
    for number, first, last in zip(numbers.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(order)]):
        data = read.get(number)
        if data is None or not shapes.wants(data.owner):
            continue
        rows = order[first:last]
        start, end = data.whole
        places = np.stack([found.fields[name][rows] for name in kept.places])
        places = np.where(places > 0, places - start, 0)
        if streams[rows].min() < 0 or not _is_whole(layout, places):
            continue
        free = _free(layout, kept, places)
        values = np.stack([found.fields[name][rows] for name in kept.values]) if kept.values else places[:0]
        of = SUM if layout == SUMMARY else layout
        shapes.add(Shape(data.owner, of, found.data[start:end], free, places, values, streams[rows].astype(np.int32)))


def _is_whole(layout: int, places: Ints) -> bool:
    """Whether all numbers of a summary, which leaves out what is 0, have a place."""
    return layout not in (SUM, SUMMARY) or bool((places[2:] > 0).any(axis=0).all())


def _free(layout: int, kept: _Kept, places: Ints) -> Ints:
    starts = places[: len(kept.numbers)]
    if layout == SUMMARY:
        # A count of more than 56 bits is not known as one that may be negative: its last byte must stay as it is.
        wide, counts = starts[:3], starts[3]
        found = [_bytes(wide, 8), _bytes(counts, 7)]
    else:
        found = [_bytes(starts, 8)]
    for name in kept.spans:
        at = kept.places.index(name)
        found.append(within(places[at], places[at + 1] - places[at]))
    return np.concatenate(found)


def _bytes(starts: Ints, size: int) -> Ints:
    return (starts[starts > 0][:, None] + np.arange(size)).ravel()
