"""Final values: what people read, taken from merged partials at the very end.

    count, sum, min, max    of the points (of a percent, a rate or an apdex: of their scores)
    avg, cpm                sum ÷ count; count ÷ minutes of the bucket
    value                   what the metric's function says, see `penstock.model.function`
    p50 … p99               of a percentile, else null

Nearest rank: p95 is the smallest value that at least 95 % of the points do not exceed.
"""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.distinct import estimate_of
from penstock.model.exponential import middles_of
from penstock.model.function import COUNT_PER_MINUTE, MEAN, RANKS, Final, functions_in
from penstock.model.level import Level
from penstock.model.partial import SERIES, STATES, group_starts, merged

ORDER = [("metric", "ascending"), ("function", "ascending"), ("entity", "ascending"), ("bucket", "ascending")]


def with_finals(partials: pa.Table, level: Level, ranks: Sequence[float] = RANKS) -> pa.Table:
    """One row per series and bucket with its final values, sorted by series and bucket."""
    partials = merged(partials)
    partials = partials.filter(pc.is_null(partials["record"]))
    grouped = partials.group_by(list(SERIES), use_threads=False).aggregate([(s.name, s.merge) for s in STATES])
    columns = [grouped[name] for name in SERIES] + [grouped[f"{s.name}_{s.merge}"] for s in STATES]
    rows = pa.table(columns, names=[*SERIES, *(s.name for s in STATES)])
    rows = rows.append_column("avg", _final(rows, MEAN, level))
    rows = rows.append_column("cpm", _final(rows, COUNT_PER_MINUTE, level))
    rows = rows.append_column("value", _values(rows, level))
    return _with_ranks(_with_estimates(rows, partials), partials, ranks).sort_by(ORDER)


def _final(rows: pa.Table, final: Final, level: Level) -> Any:
    value = _as_double(rows[final.state])
    if final.per == "minutes":
        value = pc.divide(value, float(level.minutes))
    elif final.per == "count":
        # A rate whose denominator matched nothing has no value.
        count = _as_double(rows["count"])
        value = pc.divide(value, pc.if_else(pc.equal(count, 0.0), pa.scalar(None, pa.float64()), count))
    return pc.multiply(value, final.factor)


def _values(rows: pa.Table, level: Level) -> Any:
    """Each row by its own function; a table holds few functions, so it is one pass for each."""
    values = pa.nulls(rows.num_rows, pa.float64())
    for text, function in functions_in(rows["function"]):
        if final := function.spec.final:
            values = pc.if_else(pc.equal(rows["function"], text), _final(rows, final, level), values)
    return values


def _with_estimates(rows: pa.Table, partials: pa.Table) -> pa.Table:
    """The values of distinct counts, which are no matter of one state."""
    for text, function in functions_in(rows["function"]):
        if function.spec.counts_distinct:
            found = estimates(partials.filter(pc.equal(partials["function"], text)), int(function.parameters[0]))
            rows = rows.join(found, keys=list(SERIES), join_type="left outer")
            values = pc.coalesce(rows["estimate"], rows["value"])
            rows = rows.set_column(rows.schema.get_field_index("value"), "value", values).drop_columns(["estimate"])
    return rows


def estimates(partials: pa.Table, lg_k: int) -> pa.Table:
    """For each series and bucket of merged distinct counts how many there are."""
    found = partials.group_by(list(SERIES), use_threads=False).aggregate([("part", "list"), ("max", "list")])
    registers = zip(found["part_list"], found["max_list"])
    values = [estimate_of(parts.values.to_numpy(), ranks.values.to_numpy(), lg_k) for parts, ranks in registers]
    return found.select(list(SERIES)).append_column("estimate", pa.array(values, pa.float64()))


def _with_ranks(rows: pa.Table, partials: pa.Table, ranks: Sequence[float]) -> pa.Table:
    pieces = [
        percentiles(partials.filter(pc.equal(partials["function"], text)), int(function.parameters[0]), ranks)
        for text, function in functions_in(partials["function"])
        if function.spec.has_percentiles
    ]
    names = [rank_name(rank) for rank in ranks]
    if not pieces:
        for name in names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, pa.float64()))
        return rows
    columns = [*rows.column_names, *names]
    rows = rows.join(pa.concat_tables(pieces), keys=list(SERIES), join_type="left outer").select(columns)
    for name in names:
        # Never outside of what the series really holds. Of a null there is no greater: it stays one.
        known = pc.is_valid(rows[name])
        within = pc.min_element_wise(pc.max_element_wise(rows[name], rows["min"]), rows["max"])
        clamped = pc.if_else(known, within, pa.scalar(None, pa.float64()))
        rows = rows.set_column(rows.schema.get_field_index(name), name, clamped)
    return rows


def _as_double(column: Any) -> Any:
    """Numbers as doubles; of a count beyond 2**53 the nearest."""
    return column.cast(pa.float64(), safe=False)


def rank_name(rank: float) -> str:
    """p95 for 95, p99_9 for 99.9: a name that needs no quotes in SQL."""
    return f"p{rank:g}".replace(".", "_")


def percentiles(partials: pa.Table, scale: int, ranks: Sequence[float]) -> pa.Table:
    """For each series and bucket of merged percentile partials the value at each rank, within the scale's error."""
    ordered = partials.select([*SERIES, "part", "count"]).sort_by([*ORDER, ("part", "ascending")])
    position = pa.array(range(ordered.num_rows), pa.int64())
    first = pc.fill_null_forward(pc.if_else(group_starts(ordered, SERIES), position, pa.scalar(None, pa.int64())))
    running = pc.cumulative_sum(ordered["count"]).combine_chunks()
    before = pc.subtract(running.take(first), ordered["count"].combine_chunks().take(first))
    upto = pc.subtract(running, before)
    ordered = ordered.append_column("upto", upto)
    total = ordered.group_by(list(SERIES), use_threads=False).aggregate([("count", "sum")])
    ordered = ordered.append_column("estimate", middles_of(ordered["part"], scale))
    sums = ordered.join(total, keys=list(SERIES)).sort_by([*ORDER, ("part", "ascending")])
    found = total.select(list(SERIES))
    for rank in ranks:
        wanted = pc.max_element_wise(pc.ceil(_position(_as_double(sums["count_sum"]), rank)), 1.0)
        hit = pc.and_(
            pc.greater_equal(_as_double(sums["upto"]), wanted),
            pc.less(_as_double(pc.subtract(sums["upto"], sums["count"])), wanted),
        )
        here = sums.filter(hit).select([*SERIES, "estimate"]).rename_columns([*SERIES, rank_name(rank)])
        found = found.join(here, keys=list(SERIES), join_type="left outer")
    return found


def _position(counts: Any, rank: float) -> Any:
    """How many values are at or below the rank. Divided last: 55 / 100 is a little more than its double says."""
    return pc.divide(pc.multiply(counts, float(rank)), 100.0)


def nearest_rank(values: Sequence[float], rank: float) -> float:
    """The exact percentile of plain values: what the estimate is measured against."""
    return sorted(values)[max(1, math.ceil(len(values) * rank / 100)) - 1]
