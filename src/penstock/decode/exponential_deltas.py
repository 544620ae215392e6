"""Cumulative exponential histograms as increments.

A stream's scale falls while its range grows, so its buckets change their meaning from point to point. They are compared
one stream at a time, which takes some 20 µs; a stream of deltas is not compared at all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from penstock.decode.column_scan import Ints
from penstock.decode.config import Initial
from penstock.decode.deltas import AdvancedStreams, DeltaClocks, DeltaCounts, DeltaOrder, StreamState, StreamStates

Counts = Mapping[tuple[int, int], int]  # by sign and index; sign 0 is the bucket of zero


@dataclass(frozen=True, slots=True)
class ExponentialTotals:
    """One point, or its increment."""

    scale: int
    sum: float
    counts: Counts
    least: float = math.nan  # since the stream began; of an increment its own, where it is known
    greatest: float = math.nan

    def at(self, scale: int) -> dict[tuple[int, int], int]:
        """Returns the counts in the wider buckets of that scale."""
        found: dict[tuple[int, int], int] = {}
        for (sign, index), count in self.counts.items():
            key = sign, index >> self.scale - scale if sign else 0
            found[key] = found.get(key, 0) + count
        return found

    def since(self, before: "ExponentialTotals") -> "ExponentialTotals | None":
        """Returns the increment since `before`; None if a count fell, which is a reset."""
        scale = min(self.scale, before.scale)
        older, newer = before.at(scale), self.at(scale)
        if any(newer.get(key, 0) < count for key, count in older.items()):
            return None
        added = {key: count - older.get(key, 0) for key, count in newer.items()}
        return ExponentialTotals(
            scale,
            self.sum - before.sum,
            {key: count for key, count in added.items() if count},
            self.least if self.least < before.least else math.nan,
            self.greatest if self.greatest > before.greatest else math.nan,
        )

    def plus(self, other: "ExponentialTotals") -> "ExponentialTotals":
        scale = min(self.scale, other.scale)
        both = self.at(scale)
        for key, count in other.at(scale).items():
            both[key] = both.get(key, 0) + count
        least, greatest = self.least + other.least, self.greatest + other.greatest  # NaN if one is not known
        return ExponentialTotals(
            scale,
            self.sum + other.sum,
            both,
            least if math.isnan(least) else min(self.least, other.least),
            greatest if math.isnan(greatest) else max(self.greatest, other.greatest),
        )


@dataclass(frozen=True, slots=True)
class ExponentialUndo:
    """What `undo` needs: the increments that were counted, and the last point of each stream before them."""

    advanced: AdvancedStreams
    increments: list[tuple[int, ExponentialTotals]]
    before: "dict[int, ExponentialTotals | None]"
    owed: dict[int, list[ExponentialTotals]]  # which the increments contain


class ExponentialDeltas:
    """The last point of every cumulative exponential histogram.

    Threads: one at a time.
    """

    def __init__(self, initial: Initial, began: int) -> None:
        self.counts = DeltaCounts()
        self.clocks = DeltaClocks(initial, began)
        self._last: dict[int, ExponentialTotals] = {}
        self._owed: dict[int, list[ExponentialTotals]] = {}

    def increments(
        self, streams: Ints, times: Ints, starts: Ints, points: list[ExponentialTotals], capacity: int
    ) -> tuple[Ints, list[ExponentialTotals], ExponentialUndo]:
        """Returns the points that bring an increment, and their increments. The state advances until `undo`."""
        self.clocks.ensure(capacity)
        order = DeltaOrder(streams, times, self.clocks.last)
        times, starts = times[order.rows], starts[order.rows]
        is_new, counts_all = self.clocks.judge(order, times, starts)
        rows, found, counted = [], [], []
        paid = {}
        earlier = {stream: self._last.get(stream) for stream in order.streams.tolist()}
        for row, stream, new, everything in zip(
            order.rows.tolist(), order.streams.tolist(), is_new.tolist(), counts_all.tolist()
        ):
            before = None if new else self._last.get(stream)
            self._last[stream] = now = points[row]
            increment: ExponentialTotals | None = now
            if before is None:
                increment = now if everything else None
            elif everything or (increment := now.since(before)) is None:
                self.counts.resets += 1
                increment = now
            if increment is not None:
                if stream in self._owed:
                    paid[stream] = self._owed.pop(stream)
                    for owed in paid[stream]:
                        increment = increment.plus(owed)
                rows.append(row)
                found.append(increment)
                counted.append((stream, increment))
        self.counts.out_of_order += order.late
        self.counts.first_seen += len(order.rows) - len(rows)
        undo = ExponentialUndo(self.clocks.advance(order, times, starts), counted, earlier, paid)
        return np.array(rows, np.int64), found, undo

    def undo(self, undo: ExponentialUndo) -> None:
        """Takes the increments back: the next point of each stream brings them again."""
        unchanged = self.clocks.undo(undo.advanced)
        as_before = set(undo.advanced.streams[unchanged].tolist())
        for stream, increment in undo.increments:
            if stream not in as_before:
                self._owed.setdefault(stream, []).append(increment)
        for stream in as_before:
            before = undo.before[stream]
            if before is None:
                self._last.pop(stream, None)
            else:
                self._last[stream] = before
            if stream in undo.owed:
                self._owed.setdefault(stream, []).extend(undo.owed[stream])

    def forget(self, streams: Ints) -> None:
        self.clocks.forget(streams[streams < len(self.clocks.last)])
        for stream in streams.tolist():
            self._last.pop(stream, None)
            self._owed.pop(stream, None)

    # -- over a restart: a point as numbers is its scale, then sign, index and count of each bucket ------------------

    def states(self, streams: Ints) -> StreamStates:
        last = [self._last[stream] for stream in streams.tolist()]
        owed = [_sum(self._owed.get(stream, [])) for stream in streams.tolist()]
        (lengths, buckets), (owed_lengths, owed_buckets) = _as_numbers(last), _as_numbers(owed)
        return StreamStates(
            self.clocks.last[streams],
            self.clocks.start[streams],
            np.array([point.sum for point in last], np.float64),
            np.array([point.sum if point else 0.0 for point in owed], np.float64),
            np.zeros(len(streams), np.int64),
            lengths,
            buckets,
            owed_lengths,
            owed_buckets,
        )

    def put(self, stream: int, state: StreamState, capacity: int) -> None:
        self.clocks.put(stream, state, capacity)
        self._last[stream] = _of_numbers(state.value, state.buckets.tolist())
        if len(state.owed_buckets):
            self._owed[stream] = [_of_numbers(state.owed, state.owed_buckets.tolist())]


def _sum(points: Sequence[ExponentialTotals]) -> ExponentialTotals | None:
    return reduce(ExponentialTotals.plus, points) if points else None


def _as_numbers(points: Sequence[ExponentialTotals | None]) -> tuple[Ints, Ints]:
    texts = [_numbers(point) if point else [] for point in points]
    lengths = np.array([len(text) for text in texts], np.int64)
    return lengths, np.array([number for text in texts for number in text], np.int64)


def _numbers(point: ExponentialTotals) -> list[int]:
    return [point.scale, *(number for (sign, index), count in point.counts.items() for number in (sign, index, count))]


def _of_numbers(total: float, numbers: list[int]) -> ExponentialTotals:
    scale, *rest = numbers
    return ExponentialTotals(scale, total, {(sign, index): count for sign, index, count in zip(*[iter(rest)] * 3)})
