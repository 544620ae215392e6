"""Exponential histograms as distributions: the buckets of `penstock.model.exponential`, of any scale."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints, packed_varints, uint64_at
from penstock.decode.decode_context import DecodeContext
from penstock.decode.deltas import Floats
from penstock.decode.distributions import (
    MAX_BUCKETS,
    TOO_MUCH,
    HistogramTotals,
    histogram_rows,
    is_countable_histogram,
    no_histogram_rows,
    read_histogram_totals,
)
from penstock.decode.exponential_deltas import ExponentialDeltas, ExponentialTotals
from penstock.decode.otlp.scanned_points import ScannedOtlpPoints, otlp_stream_starts
from penstock.decode.outcome import PointRefusal
from penstock.decode.rows import DecodedRows
from penstock.decode.series import NO_STREAM

_SCALES = (-10, 20)  # OpenTelemetry's own bounds
_LARGEST = float(np.finfo(np.float64).max)
_WIDTHS = np.exp2(-np.array([*range(_SCALES[1] + 1), *range(_SCALES[0], 0)], np.float64))  # by scale, -1 the last
_BASES = np.exp2(np.minimum(_WIDTHS, 1023.0))  # what a double holds
_MIDDLES = 2.0 / (1.0 + np.exp2(-_WIDTHS))
_FAR = 1 << 40  # beyond every index: with it, sign × (index + far) sorts as the values do


@dataclass(frozen=True, slots=True)
class _FlatBuckets:
    """Every bucket that holds something: its point, sign, index and count."""

    point: Ints
    sign: Ints
    index: Ints
    count: Ints

    def take(self, rows: Ints) -> "_FlatBuckets":
        return _FlatBuckets(self.point[rows], self.sign[rows], self.index[rows], self.count[rows])

    def ordered(self) -> "_FlatBuckets":
        """By point and ascending value."""
        return self.take(np.lexsort((self.sign * (self.index + _FAR), self.point)))


class _Side(NamedTuple):
    """The buckets on one side of zero: of each point the first index and how many counts, and the counts of all."""

    offsets: Ints
    counts: Ints
    lengths: Ints
    is_malformed: NDArray[np.bool_]


def exponential_histograms(points: ScannedOtlpPoints, context: DecodeContext, deltas: ExponentialDeltas) -> DecodedRows:
    """Returns the rows of exponential histograms."""
    times, is_valid = points.times(context)
    data, columns = points.data, points.fields
    scales = _zigzag(columns["scale"])
    sides = {sign: _side(points, name) for sign, name in ((1, "positive"), (-1, "negative"))}
    is_whole = (scales >= _SCALES[0]) & (scales <= _SCALES[1])
    for side in sides.values():
        is_whole &= ~side.is_malformed & (side.lengths <= MAX_BUCKETS)
    context.outcomes.reject(
        points.requests[is_valid & ~is_whole],
        PointRefusal.MALFORMED,
        "an exponential histogram of unknown scale or form",
    )
    zeros = np.where(columns["zeros"] > 0, uint64_at(data, columns["zeros"]).view(np.int64), 0)
    flat = _flat(sides, zeros)
    is_sound = is_countable_histogram(flat.point, flat.count, len(times))
    context.outcomes.reject(points.requests[is_valid & is_whole & ~is_sound], PointRefusal.MALFORMED, TOO_MUCH)
    streams = points.resolve_streams(is_valid & is_whole & is_sound, context)
    taken = np.flatnonzero(streams != NO_STREAM)
    if not len(taken):
        return no_histogram_rows()
    flat = _numbered(flat, taken, len(times))
    columns = {name: column[taken] for name, column in columns.items()}
    totals = read_histogram_totals(data, columns, points.requests[taken], streams[taken], times[taken])
    scales = scales[taken]

    is_cumulative = context.table.is_cumulative[totals.streams]
    if is_cumulative.any():
        cumulative, plain = np.flatnonzero(is_cumulative), np.flatnonzero(~is_cumulative)
        starts = otlp_stream_starts(data, columns)
        cumulated = _points(_numbered(flat, cumulative, len(scales)), totals.take(cumulative), scales[cumulative])
        rows, increments, undo = deltas.increments(
            totals.streams[cumulative], totals.times[cumulative], starts[cumulative], cumulated, context.table.capacity
        )
        context.undos.append(partial(deltas.undo, undo))
        context.outcomes.take(totals.requests[cumulative])
        some = np.concatenate([plain, cumulative[rows]])
        sums = np.concatenate([totals.sums[plain], np.array([increment.sum for increment in increments])])
        scales = np.concatenate([scales[plain], np.array([i.scale for i in increments], np.int64)])
        knows_least = np.array([not math.isnan(i.least) for i in increments], bool)
        knows_greatest = np.array([not math.isnan(i.greatest) for i in increments], bool)
        flat = _with(_numbered(flat, plain, len(totals.times)), len(plain), increments)
        totals = replace(
            totals.take(some),
            sums=sums,
            is_least=np.concatenate([totals.is_least[plain], knows_least]),
            is_greatest=np.concatenate([totals.is_greatest[plain], knows_greatest]),
        )
    low, values, high = _values(flat, scales[flat.point])
    values = np.fmin(np.fmax(values, totals.least[flat.point]), totals.greatest[flat.point])  # where they are known
    return histogram_rows(totals, flat.point, values, low, high, flat.count, context)


def _side(points: ScannedOtlpPoints, name: str) -> _Side:
    columns = points.fields
    counts, lengths, is_malformed = packed_varints(
        points.data, columns[f"{name}_counts"], columns[f"{name}_counts_end"]
    )
    return _Side(_zigzag(columns[f"{name}_offset"]), counts, lengths, is_malformed)


def _flat(sides: dict[int, _Side], zeros: Ints) -> _FlatBuckets:
    points = np.arange(len(zeros))
    none = np.zeros(len(zeros), np.int64)
    columns = [(points, none, none, zeros)] if zeros.any() else []
    for sign, (offsets, counts, lengths, _) in sides.items():
        if len(counts):
            place = np.arange(len(counts)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            indices = np.repeat(offsets, lengths) + place
            columns.append((np.repeat(points, lengths), np.full(len(counts), sign), indices, counts))
    if not columns:
        return _FlatBuckets(none[:0], none[:0], none[:0], none[:0])
    flat = _FlatBuckets(*(np.concatenate(column) for column in zip(*columns)))
    flat = flat.take(np.flatnonzero(flat.count != 0))
    return flat if len(columns) == 1 else flat.ordered()


def _numbered(flat: _FlatBuckets, points: Ints, of: int) -> _FlatBuckets:
    """Returns the buckets of these points only, which are numbered anew."""
    if len(points) == of:
        return flat
    number = np.full(of, -1)
    number[points] = np.arange(len(points))
    some = flat.take(np.flatnonzero(number[flat.point] >= 0))
    return _FlatBuckets(number[some.point], some.sign, some.index, some.count)


def _points(flat: _FlatBuckets, totals: HistogramTotals, scales: Ints) -> list[ExponentialTotals]:
    counts: list[dict[tuple[int, int], int]] = [{} for _ in scales]
    for point, sign, index, count in zip(
        flat.point.tolist(), flat.sign.tolist(), flat.index.tolist(), flat.count.tolist()
    ):
        counts[point][sign, index] = count
    stated = (totals.sums.tolist(), counts, totals.least.tolist(), totals.greatest.tolist())
    return [ExponentialTotals(*point) for point in zip(scales.tolist(), *stated)]


def _with(flat: _FlatBuckets, first: int, increments: list[ExponentialTotals]) -> _FlatBuckets:
    """Appends the buckets of these increments, numbered from `first` on."""
    more = [
        (point, sign, index, count)
        for point, increment in enumerate(increments, first)
        for (sign, index), count in increment.counts.items()
    ]
    columns = np.array(more, np.int64).reshape(-1, 4)
    both = [flat.point, flat.sign, flat.index, flat.count]
    return _FlatBuckets(*(np.concatenate([column, columns[:, place]]) for place, column in enumerate(both))).ordered()


def _values(flat: _FlatBuckets, scales: Ints) -> tuple[Floats, Floats, Floats]:
    """Returns the least value of each bucket, the one that is relatively as far from both ends, and the greatest."""
    with np.errstate(over="ignore"):
        lower = np.exp2(flat.index * _WIDTHS[scales])
        middle, upper = lower * _MIDDLES[scales], lower * _BASES[scales]
    sign = flat.sign.astype(np.float64)
    near, middle, far = (sign * np.minimum(size, _LARGEST) for size in (lower, middle, upper))
    return np.minimum(near, far), middle, np.maximum(near, far)


def _zigzag(values: Ints) -> Ints:
    decoded: Ints = (values >> 1) ^ -(values & 1)
    return decoded
