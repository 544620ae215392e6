"""Gauges, sums and counters: columns of numbers, cumulative ones turned into increments."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints, float64_at, uint64_at
from penstock.decode.deltas import Deltas
from penstock.decode.group import Group, Rows
from penstock.decode.otlp.request import NO_VALUE
from penstock.decode.outcome import Refusal
from penstock.decode.scanned_points import Found, streams_of


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers whose streams are known."""

    rows: Rows
    starts: Ints


def otlp_numbers(found: Found, group: Group) -> Numbers:
    """The number points of OTLP requests."""
    times, fine = times_of(found, group)
    double, integer = found.fields["double"], found.fields["int"]
    is_integer = integer > double  # where there are both, the later one counts
    values = float64_at(found.data, double)
    if is_integer.any():
        values = np.where(is_integer, uint64_at(found.data, integer).view(np.int64).astype(np.float64), values)
    valued = is_integer | (double > 0)
    if not valued.all():
        nothing = fine & ~valued
        group.account.reject(found.requests[nothing], Refusal.VALUE, "a point without a value")
        fine &= valued
    starts = uint64_at(found.data, found.fields["start"]).view(np.int64)
    starts = np.where(found.fields["start"] > 0, starts, 0)
    return taken(Rows(found.requests, streams_of(found, fine, group), times, values), starts)


def taken(rows: Rows, starts: Ints) -> Numbers:
    """Without those that have no stream."""
    streams = rows.streams
    if len(streams) and streams.min() < 0:
        taken = streams >= 0
        rows, starts = rows.take(taken), starts[taken]
    return Numbers(rows, starts)


def times_of(found: Found, group: Group) -> tuple[Ints, NDArray[np.bool_]]:
    """The time of every point, and which points have a time that we take and a value."""
    times = uint64_at(found.data, found.fields["time"])
    times = np.where(found.fields["time"] > 0, times, np.uint64(0))
    timely = (times > 0) & (times <= np.uint64(group.latest))
    has_value = found.fields["flags"] & NO_VALUE == 0
    if not timely.all():
        group.account.reject(
            found.requests[~timely & has_value], Refusal.TIME, "a point without a time, or one far ahead"
        )
    return times.view(np.int64), timely & has_value


def increments(numbers: Numbers, group: Group, deltas: Deltas) -> Rows:
    """The rows as they are added up: those of cumulative streams as increments."""
    rows = numbers.rows
    is_cumulative = group.table.is_cumulative[rows.streams]
    if not is_cumulative.any():
        group.account.keep(rows.requests)
        return rows
    sound = ~is_cumulative | np.isfinite(rows.values)
    group.account.reject(rows.requests[~sound], Refusal.VALUE, "a cumulative value that is not a number")
    group.account.keep(rows.requests[sound])
    changing = np.flatnonzero(is_cumulative & sound)
    some = rows.take(changing)
    kept, values, undo = deltas.increments(
        some.streams, some.times, numbers.starts[changing], some.values, group.table.capacity
    )
    some = some.take(kept)
    some.values = values
    plain = ~is_cumulative
    group.undos.append(partial(deltas.undo, undo))
    return joined([rows.take(plain), some]) if plain.any() else some


def all_of(pieces: list[Numbers]) -> Numbers:
    return Numbers(joined([piece.rows for piece in pieces]), np.concatenate([piece.starts for piece in pieces]))


def joined(pieces: list[Rows]) -> Rows:
    """One after the other; all of them points, or all distributions."""
    if len(pieces) == 1:
        return pieces[0]
    states = {name: np.concatenate([piece.states[name] for piece in pieces]) for name in pieces[0].states}
    return Rows(
        np.concatenate([piece.requests for piece in pieces]),
        np.concatenate([piece.streams for piece in pieces]),
        np.concatenate([piece.times for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        states,
    )
