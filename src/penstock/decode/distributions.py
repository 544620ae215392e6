"""Distributions: rows that together say what a histogram's point states."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, float64_at
from penstock.decode.deltas import Floats
from penstock.decode.group import Group, Rows
from penstock.decode.outcome import Refusal
from penstock.model.packed import COUNT_BITS

MOST_BUCKETS = 4096  # of one point: their last counts are kept for every cumulative stream
_MOST_EVER = 1 << 62  # in a bucket: differences of such counts are still numbers
TOO_MUCH = "a histogram that counts more in a bucket than anything can have counted"


@dataclass(frozen=True, slots=True)
class Stated:
    """What histogram points say beside their buckets; NaN where they do not."""

    requests: Ints
    streams: Ints
    times: Ints
    sums: Floats
    least: Floats
    greatest: Floats

    def take(self, rows: Ints) -> "Stated":
        return Stated(*(getattr(self, name)[rows] for name in self.__slots__))


def stated_by(data: Bytes, columns: dict[str, Ints], requests: Ints, streams: Ints, times: Ints) -> Stated:
    """What these points say beside their buckets."""
    wanted = [columns[name] for name in ("sum", "min", "max")]
    return Stated(requests, streams, times, *(np.where(at > 0, float64_at(data, at), np.nan) for at in wanted))


def countable(point: Ints, counts: Ints, points: int, most: int = _MOST_EVER) -> NDArray[np.bool_]:
    """Which of the points have counts that can be added up; `point` is the point of each count."""
    fine = np.ones(points, bool)
    if len(counts) and (counts.min() < 0 or counts.max() >= most):
        fine[point[(counts < 0) | (counts >= most)]] = False
    return fine


def spread(
    stated: Stated, is_cumulative: NDArray[np.bool_], point: Ints, values: Floats, counts: Ints, group: Group
) -> Rows:
    """Rows that together say what their points state; `point` is the point of each, in order, values ascending."""
    fine = countable(point, counts, len(stated.times), 1 << COUNT_BITS)
    if not fine.all():
        group.account.reject(stated.requests[~fine], Refusal.MALFORMED, TOO_MUCH)
        rows = np.flatnonzero(fine[point])
        point, values, counts = point[rows], values[rows], counts[rows]
    group.account.keep(stated.requests[fine])
    sums = _sums(stated.sums, point, values, counts)
    least, greatest = values.copy(), values.copy()
    if len(point):
        is_first = np.ones(len(point), bool)
        is_first[1:] = point[1:] != point[:-1]
        is_last = np.append(is_first[1:], True)
        # Of a cumulative stream they are those since it began, not those of this increment.
        exact_least = is_first & ~is_cumulative[point] & ~np.isnan(stated.least[point])
        exact_greatest = is_last & ~is_cumulative[point] & ~np.isnan(stated.greatest[point])
        least = np.where(exact_least, stated.least[point], least)
        greatest = np.where(exact_greatest, stated.greatest[point], greatest)
    states = {"count": counts, "sum": sums, "min": least, "max": greatest}
    return Rows(stated.requests[point], stated.streams[point], stated.times[point], values, states)


def _sums(stated: Floats, point: Ints, values: Floats, counts: Ints) -> Floats:
    """What each row adds to the sum: its share of what its point states, so that nothing is lost by rounding."""
    points = len(stated)
    with np.errstate(over="ignore", invalid="ignore"):
        own = counts * values
        total = np.bincount(point, own, points)
        # By value where all are of one sign; else the shares could cancel each other out, and are taken by count.
        by_value = (np.abs(total) == np.bincount(point, np.abs(own), points)) & (total != 0) & np.isfinite(total)
        of_value = own / total[point]
        of_count = counts / np.bincount(point, counts, points)[point]
        shares = stated[point] * np.where(by_value[point], of_value, of_count)
    return np.where(np.isfinite(stated)[point], shares, own)


def nothing() -> Rows:
    none, nothing = np.zeros(0, np.int64), np.zeros(0)
    return Rows(none, none, none, nothing, {"count": none, "sum": nothing, "min": nothing, "max": nothing})
