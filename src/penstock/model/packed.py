"""Percentile partials with one row per series and bucket: its exponential buckets as one list of numbers.

    parts = [part << 40 | count, …]     in any order; counts of a part that occurs twice add up

One row travels instead of one for every exponential bucket; with few points in a series and minute there are as many
buckets as points. Lists of one series merge by concatenation. Sorted, they are in the order of the values. The list is
null for other functions.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.function import functions_in
from penstock.model.grouping import grouped_partials, one_array
from penstock.model.partial import PARTIALS, SERIES, STATES, merged

COUNT_BITS = 40  # a trillion points in one bucket, and room for the greatest part
LONG = 100  # entries of a list from which on adding up the counts of equal parts first is worth it
# Not nullable: Spark then sorts lists as plain numbers, not as objects.
_LIST = pa.list_(pa.field("element", pa.int64(), nullable=False))
PACKED = PARTIALS.remove(PARTIALS.get_field_index("record")).append(pa.field("parts", _LIST))


def packed_partials(partials: pa.Table) -> pa.Table:
    """Packed partials. They may be merged or not, encoded or not; records of a top-n are left out."""
    if partials["record"].null_count < partials.num_rows:
        partials = partials.filter(pc.is_null(partials["record"]))
    functions = list(functions_in(partials["function"]))
    ranked = pa.array([text for text, function in functions if function.spec.has_percentiles], pa.string())
    if len(ranked) == len(functions):
        return _packed(partials)
    if not len(ranked):
        return _unpacked(partials)
    is_ranked = pc.is_in(partials["function"].cast(pa.string()), ranked)
    return pa.concat_tables([_packed(partials.filter(is_ranked)), _unpacked(partials.filter(pc.invert(is_ranked)))])


def _packed(partials: pa.Table) -> pa.Table:
    found = _listed(partials)
    return found if partials.num_rows <= LONG * found.num_rows else _listed(merged(partials))


def _listed(partials: pa.Table) -> pa.Table:
    counts = pc.min_element_wise(partials["count"], _MOST)  # more would overflow into the part
    entry = pc.bit_wise_or(pc.shift_left(partials["part"], _SHIFT), counts)
    raw = partials.append_column("parts", entry)
    found = grouped_partials(raw, SERIES, [*((state.name, state.merge) for state in STATES), ("parts", "list")])
    columns: dict[str, Any] = {name: found[name] for name in SERIES}
    columns |= {state.name: found[f"{state.name}_{state.merge}"] for state in STATES}
    columns |= {
        "part": pa.repeat(pa.scalar(0, pa.int64()), found.num_rows),
        "parts": _not_nullable(found["parts_list"]),
    }
    return pa.table([columns[name] for name in PACKED.names], names=PACKED.names).cast(PACKED)


def _unpacked(partials: pa.Table) -> pa.Table:
    rows = merged(partials).drop_columns(["record"])
    return rows.append_column("parts", pa.nulls(rows.num_rows, _LIST)).cast(PACKED)


def _not_nullable(lists: Any) -> Any:
    """Lists as the type without nulls."""
    array = one_array(lists)
    return pa.ListArray.from_arrays(array.offsets, array.values, type=_LIST)


_SHIFT = pa.scalar(COUNT_BITS, pa.int64())
_MOST = pa.scalar((1 << COUNT_BITS) - 1, pa.int64())
