"""Histograms as distributions: a row for each bucket that holds something.

A bucket of (low, high] becomes its count at its middle. What it adds to the sum is corrected so that the rows of a
point add up to the sum that it states, and its least and greatest row carry its own min and max where they are known.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, texts, uint64_at, within
from penstock.decode.decode_context import DecodeContext
from penstock.decode.deltas import Floats
from penstock.decode.histogram_deltas import HistogramDeltas
from penstock.decode.otlp.distributions import (
    MAX_BUCKETS,
    TOO_MUCH,
    HistogramTotals,
    is_countable,
    no_distributions,
    read_totals,
    spread,
)
from penstock.decode.otlp.scanned_points import ScannedPoints, starts_at
from penstock.decode.outcome import Refusal
from penstock.decode.rows import Rows
from penstock.decode.series import NO_STREAM


def explicit_histograms(points: ScannedPoints, context: DecodeContext, deltas: HistogramDeltas) -> Rows:
    """Returns the rows of histograms with explicit bounds."""
    times, is_valid = points.times(context)
    columns, data = points.fields, points.data
    buckets, rest = np.divmod(columns["counts_end"] - columns["counts"], 8)
    bounds, rest_of_bounds = np.divmod(columns["bounds_end"] - columns["bounds"], 8)
    is_whole = (rest == 0) & (rest_of_bounds == 0) & ((buckets == bounds + 1) | (buckets + bounds == 0))
    is_whole &= buckets <= MAX_BUCKETS
    context.outcomes.reject(
        points.requests[is_valid & ~is_whole],
        Refusal.MALFORMED,
        "a histogram whose counts do not match its bounds, or are too many",
    )
    is_valid &= is_whole
    # A histogram without buckets has one that is open at both ends.
    lengths = np.where(is_valid, np.maximum(buckets, 1), 0)
    where = np.where(buckets > 0, columns["counts"], columns["count"])
    counts = uint64_at(data, _eights(where, lengths)).view(np.int64)
    if not where.all():
        counts = np.where(np.repeat(where > 0, lengths), counts, 0)
    is_sound = is_countable(np.repeat(np.arange(len(lengths)), lengths), counts, len(lengths))
    context.outcomes.reject(points.requests[~is_sound], Refusal.MALFORMED, TOO_MUCH)
    streams = points.resolve_streams(is_valid & is_sound, context)
    taken = np.flatnonzero(streams != NO_STREAM)
    if not len(taken):
        return no_distributions()
    if len(taken) < len(streams):
        counts, lengths = _of_points(counts, lengths, taken), lengths[taken]
        columns = {name: column[taken] for name, column in columns.items()}
    totals = read_totals(data, columns, points.requests[taken], streams[taken], times[taken])
    edges = BucketEdges(data, columns["bounds"], columns["bounds_end"])

    is_cumulative = context.table.is_cumulative[totals.streams]
    if is_cumulative.any():
        starts = starts_at(data, columns)
        plain, cumulative = np.flatnonzero(~is_cumulative), np.flatnonzero(is_cumulative)
        changed = deltas.increments(
            totals.streams[cumulative],
            totals.times[cumulative],
            starts[cumulative],
            np.nan_to_num(totals.sums[cumulative]),
            lengths[cumulative],
            _of_points(counts, lengths, cumulative),
            edges.shapes[edges.index[cumulative]],
            context.table.capacity,
        )
        context.undos.append(partial(deltas.undo, changed.undo))
        context.outcomes.take(totals.requests[cumulative])
        kept = np.concatenate([plain, cumulative[changed.rows]])
        counts = np.concatenate([_of_points(counts, lengths, plain), changed.counts])
        summed = ~np.isnan(totals.sums[cumulative[changed.rows]])
        sums = np.concatenate([totals.sums[plain], np.where(summed, changed.sums, np.nan)])
        totals = replace(totals.take(kept), sums=sums)
        is_cumulative, lengths, edge_index = is_cumulative[kept], lengths[kept], edges.index[kept]
    else:
        edge_index = edges.index
    return _rows(totals, is_cumulative, lengths, counts, edges, edge_index, context)


def _of_points(counts: Ints, lengths: Ints, points: Ints) -> Ints:
    """Returns the buckets of these points."""
    if len(points) == len(lengths):
        return counts
    offsets = np.cumsum(lengths) - lengths
    return counts[within(offsets[points], lengths[points])]


def _eights(starts: Ints, lengths: Ints) -> Ints:
    """Returns the positions of all numbers of packed arrays of 8 bytes each."""
    ends = np.cumsum(lengths)
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    positions: Ints = np.repeat(starts, lengths) + 8 * place
    return positions


class BucketEdges:
    """Both ends of the buckets of histograms. Most histograms have the same bounds, which are read once.

    `index` is the number of each point's bounds; their ends start at `offsets`, the outermost are infinite. `shapes`
    are hashes of the bounds.
    """

    def __init__(self, data: Bytes, starts: Ints, ends: Ints) -> None:
        distinct = texts(data, starts, ends).dictionary_encode()
        self.index = distinct.indices.to_numpy(zero_copy_only=False)
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
    totals: HistogramTotals,
    is_cumulative: NDArray[np.bool_],
    lengths: Ints,
    counts: Ints,
    edges: BucketEdges,
    edge_index: Ints,
    context: DecodeContext,
) -> Rows:
    """Returns a row for each bucket that holds something."""
    held = np.flatnonzero(counts > 0)
    point = np.repeat(np.arange(len(lengths)), lengths)[held]
    count = counts[held]
    # The bucket's place among those of its point, counted from where its bounds have their ends.
    at = held + (edges.offsets[edge_index] - (np.cumsum(lengths) - lengths))[point]
    low, high = edges.low[at], edges.high[at]
    values = middles(low, high, totals.least[point], totals.greatest[point])
    total = np.bincount(point, count, len(lengths))[point]
    # Where one bucket holds everything, its mean is known, and better than its middle.
    alone = np.flatnonzero(count == total)
    mean = totals.sums[point[alone]] / total[alone]
    stands = ~np.isnan(mean)
    alone = alone[stands]
    values[alone] = np.clip(mean[stands], low[alone], high[alone])
    return spread(totals, is_cumulative, point, values, count, context)


def middles(low: Floats, high: Floats, least: Floats, greatest: Floats) -> Floats:
    """Returns the value that stands for a bucket. An open one ends at the point's min or max, or at its finite end."""
    with np.errstate(invalid="ignore"):  # open ones are corrected below
        values: Floats = low / 2 + high / 2
    is_open = np.flatnonzero(np.isinf(low) | np.isinf(high))
    values[is_open] = _open_middles(low[is_open], high[is_open], least[is_open], greatest[is_open])
    return np.fmin(np.fmax(values, least), greatest)  # where they are known


def _open_middles(low: Floats, high: Floats, least: Floats, greatest: Floats) -> Floats:
    open_low, open_high = np.isinf(low), np.isinf(high)
    from_zero = np.where(high > 0, 0.0, high)  # most measurements are not negative
    start = np.where(open_low, np.where(np.isnan(least), from_zero, least), low)
    end = np.where(open_high, np.where(np.isnan(greatest), start, np.maximum(greatest, start)), high)
    start = np.where(open_low & open_high & np.isnan(least), np.where(np.isnan(greatest), 0.0, end), start)
    end = np.where(np.isinf(end), np.where(np.isinf(start), 0.0, start), end)
    start = np.minimum(start, end)
    found: Floats = start / 2 + end / 2
    return found
