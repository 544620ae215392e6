"""Decoded points as columns: numbers and distributions, cumulative numbers as increments, and chunks of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints
from penstock.decode.decode_context import DecodeContext
from penstock.decode.deltas import Deltas
from penstock.decode.outcome import PointRefusal
from penstock.decode.series import NO_STREAM, KnownSeries
from penstock.model.columns import ChunkColumns
from penstock.model.point import Chunk


@dataclass(slots=True)
class DecodedRows:
    """Points whose streams are known; a distribution has further columns in `states`."""

    requests: Ints
    streams: Ints
    times: Ints  # nanoseconds since the epoch
    values: NDArray[np.float64]
    states: dict[str, NDArray[Any]] = field(default_factory=dict)

    def take(self, rows: Any) -> "DecodedRows":
        states = {name: column[rows] for name, column in self.states.items()}
        return DecodedRows(self.requests[rows], self.streams[rows], self.times[rows], self.values[rows], states)

    @staticmethod
    def join(pieces: "Sequence[DecodedRows]") -> "DecodedRows":
        """Concatenates pieces that are all numbers, or all distributions."""
        if len(pieces) == 1:
            return pieces[0]
        states = {name: np.concatenate([piece.states[name] for piece in pieces]) for name in pieces[0].states}
        return DecodedRows(
            np.concatenate([piece.requests for piece in pieces]),
            np.concatenate([piece.streams for piece in pieces]),
            np.concatenate([piece.times for piece in pieces]),
            np.concatenate([piece.values for piece in pieces]),
            states,
        )

    def chunks(self, table: KnownSeries) -> list[Chunk]:
        """Returns the rows by metric: one sort, and a slice of the columns for each metric."""
        if not len(self.streams):
            return []
        rows, metrics = self, table.metric[self.streams]
        if (metrics[1:] < metrics[:-1]).any():
            order = np.argsort(metrics, kind="stable")
            rows, metrics = rows.take(order), metrics[order]
        codes, texts = table.entities_of(rows.streams)
        columns = ChunkColumns(codes, texts, rows.times // 1000, rows.values, rows.states)
        starts = np.concatenate([[0], np.flatnonzero(metrics[1:] != metrics[:-1]) + 1, [len(metrics)]]).tolist()
        return [table.metrics[metrics[start]].chunk(columns.take(slice(start, end))) for start, end in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class DecodedNumbers:
    """Gauges, sums and counters as they came, and when their streams began (0: unknown)."""

    rows: DecodedRows
    starts: Ints

    @staticmethod
    def with_stream(rows: DecodedRows, starts: Ints) -> "DecodedNumbers":
        """Leaves out the rows that have no stream."""
        has_stream = rows.streams != NO_STREAM
        if has_stream.all():
            return DecodedNumbers(rows, starts)
        return DecodedNumbers(rows.take(has_stream), starts[has_stream])

    @staticmethod
    def join(pieces: "Sequence[DecodedNumbers]") -> "DecodedNumbers":
        if len(pieces) == 1:
            return pieces[0]
        rows = DecodedRows.join([piece.rows for piece in pieces])
        return DecodedNumbers(rows, np.concatenate([piece.starts for piece in pieces]))

    def increments(self, context: DecodeContext, deltas: Deltas) -> DecodedRows:
        """Returns the rows as they are added up: those of cumulative streams as increments."""
        rows = self.rows
        is_cumulative = context.table.is_cumulative[rows.streams]
        if not is_cumulative.any():
            context.outcomes.take(rows.requests)
            return rows
        is_sound = ~is_cumulative | np.isfinite(rows.values)
        context.outcomes.reject(rows.requests[~is_sound], PointRefusal.VALUE, "a cumulative value that is not a number")
        context.outcomes.take(rows.requests[is_sound])
        cumulative = np.flatnonzero(is_cumulative & is_sound)
        some = rows.take(cumulative)
        kept, values, undo = deltas.increments(
            some.streams, some.times, self.starts[cumulative], some.values, context.table.capacity
        )
        some = some.take(kept)
        some.values = values
        context.undos.append(partial(deltas.undo, undo))
        return some if is_cumulative.all() else DecodedRows.join([rows.take(~is_cumulative), some])
