"""Histograms as distributions: a row for each bucket that holds something.

A bucket of (low, high] becomes its count at its middle. What it adds to the sum is corrected so that the rows of a
point add up to the sum that it states, and its least and greatest row carry its own min and max where they are known.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, texts, uint64_at, within
from penstock.decode.deltas import Floats
from penstock.decode.distributions import MOST_BUCKETS, TOO_MUCH, Stated, countable, nothing, spread, stated_by
from penstock.decode.group import Group, Rows
from penstock.decode.histogram_deltas import HistogramDeltas
from penstock.decode.numbers import times_of
from penstock.decode.outcome import Refusal
from penstock.decode.scanned_points import Found, streams_of


def explicit_histograms(found: Found, group: Group, deltas: HistogramDeltas) -> Rows:
    """The rows of histograms with explicit bounds."""
    times, fine = times_of(found, group)
    columns, data = found.fields, found.data
    buckets, rest = np.divmod(columns["counts_end"] - columns["counts"], 8)
    bounds, rest_of_bounds = np.divmod(columns["bounds_end"] - columns["bounds"], 8)
    whole = (rest == 0) & (rest_of_bounds == 0) & ((buckets == bounds + 1) | (buckets + bounds == 0))
    whole &= buckets <= MOST_BUCKETS
    group.account.reject(
        found.requests[fine & ~whole],
        Refusal.MALFORMED,
        "a histogram whose counts do not match its bounds, or are too many",
    )
    fine &= whole
    # A histogram of no buckets has one, from end to end.
    lengths = np.where(fine, np.maximum(buckets, 1), 0)
    where = np.where(buckets > 0, columns["counts"], columns["count"])
    counts = uint64_at(data, _eights(where, lengths)).view(np.int64)
    if not where.all():
        counts = np.where(np.repeat(where > 0, lengths), counts, 0)
    sound = countable(np.repeat(np.arange(len(lengths)), lengths), counts, len(lengths))
    group.account.reject(found.requests[~sound], Refusal.MALFORMED, TOO_MUCH)
    streams = streams_of(found, fine & sound, group)
    taken = np.flatnonzero(streams >= 0)
    if not len(taken):
        return nothing()
    if len(taken) < len(streams):
        counts, lengths = _of_points(counts, lengths, taken), lengths[taken]
        columns = {name: column[taken] for name, column in columns.items()}
    stated = stated_by(data, columns, found.requests[taken], streams[taken], times[taken])
    edges = Edges(data, columns["bounds"], columns["bounds_end"])

    is_cumulative = group.table.is_cumulative[stated.streams]
    if is_cumulative.any():
        starts = np.where(columns["start"] > 0, uint64_at(data, columns["start"]).view(np.int64), 0)
        plain, changing = np.flatnonzero(~is_cumulative), np.flatnonzero(is_cumulative)
        changed = deltas.increments(
            stated.streams[changing],
            stated.times[changing],
            starts[changing],
            np.nan_to_num(stated.sums[changing]),
            lengths[changing],
            _of_points(counts, lengths, changing),
            edges.shapes[edges.which[changing]],
            group.table.capacity,
        )
        group.undos.append(partial(deltas.undo, changed.undo))
        group.account.keep(stated.requests[changing])
        kept = np.concatenate([plain, changing[changed.rows]])
        counts = np.concatenate([_of_points(counts, lengths, plain), changed.counts])
        summed = ~np.isnan(stated.sums[changing[changed.rows]])
        sums = np.concatenate([stated.sums[plain], np.where(summed, changed.sums, np.nan)])
        stated = stated.take(kept)
        stated = Stated(stated.requests, stated.streams, stated.times, sums, stated.least, stated.greatest)
        is_cumulative, lengths, which = is_cumulative[kept], lengths[kept], edges.which[kept]
    else:
        which = edges.which
    return _rows(stated, is_cumulative, lengths, counts, edges, which, group)


def _of_points(counts: Ints, lengths: Ints, points: Ints) -> Ints:
    """The buckets of these points, which are numbered in order."""
    if len(points) == len(lengths):
        return counts
    offsets = np.cumsum(lengths) - lengths
    return counts[within(offsets[points], lengths[points])]


def _eights(starts: Ints, lengths: Ints) -> Ints:
    """The positions of all numbers of packed arrays of 8 bytes each."""
    ends = np.cumsum(lengths)
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    positions: Ints = np.repeat(starts, lengths) + 8 * place
    return positions


class Edges:
    """Both ends of the buckets of histograms. Most of them have the same bounds: those are read once.

    `which` is the number of each point's bounds; their ends start at `offsets`, the outermost are infinite. `shapes`
    are numbers that are the same for the same bounds, and almost surely others for others.
    """

    def __init__(self, data: Bytes, starts: Ints, ends: Ints) -> None:
        distinct = texts(data, starts, ends).dictionary_encode()
        self.which = distinct.indices.to_numpy(zero_copy_only=False)
        lists = [np.frombuffer(bounds, "<f8") for bounds in distinct.dictionary.to_pylist()]
        lengths = np.array([len(bounds) + 1 for bounds in lists], np.int64)
        self.offsets = np.cumsum(lengths) - lengths
        self.low = np.concatenate([np.append(-np.inf, bounds) for bounds in lists])
        self.high = np.concatenate([np.append(bounds, np.inf) for bounds in lists])
        self.shapes = _shapes(self.high, self.offsets, lengths)


def _shapes(high: Floats, offsets: Ints, lengths: Ints) -> Ints:
    place = np.arange(len(high)) - np.repeat(offsets, lengths) + 1
    mixed = high.view(np.uint64) * (2 * place.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return np.add.reduceat(mixed ^ (mixed >> np.uint64(29)), offsets).view(np.int64)


def _rows(
    stated: Stated,
    is_cumulative: NDArray[np.bool_],
    lengths: Ints,
    counts: Ints,
    edges: Edges,
    which: Ints,
    group: Group,
) -> Rows:
    """A row for each bucket that holds something."""
    held = np.flatnonzero(counts > 0)
    point = np.repeat(np.arange(len(lengths)), lengths)[held]
    count = counts[held]
    # The bucket's place among those of its point, counted from where its bounds have their ends.
    at = held + (edges.offsets[which] - (np.cumsum(lengths) - lengths))[point]
    low, high = edges.low[at], edges.high[at]
    values = middles(low, high, stated.least[point], stated.greatest[point])
    total = np.bincount(point, count, len(lengths))[point]
    # One bucket alone: its mean is known, and better than its middle.
    alone = np.flatnonzero(count == total)
    mean = stated.sums[point[alone]] / total[alone]
    stands = ~np.isnan(mean)
    alone = alone[stands]
    values[alone] = np.clip(mean[stands], low[alone], high[alone])
    return spread(stated, is_cumulative, point, values, count, group)


def middles(low: Floats, high: Floats, least: Floats, greatest: Floats) -> Floats:
    """What stands for the values of a bucket; an open one ends at the point's min or max, else at its finite end."""
    with np.errstate(invalid="ignore"):  # open ones, which are put right below
        values: Floats = low / 2 + high / 2
    is_open = np.flatnonzero(np.isinf(low) | np.isinf(high))
    values[is_open] = _open_middles(low[is_open], high[is_open], least[is_open], greatest[is_open])
    return np.fmin(np.fmax(values, least), greatest)  # where they are known


def _open_middles(low: Floats, high: Floats, least: Floats, greatest: Floats) -> Floats:
    open_low, open_high = np.isinf(low), np.isinf(high)
    from_zero = np.where(high > 0, 0.0, high)  # most things that are measured are not negative
    start = np.where(open_low, np.where(np.isnan(least), from_zero, least), low)
    end = np.where(open_high, np.where(np.isnan(greatest), start, np.maximum(greatest, start)), high)
    start = np.where(open_low & open_high & np.isnan(least), np.where(np.isnan(greatest), 0.0, end), start)
    end = np.where(np.isinf(end), np.where(np.isinf(start), 0.0, start), end)
    start = np.minimum(start, end)
    found: Floats = start / 2 + end / 2
    return found
