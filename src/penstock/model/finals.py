"""Final values: what readers of a table see, taken from merged partials at the very end.

    count, sum, min, max    of the points (of a percent, a rate or an apdex: of their scores)
    avg, cpm                sum ÷ count; count ÷ minutes of the bucket
    value                   what the metric's function says, see `penstock.model.function`
    p50 … p99               of a percentile, else null

Nearest rank: p95 is the smallest value that at least 95 % of the points do not exceed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.distinct import estimate_of
from penstock.model.exponential import percentile_part_middles
from penstock.model.function import COUNT_PER_MINUTE, MEAN, RANKS, Final, functions_in, is_function
from penstock.model.grouping import Codes, group_starts
from penstock.model.level import Level
from penstock.model.partial import SERIES, STATES, merged

ORDER = [(name, "ascending") for name in SERIES]
MERGES: dict[str, np.ufunc] = {"sum": np.add, "min": np.fmin, "max": np.fmax}  # fmin, fmax: as Spark, past NaN


@dataclass(frozen=True, slots=True)
class Entries:
    """The distributions of many rows as arrays: those of row n are at offsets[n] to before offsets[n + 1]."""

    offsets: Codes
    indexes: Codes  # exponential bucket, bound, time or register
    numbers: Codes  # points in it; of a register its rank


def with_finals(partials: pa.Table, level: Level, ranks: Sequence[float] = RANKS) -> pa.Table:
    """One row per series and bucket with its final values, sorted by series and bucket."""
    rows, entries = merged_series_of_partials(partials)
    return partials_with_values(rows, entries, level, ranks)


def merged_series_of_partials(partials: pa.Table) -> tuple[pa.Table, Entries]:
    """One row per series and bucket with its states, sorted by series and bucket, and their distributions."""
    partials = merged(partials)
    partials = partials.filter(pc.is_null(partials["record"])).sort_by([*ORDER, ("part", "ascending")])
    starts = group_starts(partials, SERIES)
    rows = partials.select(list(SERIES)).take(pa.array(starts))
    for state in STATES:
        column = partials[state.name].to_numpy()
        rows = rows.append_column(state.name, pa.array(MERGES[state.merge].reduceat(column, starts)))
    is_distinct = is_function(partials["function"], lambda spec: spec.counts_distinct)
    number = pc.if_else(is_distinct, pc.cast(partials["max"], pa.int64(), safe=False), partials["count"])
    return rows, Entries(np.r_[starts, partials.num_rows], partials["part"].to_numpy(), number.to_numpy())


def partials_with_values(rows: pa.Table, entries: Entries, level: Level, ranks: Sequence[float] = RANKS) -> pa.Table:
    """Rows, one per series and bucket, with their final values."""
    rows = rows.append_column("avg", _final(rows, MEAN, level))
    rows = rows.append_column("cpm", _final(rows, COUNT_PER_MINUTE, level))
    rows = rows.append_column("value", _values(rows, level, entries))
    return _with_ranks(rows, entries, ranks)


def _final(rows: pa.Table, final: Final, level: Level) -> Any:
    value = _as_double(rows[final.state])
    if final.per == "minutes":
        value = pc.divide(value, float(level.minutes))
    elif final.per == "count":
        # A rate whose denominator matched nothing has no value.
        count = _as_double(rows["count"])
        value = pc.divide(value, pc.if_else(pc.equal(count, 0.0), pa.scalar(None, pa.float64()), count))
    return pc.multiply(value, final.factor)


def _values(rows: pa.Table, level: Level, entries: Entries) -> Any:
    """Each row by its own function; a table holds few functions, so it is one pass for each."""
    values = pa.nulls(rows.num_rows, pa.float64())
    for text, function in functions_in(rows["function"]):
        is_own = _is(rows, text)
        if function.spec.final:
            own = _final(rows, function.spec.final, level)
        else:
            own = _estimates(entries, is_own.to_numpy(), int(function.parameters[0]))
        values = pc.if_else(is_own, own, values)
    return values


def _estimates(entries: Entries, is_distinct: Any, lg_k: int) -> Any:
    """The estimates of distinct counts, from all registers of a series and bucket."""
    found = np.zeros(len(is_distinct))
    for row in np.flatnonzero(is_distinct):
        own = slice(entries.offsets[row], entries.offsets[row + 1])
        found[row] = estimate_of(entries.indexes[own], entries.numbers[own], lg_k)
    return pa.array(found)


def _with_ranks(rows: pa.Table, entries: Entries, ranks: Sequence[float]) -> pa.Table:
    """The value at each rank: the middle of the bucket that holds it, within the error of the function's scale."""
    scales = np.full(rows.num_rows, -1)
    for text, function in functions_in(rows["function"]):
        if function.spec.has_percentiles:
            scales[_is(rows, text).to_numpy()] = function.parameters[0]
    if not len(entries.indexes):
        return _without_ranks(rows, ranks)
    total = rows["count"].to_numpy()
    upto = np.cumsum(entries.numbers)
    before = np.r_[0, upto][entries.offsets[:-1]]
    least, greatest = rows["min"].to_numpy(), rows["max"].to_numpy()
    for rank in ranks:
        # Divided last: 55 / 100 is a little more than its double says.
        wanted = np.clip(np.ceil(total * float(rank) / 100), 1, total).astype(np.int64)
        hit = np.minimum(np.searchsorted(upto, before + wanted), len(upto) - 1)  # of rows without entries: any
        middles = percentile_part_middles(pa.array(entries.indexes[hit]), pa.array(scales)).to_numpy()
        within = np.fmin(np.fmax(middles, least), greatest)  # never outside of what the series really holds
        rows = rows.append_column(rank_name(rank), pa.array(within, mask=scales < 0))
    return rows


def _without_ranks(rows: pa.Table, ranks: Sequence[float]) -> pa.Table:
    for rank in ranks:
        rows = rows.append_column(rank_name(rank), pa.nulls(rows.num_rows, pa.float64()))
    return rows


def _is(rows: pa.Table, function: str) -> Any:
    return pc.equal(rows["function"].cast(pa.string()), pa.scalar(function, pa.string()))


def _as_double(column: Any) -> Any:
    """Numbers as doubles; of a count beyond 2**53 the nearest."""
    return column.cast(pa.float64(), safe=False)


def rank_name(rank: float) -> str:
    """p95 for 95, p99_9 for 99.9: a name that needs no quotes in SQL."""
    return f"p{rank:g}".replace(".", "_")


def nearest_rank(values: Sequence[float], rank: float) -> float:
    """The exact percentile of plain values, to measure estimates against."""
    return sorted(values)[max(1, math.ceil(len(values) * rank / 100)) - 1]
