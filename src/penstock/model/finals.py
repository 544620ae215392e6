"""Final values: what readers of a table see, taken from merged partials at the very end.

    count, sum, min, max    of the points (of a percent, a rate or an apdex: of their scores)
    avg, cpm                sum ÷ count; count ÷ minutes of the bucket
    value                   what the metric's function says, see `penstock.model.function`
    p50 … p99               of a percentile, else null

Nearest rank: p95 is the smallest value that at least 95 % of the points do not exceed.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.distinct import estimate_of
from penstock.model.exponential import middles_of
from penstock.model.function import COUNT_PER_MINUTE, MEAN, RANKS, Final, functions_in
from penstock.model.grouping import Codes, group_starts
from penstock.model.level import Level
from penstock.model.partial import SERIES, STATES, merged

ORDER = [(name, "ascending") for name in SERIES]
_MERGES: dict[str, np.ufunc] = {"sum": np.add, "min": np.fmin, "max": np.fmax}  # fmin, fmax: as Spark, past NaN


def with_finals(partials: pa.Table, level: Level, ranks: Sequence[float] = RANKS) -> pa.Table:
    """One row per series and bucket with its final values, sorted by series and bucket."""
    partials = merged(partials)
    partials = partials.filter(pc.is_null(partials["record"])).sort_by([*ORDER, ("part", "ascending")])
    starts = group_starts(partials, SERIES)
    rows = partials.select(list(SERIES)).take(pa.array(starts))
    for state in STATES:
        column = partials[state.name].to_numpy()
        rows = rows.append_column(state.name, pa.array(_MERGES[state.merge].reduceat(column, starts)))
    rows = rows.append_column("avg", _final(rows, MEAN, level))
    rows = rows.append_column("cpm", _final(rows, COUNT_PER_MINUTE, level))
    rows = rows.append_column("value", _values(rows, level, partials, starts))
    return _with_ranks(rows, partials, starts, ranks)


def _final(rows: pa.Table, final: Final, level: Level) -> Any:
    value = _as_double(rows[final.state])
    if final.per == "minutes":
        value = pc.divide(value, float(level.minutes))
    elif final.per == "count":
        # A rate whose denominator matched nothing has no value.
        count = _as_double(rows["count"])
        value = pc.divide(value, pc.if_else(pc.equal(count, 0.0), pa.scalar(None, pa.float64()), count))
    return pc.multiply(value, final.factor)


def _values(rows: pa.Table, level: Level, partials: pa.Table, starts: Codes) -> Any:
    """Each row by its own function; a table holds few functions, so it is one pass for each."""
    values = pa.nulls(rows.num_rows, pa.float64())
    for text, function in functions_in(rows["function"]):
        is_own = pc.equal(rows["function"], text)
        if function.spec.final:
            own = _final(rows, function.spec.final, level)
        else:
            own = _estimates(partials, starts, is_own.to_numpy(), int(function.parameters[0]))
        values = pc.if_else(is_own, own, values)
    return values


def _estimates(partials: pa.Table, starts: Codes, is_distinct: Any, lg_k: int) -> Any:
    """The estimates of distinct counts, from all registers of a series and bucket."""
    parts, ranks = (np.split(partials[name].to_numpy(), starts[1:]) for name in ("part", "max"))
    found = np.zeros(len(starts))
    for row in np.flatnonzero(is_distinct):
        found[row] = estimate_of(parts[row], ranks[row], lg_k)
    return pa.array(found)


def _with_ranks(rows: pa.Table, partials: pa.Table, starts: Codes, ranks: Sequence[float]) -> pa.Table:
    """The value at each rank: the middle of the bucket that holds it, within the error of the function's scale."""
    scales = np.full(rows.num_rows, -1)
    for text, function in functions_in(rows["function"]):
        if function.spec.has_percentiles:
            scales[pc.equal(rows["function"], text).to_numpy()] = function.parameters[0]
    counts, total = partials["count"].to_numpy(), rows["count"].to_numpy()
    upto = np.cumsum(counts)
    before = upto[starts] - counts[starts]
    least, greatest = rows["min"].to_numpy(), rows["max"].to_numpy()
    for rank in ranks:
        # Divided last: 55 / 100 is a little more than its double says.
        wanted = np.clip(np.ceil(total * float(rank) / 100), 1, total).astype(np.int64)
        hit = pa.array(np.searchsorted(upto, before + wanted))
        middles = middles_of(partials["part"].take(hit), pa.array(scales)).to_numpy()
        within = np.fmin(np.fmax(middles, least), greatest)  # never outside of what the series really holds
        rows = rows.append_column(rank_name(rank), pa.array(within, mask=scales < 0))
    return rows


def _as_double(column: Any) -> Any:
    """Numbers as doubles; of a count beyond 2**53 the nearest."""
    return column.cast(pa.float64(), safe=False)


def rank_name(rank: float) -> str:
    """p95 for 95, p99_9 for 99.9: a name that needs no quotes in SQL."""
    return f"p{rank:g}".replace(".", "_")


def nearest_rank(values: Sequence[float], rank: float) -> float:
    """The exact percentile of plain values, to measure estimates against."""
    return sorted(values)[max(1, math.ceil(len(values) * rank / 100)) - 1]
