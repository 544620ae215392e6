"""Buckets with explicit bounds as distributions: a row for each bucket that holds something.

A bucket of (low, high] becomes its count at its middle, with low and high as its min and max: how exact the sender is
stays known. What it adds to the sum is corrected so that the rows of a point add up to the sum that it states, and its
least and greatest row carry its own min and max where they are known.
"""

from collections.abc import Sequence

import numpy as np

from penstock.decode.column_scan import Ints
from penstock.decode.decode_context import DecodeContext
from penstock.decode.deltas import Floats
from penstock.decode.distributions import HistogramTotals, histogram_rows
from penstock.decode.rows import DecodedRows


class BucketEdges:
    """Both ends of the buckets of histograms. Most histograms have the same bounds, which are read once.

    `index` is the number of each point's bounds; their ends start at `offsets`, the outermost are infinite. `shapes`
    are hashes of the bounds.
    """

    def __init__(self, lists: Sequence[Floats], index: Ints) -> None:
        self.index = index
        lengths = np.array([len(bounds) + 1 for bounds in lists], np.int64)
        self.offsets = np.cumsum(lengths) - lengths
        self.low = np.concatenate([np.append(-np.inf, bounds) for bounds in lists])
        self.high = np.concatenate([np.append(bounds, np.inf) for bounds in lists])
        self.shapes = histogram_bucket_shapes(self.high, self.offsets, lengths)


def histogram_bucket_shapes(high: Floats, offsets: Ints, lengths: Ints) -> Ints:
    """Returns a hash of the upper ends of each point's buckets."""
    place = np.arange(len(high)) - np.repeat(offsets, lengths) + 1
    mixed = high.view(np.uint64) * (2 * place.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return np.add.reduceat(mixed ^ (mixed >> np.uint64(29)), offsets).view(np.int64)


def bucket_rows(
    totals: HistogramTotals,
    lengths: Ints,
    counts: Ints,
    edges: BucketEdges,
    edge_index: Ints,
    context: DecodeContext,
) -> DecodedRows:
    """Returns a row for each bucket that holds something."""
    held = np.flatnonzero(counts > 0)
    point = np.repeat(np.arange(len(lengths)), lengths)[held]
    count = counts[held]
    # The bucket's place among those of its point, counted from where its bounds have their ends.
    at = held + (edges.offsets[edge_index] - (np.cumsum(lengths) - lengths))[point]
    low, high = edges.low[at], edges.high[at]
    low, high = _finite(low, high, totals.least[point], totals.greatest[point])
    values = np.fmin(np.fmax(low / 2 + high / 2, totals.least[point]), totals.greatest[point])  # where they are known
    total = np.bincount(point, count, len(lengths))[point]
    # Where one bucket holds everything, its mean is known, and better than its middle.
    alone = np.flatnonzero(count == total)
    mean = totals.sums[point[alone]] / total[alone]
    stands = ~np.isnan(mean)
    alone = alone[stands]
    values[alone] = np.clip(mean[stands], edges.low[at[alone]], edges.high[at[alone]])
    return histogram_rows(totals, point, values, low, high, count, context)


def _finite(low: Floats, high: Floats, least: Floats, greatest: Floats) -> tuple[Floats, Floats]:
    """Returns both ends of each bucket. An open one ends at the point's min or max, or at its finite end."""
    is_open = np.flatnonzero(np.isinf(low) | np.isinf(high))
    if len(is_open):
        low[is_open], high[is_open] = _ends_of_open(low[is_open], high[is_open], least[is_open], greatest[is_open])
    return low, high


def _ends_of_open(low: Floats, high: Floats, least: Floats, greatest: Floats) -> tuple[Floats, Floats]:
    open_low, open_high = np.isinf(low), np.isinf(high)
    from_zero = np.where(high > 0, 0.0, high)  # most measurements are not negative
    start = np.where(open_low, np.where(np.isnan(least), from_zero, least), low)
    end = np.where(open_high, np.where(np.isnan(greatest), start, np.maximum(greatest, start)), high)
    start = np.where(open_low & open_high & np.isnan(least), np.where(np.isnan(greatest), 0.0, end), start)
    end = np.where(np.isinf(end), np.where(np.isinf(start), 0.0, start), end)
    return np.minimum(start, end), end
