"""Cumulative streams as increments, so that they can be added up.

A cumulative value is the total since the stream began. The tables get the difference to the value before, computed for
a whole group of points at once:

    value grew                          value − the last one
    value fell, or the stream began     value: everything since the reset
      anew after the last one
    not younger than the last one       nothing: it was counted, or a later value contains it
    first seen                          `initial_value`: the value if the stream began after this process did, else
                                        nothing, since an earlier run may have counted it. If its times are ahead of our
                                        clock, it must also have begun after all that earlier runs have seen
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
class AdvancedStreams:
    """The streams of a group: the times of their last points, and their times and starts before the group."""

    streams: Ints
    times: Ints
    times_before: Ints
    starts_before: Ints


@dataclass(frozen=True, slots=True)
class DeltaUndo:
    """What `undo` needs if the increments were not taken after all, so that the next value brings them again.

    A stream without later points goes back to its earlier state. Another one owes what was counted: its next increment
    is that much greater.
    """

    advanced: AdvancedStreams
    values_before: Floats
    owed_before: Floats
    rows: Ints  # the stream of each increment
    increments: Floats


@dataclass(slots=True)
class DeltaCounts:
    """What happened to cumulative points, for the metrics."""

    resets: int = 0
    out_of_order: int = 0
    first_seen: int = 0  # of which nothing was counted


class StreamState(NamedTuple):
    """The state of one stream: its last point, and what it owes. Each `StreamMemory` defines the buckets."""

    last: int
    start: int
    value: float
    owed: float
    shape: int
    buckets: Ints
    owed_buckets: Ints


@dataclass(frozen=True, slots=True)
class StreamStates:
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


class DeltaOrder:
    """The points of a group by stream and time, without those that are not younger than the stream's last point."""

    def __init__(self, streams: Ints, times: Ints, last: Ints) -> None:
        if self._is_each_alone(streams, len(last)):  # nothing to order: each point is the only one of its stream
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
        """Returns the value before each point: the state's for the first of a stream, else its neighbour's."""
        found = np.empty_like(values)
        found[1:] = values[:-1]
        found[self.is_first] = state[self.streams[self.is_first]]
        return found


class DeltaClocks:
    """When each stream was last seen and when it began, in nanoseconds; 0: never, unknown."""

    def __init__(self, initial: Initial, began: int) -> None:
        self._initial = initial
        self._began = began
        self.now = began  # by our clock
        self.latest = 0  # the latest time of all streams, by their own clocks
        self._forgotten = 0  # the latest time of streams that an earlier run has seen, or that were forgotten
        self.last = np.zeros(1024, np.int64)
        self.start = np.zeros(1024, np.int64)

    def ensure(self, capacity: int) -> None:
        self.last, self.start = grown_delta_column(self.last, capacity), grown_delta_column(self.start, capacity)

    def judge(self, order: DeltaOrder, times: Ints, starts: Ints) -> tuple[Mask, Mask]:
        """Says which points are the first of their stream, and for which everything since its start counts."""
        last = order.before(times, self.last)
        start = order.before(starts, self.start)
        is_new = last == 0
        has_start = (starts > 0) & (starts < times)
        restarted = ~is_new & has_start & (start > 0) & (starts > start) & (starts >= last)
        if self._initial == "auto":
            is_ahead = times > self.now  # its sender's clock: when it began cannot be compared with when we did
            counts = has_start & (starts >= self._began) & (~is_ahead | (starts > self._forgotten))
        else:
            counts = np.full(len(times), self._initial == "keep")
        return is_new, np.where(is_new, counts, restarted)

    def advance(self, order: DeltaOrder, times: Ints, starts: Ints) -> AdvancedStreams:
        """Records the last point of each stream."""
        streams = order.streams[order.is_last]
        advanced = AdvancedStreams(streams, times[order.is_last], self.last[streams], self.start[streams])
        self.last[streams] = advanced.times
        self.start[streams] = starts[order.is_last]
        self.latest = max(self.latest, int(advanced.times.max(initial=0)))
        return advanced

    def undo(self, advanced: AdvancedStreams) -> Mask:
        """Goes back where the stream has no later points; says for which streams."""
        unchanged: Mask = self.last[advanced.streams] == advanced.times
        streams = advanced.streams[unchanged]
        self.last[streams] = advanced.times_before[unchanged]
        self.start[streams] = advanced.starts_before[unchanged]
        return unchanged

    def forget(self, streams: Ints) -> None:
        self.forgotten_until(int(self.last[streams].max(initial=0)))
        self.last[streams] = 0
        self.start[streams] = 0

    def forgotten_until(self, time: int) -> None:
        """Sets the latest time, by any sender's clock, of streams that were counted and forgotten."""
        self._forgotten = max(self._forgotten, time)

    def since(self, began: int) -> None:
        """Sets the time before which a stream may have been counted and forgotten."""
        self._began = began

    def known(self) -> Ints:
        """Returns the streams that were seen."""
        return np.flatnonzero(self.last)

    def put(self, stream: int, state: StreamState, capacity: int) -> None:
        self.ensure(capacity)
        self.last[stream], self.start[stream] = state.last, state.start


