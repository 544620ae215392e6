"""Cumulative histograms as increments: every bucket is a counter, and all of them are reset together."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.decode.column_scan import Ints, within
from penstock.decode.config import Initial
from penstock.decode.deltas import (
    DeltaClocks,
    DeltaCounts,
    DeltaOrder,
    DeltaUndo,
    Floats,
    Mask,
    StreamState,
    StreamStates,
    grown_delta_column,
)


@dataclass(frozen=True, slots=True)
class BucketUndo:
    """A `DeltaUndo` of the sums, the buckets of each increment, and the buckets of each stream before."""

    sums: DeltaUndo
    shapes: Ints
    lengths: Ints
    counts: Ints
    shapes_before: Ints
    lengths_before: Ints
    counts_before: Ints
    owed_before: Ints
    least_before: Floats
    greatest_before: Floats


@dataclass(frozen=True, slots=True)
class HistogramIncrements:
    """The points that bring an increment, in a new order, and their increments."""

    rows: Ints
    sums: Floats
    counts: Ints
    is_least: Mask  # whether the stream's min is a value of this increment
    is_greatest: Mask
    undo: BucketUndo


class HistogramDeltas:
    """The last buckets of every cumulative histogram.

    Threads: one at a time.
    """

    def __init__(self, initial: Initial, began: int) -> None:
        self.counts = DeltaCounts()
        self.clocks = DeltaClocks(initial, began)
        self._sum = np.zeros(1024)
        self._shape = np.zeros(1024, np.int64)
        self._length = np.zeros(1024, np.int64)
        self._base = np.zeros(1024, np.int64)  # where the stream's buckets are in `_buckets`
        self._buckets = np.zeros(16 * 1024, np.int64)
        self._owed = np.zeros(16 * 1024, np.int64)  # beside the buckets
        self._owed_sum = np.zeros(1024)
        self._least = np.full(1024, np.nan)  # since the stream began
        self._greatest = np.full(1024, np.nan)
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def increments(
        self,
        streams: Ints,
        times: Ints,
        starts: Ints,
        sums: Floats,
        lengths: Ints,
        counts: Ints,
        shapes: Ints,
        least: Floats,
        greatest: Floats,
        capacity: int,
    ) -> HistogramIncrements:
        """Returns the points that bring an increment, and their increments. The state advances until `undo`."""
        self._ensure(capacity)
        order = DeltaOrder(streams, times, self.clocks.last)
        offsets = np.cumsum(lengths) - lengths
        counts = counts[within(offsets[order.rows], lengths[order.rows])]
        times, starts, sums = times[order.rows], starts[order.rows], sums[order.rows]
        lengths, shapes = lengths[order.rows], shapes[order.rows]
        least, greatest = least[order.rows], greatest[order.rows]
        offsets = np.cumsum(lengths) - lengths

        is_new, counts_all = self.clocks.judge(order, times, starts)
        reshaped = ~is_new & (order.before(shapes, self._shape) != shapes)
        compared = ~is_new & ~reshaped
        previous = self._before(order, compared, offsets, lengths, counts)
        fell = (
            compared & (np.minimum.reduceat(np.append(counts - previous, 0), offsets) < 0) if len(offsets) else compared
        )
        everything = counts_all | fell
        is_least = np.where(everything, ~np.isnan(least), least < order.before(least, self._least))
        is_greatest = np.where(everything, ~np.isnan(greatest), greatest > order.before(greatest, self._greatest))
        kept = compared | counts_all
        increments = np.where(np.repeat(everything, lengths), counts, counts - previous)
        sum_increments = np.where(everything, sums, sums - order.before(sums, self._sum))
        owing = compared & order.is_first
        of_owing = within(self._base[order.streams[owing]], lengths[owing])
        increments[np.repeat(owing, lengths)] += self._owed[of_owing]
        sum_increments[owing] += self._owed_sum[order.streams[owing]]
        self.counts.resets += int((~is_new & (everything | reshaped)).sum())
        self.counts.out_of_order += order.late
        self.counts.first_seen += int((~kept).sum())

        advanced = self.clocks.advance(order, times, starts)
        streams = advanced.streams
        found = increments[np.repeat(kept, lengths)]
        before = within(self._base[streams], self._length[streams])
        undo = BucketUndo(
            DeltaUndo(advanced, self._sum[streams], self._owed_sum[streams], order.streams[kept], sum_increments[kept]),
            shapes[kept],
            lengths[kept],
            found,
            self._shape[streams],
            self._length[streams],
            self._buckets[before],
            self._owed[before],
            self._least[streams],
            self._greatest[streams],
        )
        self._least[streams], self._greatest[streams] = least[order.is_last], greatest[order.is_last]
        self._sum[streams] = sums[order.is_last]
        self._owed_sum[streams] = 0.0
        last = within(offsets[order.is_last], lengths[order.is_last])
        self._store(streams, shapes[order.is_last], lengths[order.is_last], counts[last])
        return HistogramIncrements(
            order.rows[kept], sum_increments[kept], found, is_least[kept], is_greatest[kept], undo
        )

    def _before(self, order: DeltaOrder, compared: Ints, offsets: Ints, lengths: Ints, counts: Ints) -> Ints:
        """Returns the bucket before each bucket: of the point before, or of the state; 0 where there is none."""
        found = np.zeros(len(counts), np.int64)
        of_state, of_neighbour = compared & order.is_first, compared & ~order.is_first
        found[np.repeat(of_state, lengths)] = self._buckets[
            within(self._base[order.streams[of_state]], lengths[of_state])
        ]
        if of_neighbour.any():
            found[np.repeat(of_neighbour, lengths)] = counts[
                within(np.roll(offsets, 1)[of_neighbour], lengths[of_neighbour])
            ]
        return found

    def _store(self, streams: Ints, shapes: Ints, lengths: Ints, counts: Ints) -> None:
        self._shape[streams] = shapes
        for row in np.flatnonzero(self._length[streams] != lengths).tolist():
            self._allocate(int(streams[row]), int(lengths[row]))
        places = within(self._base[streams], lengths)
        self._buckets[places] = counts
        self._owed[places] = 0

    def _allocate(self, stream: int, length: int) -> None:
        self._release(stream)
        if not length:
            return
        if self._free[length]:
            self._base[stream] = self._free[length].pop()
        else:
            if self._used + length > len(self._buckets):
                self._buckets = grown_delta_column(self._buckets, 2 * len(self._buckets) + length)
                self._owed = grown_delta_column(self._owed, len(self._buckets))
            self._base[stream] = self._used
            self._used += length
        self._length[stream] = length

    def _release(self, stream: int) -> None:
        if self._length[stream]:
            self._free[int(self._length[stream])].append(int(self._base[stream]))
            self._length[stream] = 0

    def _ensure(self, capacity: int) -> None:
        self.clocks.ensure(capacity)
        for name in ("_sum", "_owed_sum", "_shape", "_length", "_base"):
            setattr(self, name, grown_delta_column(getattr(self, name), capacity))
        missing = np.full(max(0, capacity - len(self._least)), np.nan)
        self._least, self._greatest = np.append(self._least, missing), np.append(self._greatest, missing)

    def undo(self, undo: BucketUndo) -> None:
        """Takes the increments back: the next point of each stream brings them again."""
        sums = undo.sums
        unchanged = self.clocks.undo(sums.advanced)
        streams = sums.advanced.streams[unchanged]
        lengths = undo.lengths_before[unchanged]
        owed_sums = self._owed_sum[streams] + sums.owed_before[unchanged]
        of_unchanged = np.repeat(unchanged, undo.lengths_before)
        owed = undo.owed_before[of_unchanged]
        same = self._length[streams] == lengths
        owed[np.repeat(same, lengths)] += self._owed[within(self._base[streams[same]], lengths[same])]

        np.add.at(self._owed_sum, sums.rows, sums.increments)
        same = (self._shape[sums.rows] == undo.shapes) & (self._length[sums.rows] == undo.lengths)
        places = within(self._base[sums.rows[same]], undo.lengths[same])
        np.add.at(self._owed, places, undo.counts[np.repeat(same, undo.lengths)])

        self._store(streams, undo.shapes_before[unchanged], lengths, undo.counts_before[of_unchanged])
        self._owed[within(self._base[streams], lengths)] = owed
        self._least[streams], self._greatest[streams] = undo.least_before[unchanged], undo.greatest_before[unchanged]
        self._sum[streams] = sums.values_before[unchanged]
        self._owed_sum[streams] = owed_sums

    def forget(self, streams: Ints) -> None:
        some = streams[streams < len(self._length)]
        self.clocks.forget(some)
        self._owed_sum[some] = 0.0
        self._least[some] = self._greatest[some] = np.nan
        for stream in some[self._length[some] > 0].tolist():
            self._release(stream)

    # -- over a restart ----------------------------------------------------------------------------------------------

    def states(self, streams: Ints) -> StreamStates:
        clocks, lengths = self.clocks, self._length[streams]
        places = within(self._base[streams], lengths)
        return StreamStates(
            clocks.last[streams],
            clocks.start[streams],
            self._sum[streams],
            self._owed_sum[streams],
            self._shape[streams],
            lengths,
            self._buckets[places],
            lengths,
            self._owed[places],
        )

    def put(self, stream: int, state: StreamState, capacity: int) -> None:
        self.clocks.put(stream, state, capacity)
        self._ensure(capacity)
        self._sum[stream], self._owed_sum[stream] = state.value, state.owed
        numbers, shapes = np.array([stream]), np.array([state.shape])
        self._store(numbers, shapes, np.array([len(state.buckets)]), state.buckets)
        self._owed[within(self._base[numbers], self._length[numbers])] = state.owed_buckets
