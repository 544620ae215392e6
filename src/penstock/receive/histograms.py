"""Histograms as distributions: a row for each bucket that holds something.

A bucket of (low, high] becomes its count at its middle. What it adds to the sum is corrected so that the rows of a
point add up to the sum that it states, and its least and greatest row carry its own min and max where they are known.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.receive.deltas import Floats
from penstock.receive.distributions import MOST_BUCKETS, Stated, nothing, spread, stated_by, streams_of
from penstock.receive.group import Group, Rows
from penstock.receive.histogram_deltas import HistogramDeltas
from penstock.receive.numbers import times_of
from penstock.receive.otlp import Found
from penstock.receive.sink import Refusal
from penstock.receive.wire import Ints, float64_at, uint64_at, within


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
    streams = streams_of(found, fine, group)
    taken = np.flatnonzero(streams >= 0)
    if not len(taken):
        return nothing()
    columns = {name: column[taken] for name, column in columns.items()}
    stated = stated_by(data, columns, found.requests[taken], streams[taken], times[taken])
    # A histogram of no buckets has one, from end to end.
    lengths, bounds = np.maximum(buckets[taken], 1), bounds[taken]
    where = np.where(buckets[taken] > 0, columns["counts"], columns["count"])
    counts = uint64_at(data, _eights(where, lengths)).view(np.int64)
    counts = np.where(np.repeat(where > 0, lengths), counts, 0)
    edges = float64_at(data, _eights(columns["bounds"], bounds))
    low, high = _edges(edges, bounds, lengths)
    starts = np.where(columns["start"] > 0, uint64_at(data, columns["start"]).view(np.int64), 0)

    is_cumulative = group.table.is_cumulative[stated.streams]
    if is_cumulative.any():
        offsets = np.cumsum(lengths) - lengths
        plain, changing = np.flatnonzero(~is_cumulative), np.flatnonzero(is_cumulative)
        changed = deltas.increments(
            stated.streams[changing],
            stated.times[changing],
            starts[changing],
            np.nan_to_num(stated.sums[changing]),
            lengths[changing],
            counts[within(offsets[changing], lengths[changing])],
            _shapes(high, offsets, lengths)[changing],
            group.table.capacity,
        )
        group.undos.append(partial(deltas.undo, changed.undo))
        kept = np.concatenate([plain, changing[changed.rows]])
        counts = np.concatenate([counts[within(offsets[plain], lengths[plain])], changed.counts])
        edge_rows = within(offsets[kept], lengths[kept])
        low, high, lengths = low[edge_rows], high[edge_rows], lengths[kept]
        summed = ~np.isnan(stated.sums[changing[changed.rows]])
        sums = np.concatenate([stated.sums[plain], np.where(summed, changed.sums, np.nan)])
        stated = stated.take(kept)
        stated = Stated(stated.requests, stated.streams, stated.times, sums, stated.least, stated.greatest)
        is_cumulative = is_cumulative[kept]
    return _rows(stated, is_cumulative, lengths, counts, low, high)


def _eights(starts: Ints, lengths: Ints) -> Ints:
    """The positions of all numbers of packed arrays of 8 bytes each."""
    ends = np.cumsum(lengths)
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    positions: Ints = np.repeat(starts, lengths) + 8 * place
    return positions


def _edges(edges: Floats, bounds: Ints, lengths: Ints) -> tuple[Floats, Floats]:
    """Both ends of every bucket; the outermost are infinite."""
    total = int(lengths.sum())
    low, high = np.full(total, -np.inf), np.full(total, np.inf)
    offsets = np.cumsum(lengths) - lengths
    high[within(offsets, bounds)] = edges
    low[within(offsets + 1, bounds)] = edges
    return low, high


def _shapes(high: Floats, offsets: Ints, lengths: Ints) -> Ints:
    """A number that is the same for points with the same bounds, and almost surely another for others."""
    place = np.arange(len(high)) - np.repeat(offsets, lengths) + 1
    mixed = high.view(np.uint64) * (2 * place.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return np.add.reduceat(mixed ^ (mixed >> np.uint64(29)), offsets).view(np.int64)


def _rows(
    stated: Stated, is_cumulative: NDArray[np.bool_], lengths: Ints, counts: Ints, low: Floats, high: Floats
) -> Rows:
    """A row for each bucket that holds something."""
    held = np.flatnonzero(counts > 0)
    point = np.repeat(np.arange(len(lengths)), lengths)[held]
    count = counts[held]
    least, greatest, sums = stated.least[point], stated.greatest[point], stated.sums[point]
    values = middles(low[held], high[held], least, greatest)
    total = np.bincount(point, count, len(lengths))[point]
    mean = sums / total
    # One bucket alone: its mean is known, and better than its middle.
    alone = (count == total) & ~np.isnan(mean)
    values = np.where(alone, np.clip(mean, low[held], high[held]), values)
    return spread(stated, is_cumulative, point, values, count)


def middles(low: Floats, high: Floats, least: Floats, greatest: Floats) -> Floats:
    """What stands for the values of a bucket; an open one ends at the point's min or max, else at its finite end."""
    open_low, open_high = np.isinf(low), np.isinf(high)
    from_zero = np.where(high > 0, 0.0, high)  # most things that are measured are not negative
    start = np.where(open_low, np.where(np.isnan(least), from_zero, least), low)
    end = np.where(open_high, np.where(np.isnan(greatest), start, np.maximum(greatest, start)), high)
    start = np.where(open_low & open_high & np.isnan(least), np.where(np.isnan(greatest), 0.0, end), start)
    end = np.where(np.isinf(end), np.where(np.isinf(start), 0.0, start), end)
    start = np.minimum(start, end)
    values: Floats = start / 2 + end / 2
    values = np.where(np.isnan(least), values, np.maximum(values, least))
    return np.where(np.isnan(greatest), values, np.minimum(values, greatest))
