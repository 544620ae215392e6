"""Partial aggregates: states that merge, whatever the order and grouping, and are divided only at the end.

One row is one part of one series in one bucket of time. A series is a metric, its function and an entity. Most
functions have one part (0); a percentile has one for each exponential bucket, a histogram one for each bound, `latest`
one for each time, a distinct count one for each register. A record is what a top-n keeps beside the value. Every other
column has a commutative, associative merge, named here once. The edge runs it on arrays and Spark as a built-in
function of the same name, so both agree.

    points ─of_columns─► partials ──merged──► partials ──with_finals──► final values
                              ▲                    │
                              └────── again ───────┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.function import Function, functions_in, is_function
from penstock.model.grouping import among_the_greatest, group_starts, grouped_partials


@dataclass(frozen=True, slots=True)
class PartialColumn:
    """One state of a partial aggregate and how two of them become one."""

    name: str
    type: Any  # an Arrow type
    merge: Literal["sum", "min", "max"]


SERIES = ("metric", "function", "entity", "bucket")
IDENTITY = (*SERIES, "part", "record")
STATES = (
    PartialColumn("count", pa.int64(), "sum"),
    PartialColumn("sum", pa.float64(), "sum"),
    PartialColumn("min", pa.float64(), "min"),
    PartialColumn("max", pa.float64(), "max"),
)
PARTIALS = pa.schema(
    [
        pa.field("metric", pa.string()),
        pa.field("function", pa.string()),
        pa.field("entity", pa.string()),
        pa.field("bucket", pa.timestamp("us", tz="UTC")),
        pa.field("part", pa.int64()),
        pa.field("record", pa.string()),
        *(pa.field(state.name, state.type) for state in STATES),
    ]
)
TOP_N_ORDER = (("max", "descending"), ("record", "ascending"))  # ties go to the record that sorts first
# Typed: for plain numbers pyarrow searches for pandas and dateutil, which takes longer than most of the rest.
_ZERO, _ONE = pa.scalar(0, pa.int64()), pa.scalar(1, pa.int64())
TEXTS = ("metric", "function", "entity", "record")
CODED = pa.dictionary(pa.int32(), pa.string())
# Texts as codes: how partials travel, because a text is then written once for all rows that have it.
ENCODED = pa.schema([field.with_type(CODED) if field.name in TEXTS else field for field in PARTIALS])


def partials_of_columns(
    metric: str,
    function: Function,
    entities: Any,
    times: Any,
    values: Any,
    *,
    states: Mapping[str, Any] | None = None,
    records: Any = None,
    parts: Any = None,
) -> pa.Table:
    """Points as partials of one metric and function: an encoded row for each, to be merged.

    `states` replace a count of 1 and the value: those of a distribution, or of a score that does not count every point.
    `parts` are given where neither value nor time says the part.
    """
    rows = len(values)
    if states is None:
        states = {"count": pa.repeat(_ONE, rows), "sum": values, "min": values, "max": values}
    if parts is None:
        parts = function.parts(values, times) if function.spec.has_parts else pa.repeat(_ZERO, rows)
    found = {
        "metric": _repeated(metric, rows),
        "function": _repeated(str(function), rows),
        "entity": entities,
        # Without its zone: rounding in UTC needs no calendar, and asking for one costs as much as a group-by.
        "bucket": pc.floor_temporal(pc.cast(times, pa.timestamp("us")), unit="minute"),
        "part": parts,
        "record": pa.nulls(rows, CODED) if records is None else records,
        **states,
    }
    return encoded_partials(pa.table([found[name] for name in PARTIALS.names], names=PARTIALS.names))


def _repeated(text: str, rows: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows), pa.array([text], pa.string()))


def merged(partials: pa.Table) -> pa.Table:
    """One row per identity, in whatever order its partials come; their texts may be encoded."""
    return merged_encoded(partials).cast(PARTIALS)


def merged_encoded(partials: pa.Table) -> pa.Table:
    """`merged` with encoded texts."""
    if not partials.num_rows:
        return encoded_partials(partials)
    found = grouped_partials(partials, IDENTITY, [(state.name, state.merge) for state in STATES])
    columns = [found[name] for name in IDENTITY] + [found[f"{state.name}_{state.merge}"] for state in STATES]
    return _pruned(pa.table(columns, names=PARTIALS.names).cast(ENCODED))


def encoded_partials(partials: pa.Table) -> pa.Table:
    """Partials with their texts as codes, whether they were before or not."""
    for text in TEXTS:
        column = partials[text]
        if not pa.types.is_dictionary(column.type):
            partials = partials.set_column(PARTIALS.get_field_index(text), text, column.dictionary_encode())
    return partials.cast(ENCODED)


def _pruned(partials: pa.Table) -> pa.Table:
    """Without older times of `latest` and records beyond the first n of a top-n.

    The first of a union are the first of the parts' first, so leaving the others out changes no answer.
    """
    functions = [function for _, function in functions_in(partials["function"])]
    if any(function.spec.keeps_newest for function in functions):
        is_newest = is_function(partials["function"], lambda spec: spec.keeps_newest)
        rows = partials.filter(is_newest)
        rows = rows.filter(among_the_greatest(rows, SERIES, "part", 1))  # no time is there twice
        partials = pa.concat_tables([partials.filter(pc.invert(is_newest)), rows])
    pruned = [function for function in functions if function.spec.keeps_records]
    if not pruned:
        return partials
    partials = partials.cast(PARTIALS)
    kept = partials.filter(pc.invert(pc.is_in(partials["function"], pa.array(map(str, pruned), pa.string()))))
    pieces = [kept]
    for function in pruned:
        rows = partials.filter(pc.equal(partials["function"], pa.scalar(str(function), pa.string())))
        pieces.append(first_of_each(rows, SERIES, TOP_N_ORDER, int(function.parameters[0])))
    return encoded_partials(pa.concat_tables(pieces))


def first_of_each(table: pa.Table, keys: Sequence[str], order: Sequence[tuple[str, str]], n: int) -> pa.Table:
    """The first `n` rows, by `order`, of each group of equal `keys`; sorted by keys and order.

    The first column of the order holds numbers, and is descending.
    """
    if not table.num_rows:
        return table
    column, direction = order[0]
    assert direction == "descending"
    table = table.filter(among_the_greatest(table, keys, column, n))
    table = table.sort_by([*((key, "ascending") for key in keys), *order])
    starts = group_starts(table, keys)
    sizes = np.diff(np.r_[starts, table.num_rows])
    return table.filter(pa.array(np.arange(table.num_rows) - np.repeat(starts, sizes) < n))
