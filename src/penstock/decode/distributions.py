"""Distributions: rows that together say what a histogram's point states, whatever its buckets are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, float64_at
from penstock.decode.decode_context import DecodeContext
from penstock.decode.deltas import Floats
from penstock.decode.outcome import PointRefusal
from penstock.decode.rows import DecodedRows
from penstock.model.packed import COUNT_BITS

MAX_BUCKETS = 4096  # of one point: their last counts are kept for every cumulative stream
_MAX_COUNT = 1 << 62  # in a bucket: differences of such counts still fit
TOO_MUCH = "a histogram that counts more in a bucket than anything can have counted"


@dataclass(frozen=True, slots=True)
class HistogramTotals:
    """What histogram points state beside their buckets; NaN where they do not.

    A cumulative stream states the min and max since it began. `is_least` and `is_greatest` say where they are also
    those of this point or increment.
    """

    requests: Ints
    streams: Ints
    times: Ints
    sums: Floats
    least: Floats
    greatest: Floats
    is_least: NDArray[np.bool_]
    is_greatest: NDArray[np.bool_]

    def take(self, rows: Ints) -> "HistogramTotals":
        return HistogramTotals(*(getattr(self, name)[rows] for name in self.__slots__))


def read_histogram_totals(
    data: Bytes, columns: dict[str, Ints], requests: Ints, streams: Ints, times: Ints
) -> HistogramTotals:
    wanted = [columns[name] for name in ("sum", "min", "max")]
    sums, least, greatest = (np.where(at > 0, float64_at(data, at), np.nan) for at in wanted)
    return HistogramTotals(requests, streams, times, sums, least, greatest, ~np.isnan(least), ~np.isnan(greatest))


def is_countable_histogram(point: Ints, counts: Ints, points: int, most: int = _MAX_COUNT) -> NDArray[np.bool_]:
    """Says which of the points have counts that can be added up; `point` is the point of each count."""
    is_fine = np.ones(points, bool)
    if len(counts) and (counts.min() < 0 or counts.max() >= most):
        is_fine[point[(counts < 0) | (counts >= most)]] = False
    return is_fine


def histogram_rows(
    totals: HistogramTotals,
    point: Ints,
    values: Floats,
    low: Floats,
    high: Floats,
    counts: Ints,
    context: DecodeContext,
) -> DecodedRows:
    """Makes the rows of these points; `point` is the point of each row, in order, with ascending values.

    A row's min and max are the ends of its bucket, and the exact ones at the ends of a point where they are known.
    """
    is_fine = is_countable_histogram(point, counts, len(totals.times), 1 << COUNT_BITS)
    if not is_fine.all():
        context.outcomes.reject(totals.requests[~is_fine], PointRefusal.MALFORMED, TOO_MUCH)
        rows = np.flatnonzero(is_fine[point])
        point, values, low, high, counts = point[rows], values[rows], low[rows], high[rows], counts[rows]
    context.outcomes.take(totals.requests[is_fine])
    sums = _sums(totals.sums, point, values, counts)
    # The stated ones are those of all values, as far as a sender counts right.
    least = np.minimum(np.fmax(low, totals.least[point]), values)
    greatest = np.maximum(np.fmin(high, totals.greatest[point]), values)
    if len(point):
        is_first = np.ones(len(point), bool)
        is_first[1:] = point[1:] != point[:-1]
        is_last = np.append(is_first[1:], True)
        least = np.where(is_first & totals.is_least[point], totals.least[point], least)
        greatest = np.where(is_last & totals.is_greatest[point], totals.greatest[point], greatest)
    states = {"count": counts, "sum": sums, "min": least, "max": greatest}
    return DecodedRows(totals.requests[point], totals.streams[point], totals.times[point], values, states)


def _sums(stated: Floats, point: Ints, values: Floats, counts: Ints) -> Floats:
    """Returns what each row adds to the sum: its share of the stated sum, so that nothing is lost by rounding."""
    points = len(stated)
    with np.errstate(over="ignore", invalid="ignore"):
        own = counts * values
        total = np.bincount(point, own, points)
        # Shares are by value where all are of one sign. Else they could cancel each other out, and are by count.
        by_value = (np.abs(total) == np.bincount(point, np.abs(own), points)) & (total != 0) & np.isfinite(total)
        of_value = own / total[point]
        of_count = counts / np.bincount(point, counts, points)[point]
        shares = stated[point] * np.where(by_value[point], of_value, of_count)
    return np.where(np.isfinite(stated)[point], shares, own)


def no_histogram_rows() -> DecodedRows:
    ints, floats = np.zeros(0, np.int64), np.zeros(0)
    return DecodedRows(ints, ints, ints, floats, {"count": ints, "sum": floats, "min": floats, "max": floats})
