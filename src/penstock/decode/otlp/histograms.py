"""Histograms with explicit bounds, as `penstock.decode.bucket_rows` has them."""

from dataclasses import replace
from functools import partial

import numpy as np

from penstock.decode.bucket_rows import BucketEdges, bucket_rows
from penstock.decode.column_scan import Ints, decode_texts, uint64_at, within
from penstock.decode.decode_context import DecodeContext
from penstock.decode.distributions import (
    MAX_BUCKETS,
    TOO_MUCH,
    is_countable_histogram,
    no_histogram_rows,
    read_histogram_totals,
)
from penstock.decode.histogram_deltas import HistogramDeltas
from penstock.decode.otlp.scanned_points import ScannedOtlpPoints, otlp_stream_starts
from penstock.decode.outcome import PointRefusal
from penstock.decode.rows import DecodedRows
from penstock.decode.series import NO_STREAM


def explicit_histograms(points: ScannedOtlpPoints, context: DecodeContext, deltas: HistogramDeltas) -> DecodedRows:
    """Returns the rows of histograms with explicit bounds."""
    times, is_valid = points.times(context)
    columns, data = points.fields, points.data
    buckets, rest = np.divmod(columns["counts_end"] - columns["counts"], 8)
    bounds, rest_of_bounds = np.divmod(columns["bounds_end"] - columns["bounds"], 8)
    is_whole = (rest == 0) & (rest_of_bounds == 0) & ((buckets == bounds + 1) | (buckets + bounds == 0))
    is_whole &= buckets <= MAX_BUCKETS
    context.outcomes.reject(
        points.requests[is_valid & ~is_whole],
        PointRefusal.MALFORMED,
        "a histogram whose counts do not match its bounds, or are too many",
    )
    is_valid &= is_whole
    # A histogram without buckets has one that is open at both ends.
    lengths = np.where(is_valid, np.maximum(buckets, 1), 0)
    where = np.where(buckets > 0, columns["counts"], columns["count"])
    counts = uint64_at(data, _eights(where, lengths)).view(np.int64)
    if not where.all():
        counts = np.where(np.repeat(where > 0, lengths), counts, 0)
    is_sound = is_countable_histogram(np.repeat(np.arange(len(lengths)), lengths), counts, len(lengths))
    context.outcomes.reject(points.requests[~is_sound], PointRefusal.MALFORMED, TOO_MUCH)
    streams = points.resolve_streams(is_valid & is_sound, context)
    taken = np.flatnonzero(streams != NO_STREAM)
    if not len(taken):
        return no_histogram_rows()
    if len(taken) < len(streams):
        counts, lengths = _of_points(counts, lengths, taken), lengths[taken]
        columns = {name: column[taken] for name, column in columns.items()}
    totals = read_histogram_totals(data, columns, points.requests[taken], streams[taken], times[taken])
    distinct = decode_texts(data, columns["bounds"], columns["bounds_end"]).dictionary_encode()
    lists = [np.frombuffer(bounds, "<f8") for bounds in distinct.dictionary.to_pylist()]
    edges = BucketEdges(lists, distinct.indices.to_numpy(zero_copy_only=False))

    is_cumulative = context.table.is_cumulative[totals.streams]
    if is_cumulative.any():
        starts = otlp_stream_starts(data, columns)
        plain, cumulative = np.flatnonzero(~is_cumulative), np.flatnonzero(is_cumulative)
        changed = deltas.increments(
            totals.streams[cumulative],
            totals.times[cumulative],
            starts[cumulative],
            np.nan_to_num(totals.sums[cumulative]),
            lengths[cumulative],
            _of_points(counts, lengths, cumulative),
            edges.shapes[edges.index[cumulative]],
            totals.least[cumulative],
            totals.greatest[cumulative],
            context.table.capacity,
        )
        context.undos.append(partial(deltas.undo, changed.undo))
        context.outcomes.take(totals.requests[cumulative])
        kept = np.concatenate([plain, cumulative[changed.rows]])
        counts = np.concatenate([_of_points(counts, lengths, plain), changed.counts])
        summed = ~np.isnan(totals.sums[cumulative[changed.rows]])
        sums = np.concatenate([totals.sums[plain], np.where(summed, changed.sums, np.nan)])
        totals = replace(
            totals.take(kept),
            sums=sums,
            is_least=np.concatenate([totals.is_least[plain], changed.is_least]),
            is_greatest=np.concatenate([totals.is_greatest[plain], changed.is_greatest]),
        )
        lengths, edge_index = lengths[kept], edges.index[kept]
    else:
        edge_index = edges.index
    return bucket_rows(totals, lengths, counts, edges, edge_index, context)


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