class Deltas:
    """The last value of every cumulative stream of numbers.

    Threads: one at a time.
    """

    def __init__(self, initial: Initial, began: int) -> None:
        self.counts = DeltaCounts()
        self.clocks = DeltaClocks(initial, began)
        self._value = np.zeros(1024)
        self._owed = np.zeros(1024)

    def increments(
        self, streams: Ints, times: Ints, starts: Ints, values: Floats, capacity: int
    ) -> tuple[Ints, Floats, DeltaUndo]:
        """Returns the points that bring an increment, and their increments. The state advances until `undo`."""
        self.clocks.ensure(capacity)
        self._value, self._owed = grown_delta_column(self._value, capacity), grown_delta_column(self._owed, capacity)
        order = DeltaOrder(streams, times, self.clocks.last)
        times, starts, values = times[order.rows], starts[order.rows], values[order.rows]
        is_new, counts_all = self.clocks.judge(order, times, starts)
        before = order.before(values, self._value)
        fell = ~is_new & (values < before)
        increments = np.where(counts_all | fell, values, values - before)
        increments[order.is_first] += self._owed[order.streams[order.is_first]]
        is_counted = ~is_new | counts_all
        self.counts.resets += int((~is_new & (counts_all | fell)).sum())
        self.counts.out_of_order += order.late
        self.counts.first_seen += int((~is_counted).sum())
        advanced = self.clocks.advance(order, times, starts)
        streams = advanced.streams
        undo = DeltaUndo(
            advanced, self._value[streams], self._owed[streams], order.streams[is_counted], increments[is_counted]
        )
        self._value[streams] = values[order.is_last]
        self._owed[streams] = 0.0
        return order.rows[is_counted], increments[is_counted], undo

    def last_point(self, stream: int) -> tuple[int, float]:
        """Returns time and value of a stream's last point; 0 if there was none."""
        return (int(self.clocks.last[stream]), float(self._value[stream])) if stream < len(self._value) else (0, 0.0)

    def undo(self, undo: DeltaUndo) -> None:
        """Takes the increments back: the next value of each stream brings them again."""
        unchanged = self.clocks.undo(undo.advanced)
        streams = undo.advanced.streams[unchanged]
        owed = self._owed[streams]
        np.add.at(self._owed, undo.rows, undo.increments)
        self._value[streams] = undo.values_before[unchanged]
        self._owed[streams] = owed + undo.owed_before[unchanged]

    def forget(self, streams: Ints) -> None:
        some = streams[streams < len(self._value)]
        self.clocks.forget(some)
        self._owed[some] = 0.0

    # -- over a restart ----------------------------------------------------------------------------------------------

    def states(self, streams: Ints) -> StreamStates:
        none = np.zeros(len(streams), np.int64)
        clocks = self.clocks
        value, owed = self._value[streams], self._owed[streams]
        return StreamStates(
            clocks.last[streams], clocks.start[streams], value, owed, none, none, none[:0], none, none[:0]
        )

    def put(self, stream: int, state: StreamState, capacity: int) -> None:
        self.clocks.put(stream, state, capacity)
        self._value, self._owed = grown_delta_column(self._value, capacity), grown_delta_column(self._owed, capacity)
        self._value[stream], self._owed[stream] = state.value, state.owed


def grown_delta_column(column: NDArray[Any], capacity: int) -> NDArray[Any]:
    """Returns the column, with zeros at its end if it is shorter than `capacity`."""
    missing = capacity - len(column)
    return np.append(column, np.zeros(missing, column.dtype)) if missing > 0 else column
