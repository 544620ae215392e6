"""Exponential histograms as distributions: the buckets of `penstock.model.exponential`, of any scale."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.decode.column_scan import Ints, packed_varints, uint64_at
from penstock.decode.deltas import Floats
from penstock.decode.distributions import MOST_BUCKETS, TOO_MUCH, Stated, countable, nothing, spread, stated_by
from penstock.decode.exponential_deltas import Exponential, ExponentialDeltas
from penstock.decode.group import Group, Rows
from penstock.decode.numbers import times_of
from penstock.decode.outcome import Refusal
from penstock.decode.scanned_points import Found, streams_of

_SCALES = (-10, 20)  # OpenTelemetry's own bounds
_MOST = float(np.finfo(np.float64).max)
_WIDTHS = np.exp2(-np.array([*range(_SCALES[1] + 1), *range(_SCALES[0], 0)], np.float64))  # by scale, -1 the last
_MIDDLES = 2.0 / (1.0 + np.exp2(-_WIDTHS))
_FAR = 1 << 40  # beyond every index: with it, sign × (index + far) sorts as the values do


@dataclass(frozen=True, slots=True)
class _Flat:
    """Every bucket that holds something: its point, sign, index and count."""

    point: Ints
    sign: Ints
    index: Ints
    count: Ints

    def take(self, rows: Ints) -> "_Flat":
        return _Flat(self.point[rows], self.sign[rows], self.index[rows], self.count[rows])

    def ordered(self) -> "_Flat":
        """By point and ascending value."""
        return self.take(np.lexsort((self.sign * (self.index + _FAR), self.point)))


def exponential_histograms(found: Found, group: Group, deltas: ExponentialDeltas) -> Rows:
    """The rows of exponential histograms."""
    times, fine = times_of(found, group)
    data, columns = found.data, found.fields
    scales = _zigzag(columns["scale"])
    sides = {sign: _side(found, name) for sign, name in ((1, "positive"), (-1, "negative"))}
    whole = (scales >= _SCALES[0]) & (scales <= _SCALES[1])
    for _, _, lengths in sides.values():
        whole &= (lengths >= 0) & (lengths <= MOST_BUCKETS)
    group.account.reject(
        found.requests[fine & ~whole], Refusal.MALFORMED, "an exponential histogram of unknown scale or form"
    )
    zeros = np.where(columns["zeros"] > 0, uint64_at(data, columns["zeros"]).view(np.int64), 0)
    flat = _flat(sides, zeros)
    sound = countable(flat.point, flat.count, len(times))
    group.account.reject(found.requests[fine & whole & ~sound], Refusal.MALFORMED, TOO_MUCH)
    streams = streams_of(found, fine & whole & sound, group)
    taken = np.flatnonzero(streams >= 0)
    if not len(taken):
        return nothing()
    flat = _numbered(flat, taken, len(times))
    columns = {name: column[taken] for name, column in columns.items()}
    stated = stated_by(data, columns, found.requests[taken], streams[taken], times[taken])
    scales = scales[taken]

    is_cumulative = group.table.is_cumulative[stated.streams]
    if is_cumulative.any():
        changing, plain = np.flatnonzero(is_cumulative), np.flatnonzero(~is_cumulative)
        starts = np.where(columns["start"] > 0, uint64_at(data, columns["start"]).view(np.int64), 0)
        points = _points(_numbered(flat, changing, len(scales)), stated.sums[changing], scales[changing])
        rows, increments, undo = deltas.increments(
            stated.streams[changing], stated.times[changing], starts[changing], points, group.table.capacity
        )
        group.undos.append(partial(deltas.undo, undo))
        group.account.keep(stated.requests[changing])
        some = np.concatenate([plain, changing[rows]])
        sums = np.concatenate([stated.sums[plain], np.array([increment.sum for increment in increments])])
        scales = np.concatenate([scales[plain], np.array([i.scale for i in increments], np.int64)])
        stated, is_cumulative = stated.take(some), is_cumulative[some]
        stated = Stated(stated.requests, stated.streams, stated.times, sums, stated.least, stated.greatest)
        flat = _with(_numbered(flat, plain, len(is_cumulative) + len(changing)), len(plain), increments)
    values = _middles(flat, scales[flat.point], stated.least[flat.point], stated.greatest[flat.point])
    return spread(stated, is_cumulative, flat.point, values, flat.count, group)


def _side(found: Found, name: str) -> tuple[Ints, Ints, Ints]:
    """The first index, all counts and how many counts each point has on one side of zero."""
    columns = found.fields
    counts, lengths = packed_varints(found.data, columns[f"{name}_counts"], columns[f"{name}_counts_end"])
    return _zigzag(columns[f"{name}_offset"]), counts, lengths


def _flat(sides: dict[int, tuple[Ints, Ints, Ints]], zeros: Ints) -> _Flat:
    points = np.arange(len(zeros))
    none = np.zeros(len(zeros), np.int64)
    columns = [(points, none, none, zeros)] if zeros.any() else []
    for sign, (offsets, counts, lengths) in sides.items():
        if len(counts):
            lengths = np.maximum(lengths, 0)
            place = np.arange(len(counts)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            indices = np.repeat(offsets, lengths) + place
            columns.append((np.repeat(points, lengths), np.full(len(counts), sign), indices, counts))
    if not columns:
        return _Flat(none[:0], none[:0], none[:0], none[:0])
    flat = _Flat(*(np.concatenate(column) for column in zip(*columns)))
    flat = flat.take(np.flatnonzero(flat.count != 0))
    return flat if len(columns) == 1 else flat.ordered()


def _numbered(flat: _Flat, points: Ints, of: int) -> _Flat:
    """The buckets of these points only, which are numbered anew."""
    if len(points) == of:
        return flat
    number = np.full(of, -1)
    number[points] = np.arange(len(points))
    some = flat.take(np.flatnonzero(number[flat.point] >= 0))
    return _Flat(number[some.point], some.sign, some.index, some.count)


def _points(flat: _Flat, sums: Floats, scales: Ints) -> list[Exponential]:
    counts: list[dict[tuple[int, int], int]] = [{} for _ in scales]
    for point, sign, index, count in zip(
        flat.point.tolist(), flat.sign.tolist(), flat.index.tolist(), flat.count.tolist()
    ):
        counts[point][sign, index] = count
    return [Exponential(scale, sum_, of) for scale, sum_, of in zip(scales.tolist(), sums.tolist(), counts)]


def _with(flat: _Flat, first: int, increments: list[Exponential]) -> _Flat:
    """The buckets of these increments behind those of the others, numbered from `first` on."""
    more = [
        (point, sign, index, count)
        for point, increment in enumerate(increments, first)
        for (sign, index), count in increment.counts.items()
    ]
    columns = np.array(more, np.int64).reshape(-1, 4)
    both = [flat.point, flat.sign, flat.index, flat.count]
    return _Flat(*(np.concatenate([column, columns[:, place]]) for place, column in enumerate(both))).ordered()


def _middles(flat: _Flat, scales: Ints, least: Floats, greatest: Floats) -> Floats:
    """What stands for the values of each bucket: equally far, relatively, from both of its ends."""
    with np.errstate(over="ignore"):
        middle = np.exp2(flat.index * _WIDTHS[scales]) * _MIDDLES[scales]
    values: Floats = flat.sign.astype(np.float64) * np.minimum(middle, _MOST)
    found: Floats = np.fmin(np.fmax(values, least), greatest)  # where they are known
    return found


def _zigzag(values: Ints) -> Ints:
    decoded: Ints = (values >> 1) ^ -(values & 1)
    return decoded
