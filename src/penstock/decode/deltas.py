"""Cumulative streams as increments, so that adding them up is right.

A cumulative value says how much there was since the stream began. What is added to the tables is the difference to the
value before, taken for a whole group of points at once:

    value grew                          value − the last one
    value fell, or the stream began     value: everything since the reset
      anew after the last one
    not younger than the last one       nothing: it was counted, or is contained in what came after it
    first seen                          `initial_value`: the value if the stream began after we did, else nothing, since
                                        an earlier run of ours may have counted it
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints
from penstock.decode.config import Initial

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Moved:
    """The streams of a group: when their last points are now, and when they and their starts were before."""

    streams: Ints
    times: Ints
    times_before: Ints
    starts_before: Ints


@dataclass(frozen=True, slots=True)
class Undo:
    """What to take back if the increments were not taken after all, so that the next value brings them again.

    A stream that nothing came after is as it was. Another one owes what was counted: its next increment is that much
    greater.
    """

    moved: Moved
    values_before: Floats
    owed_before: Floats
    rows: Ints  # the stream of each increment
    increments: Floats


@dataclass(slots=True)
class DeltaCounts:
    """What happened to cumulative points, for our metrics."""

    resets: int = 0
    out_of_order: int = 0
    first_seen: int = 0  # of which nothing was counted


class Kept(NamedTuple):
    """The state of one stream: its last point, and what it owes. Those who keep it say what the buckets are."""

    last: int
    start: int
    value: float
    owed: float
    shape: int
    buckets: Ints
    owed_buckets: Ints


@dataclass(frozen=True, slots=True)
class States:
    """The same of many streams, in columns; the buckets of all one after the other."""

    last: Ints
    start: Ints
    value: Floats
    owed: Floats
    shape: Ints
    lengths: Ints
    buckets: Ints
    owed_lengths: Ints
    owed_buckets: Ints


class Order:
    """The points of a group by stream and time, without those that are not younger than what was seen."""

    def __init__(self, streams: Ints, times: Ints, last: Ints) -> None:
        if self._is_each_alone(streams, len(last)):  # nothing to order: every point is its stream's only one
            late = times <= last[streams]
            self.late = int(late.sum())
            self.rows = np.flatnonzero(~late) if self.late else np.arange(len(streams))
            self.streams = streams[self.rows] if self.late else streams
            self.is_first = self.is_last = np.ones(len(self.rows), bool)
            return
        order = np.lexsort((times, streams))
        sorted_streams, sorted_times = streams[order], times[order]
        late = sorted_times <= last[sorted_streams]
        late[1:] |= (sorted_streams[1:] == sorted_streams[:-1]) & (sorted_times[1:] == sorted_times[:-1])
        self.late = int(late.sum())
        self.rows = order[~late]
        self.streams = streams[self.rows]
        self.is_first = np.ones(len(self.rows), bool)
        self.is_first[1:] = self.streams[1:] != self.streams[:-1]
        self.is_last = np.ones(len(self.rows), bool)
        self.is_last[:-1] = self.is_first[1:]

    @staticmethod
    def _is_each_alone(streams: Ints, capacity: int) -> bool:
        present = np.zeros(capacity, bool)
        present[streams] = True
        return int(np.count_nonzero(present)) == len(streams)

    def before(self, values: NDArray[Any], state: NDArray[Any]) -> NDArray[Any]:
        """Of each point the value before it: the state's for the first of a stream, else its neighbour's."""
        found = np.empty_like(values)
        found[1:] = values[:-1]
        found[self.is_first] = state[self.streams[self.is_first]]
        return found


class Clocks:
    """When each stream was last seen and when it began, in nanoseconds; 0: never, unknown."""

    def __init__(self, initial: Initial, began: int) -> None:
        self._initial = initial
        self._began = began
        self.last = np.zeros(1024, np.int64)
        self.start = np.zeros(1024, np.int64)

    def ensure(self, capacity: int) -> None:
        self.last, self.start = grown(self.last, capacity), grown(self.start, capacity)

    def judge(self, order: Order, times: Ints, starts: Ints) -> tuple[Mask, Mask]:
        """Which points are the first of their stream, and for which everything since its start counts."""
        last = order.before(times, self.last)
        start = order.before(starts, self.start)
        is_new = last == 0
        has_start = (starts > 0) & (starts < times)
        restarted = ~is_new & has_start & (start > 0) & (starts > start) & (starts >= last)
        if self._initial == "auto":
            counts = has_start & (starts >= self._began)
        else:
            counts = np.full(len(times), self._initial == "keep")
        return is_new, np.where(is_new, counts, restarted)

    def advance(self, order: Order, times: Ints, starts: Ints) -> Moved:
        """Remember the last point of each stream."""
        streams = order.streams[order.is_last]
        moved = Moved(streams, times[order.is_last], self.last[streams], self.start[streams])
        self.last[streams] = moved.times
        self.start[streams] = starts[order.is_last]
        return moved

    def undo(self, moved: Moved) -> Mask:
        """Go back; for which streams nothing came since, so that this was possible."""
        unchanged: Mask = self.last[moved.streams] == moved.times
        streams = moved.streams[unchanged]
        self.last[streams] = moved.times_before[unchanged]
        self.start[streams] = moved.starts_before[unchanged]
        return unchanged

    def forget(self, streams: Ints) -> None:
        self.last[streams] = 0
        self.start[streams] = 0

    def since(self, began: int) -> None:
        """Streams that began before that time may have been counted and forgotten."""
        self._began = began

    def known(self, capacity: int) -> Ints:
        self.ensure(capacity)
        return np.flatnonzero(self.last)

    def put(self, stream: int, kept: Kept, capacity: int) -> None:
        self.ensure(capacity)
        self.last[stream], self.start[stream] = kept.last, kept.start


class Deltas:
    """The last value of every cumulative stream of numbers.

    Threads: one at a time.
    """

    def __init__(self, initial: Initial, began: int) -> None:
        self.counts = DeltaCounts()
        self._clocks = Clocks(initial, began)
        self._value = np.zeros(1024)
        self._owed = np.zeros(1024)

    def increments(
        self, streams: Ints, times: Ints, starts: Ints, values: Floats, capacity: int
    ) -> tuple[Ints, Floats, Undo]:
        """Which points bring an increment, and which. The state is that after them until `undo`."""
        self._clocks.ensure(capacity)
        self._value, self._owed = grown(self._value, capacity), grown(self._owed, capacity)
        order = Order(streams, times, self._clocks.last)
        times, starts, values = times[order.rows], starts[order.rows], values[order.rows]
        is_new, counts_all = self._clocks.judge(order, times, starts)
        before = order.before(values, self._value)
        fell = ~is_new & (values < before)
        increments = np.where(counts_all | fell, values, values - before)
        increments[order.is_first] += self._owed[order.streams[order.is_first]]
        kept = ~is_new | counts_all
        self.counts.resets += int((~is_new & (counts_all | fell)).sum())
        self.counts.out_of_order += order.late
        self.counts.first_seen += int((~kept).sum())
        moved = self._clocks.advance(order, times, starts)
        streams = moved.streams
        undo = Undo(moved, self._value[streams], self._owed[streams], order.streams[kept], increments[kept])
        self._value[streams] = values[order.is_last]
        self._owed[streams] = 0.0
        return order.rows[kept], increments[kept], undo

    def undo(self, undo: Undo) -> None:
        """Take the increments back: the next value of each stream brings them again."""
        unchanged = self._clocks.undo(undo.moved)
        streams = undo.moved.streams[unchanged]
        owed = self._owed[streams]
        np.add.at(self._owed, undo.rows, undo.increments)
        self._value[streams] = undo.values_before[unchanged]
        self._owed[streams] = owed + undo.owed_before[unchanged]

    def forget(self, streams: Ints) -> None:
        some = streams[streams < len(self._value)]
        self._clocks.forget(some)
        self._owed[some] = 0.0

    def since(self, began: int) -> None:
        self._clocks.since(began)

    # -- over a restart ----------------------------------------------------------------------------------------------

    def known(self, capacity: int) -> Ints:
        return self._clocks.known(capacity)

    def states(self, streams: Ints) -> States:
        none = np.zeros(len(streams), np.int64)
        clocks = self._clocks
        value, owed = self._value[streams], self._owed[streams]
        return States(clocks.last[streams], clocks.start[streams], value, owed, none, none, none[:0], none, none[:0])

    def put(self, stream: int, kept: Kept, capacity: int) -> None:
        self._clocks.put(stream, kept, capacity)
        self._value, self._owed = grown(self._value, capacity), grown(self._owed, capacity)
        self._value[stream], self._owed[stream] = kept.value, kept.owed


def grown(column: NDArray[Any], capacity: int) -> NDArray[Any]:
    """`column`, with zeros at its end if it is shorter than `capacity`."""
    missing = capacity - len(column)
    return np.append(column, np.zeros(missing, column.dtype)) if missing > 0 else column
