"""Packed percentiles: nothing is lost by putting the buckets of a series into one list."""

from collections import Counter

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.exponential import GREATEST_SCALE, OFFSET
from penstock.model.function import Function
from penstock.model.packed import COUNT_BITS, LONG, PACKED, packed_partials
from penstock.model.partial import merged, partials_of_columns

VALUES = st.floats(allow_nan=False, allow_infinity=False, width=32)


def partials(values: list[float], function: str, *, apart: bool) -> pa.Table:
    times = pa.array([n * 7_000_000 for n in range(len(values))], pa.timestamp("us", tz="UTC"))
    entities = pa.array([f"e{n % 2}" for n in range(len(values))])
    rows = partials_of_columns("m", Function.parse(function), entities, times, pa.array(values, pa.float64()))
    return rows if apart else merged(rows)


def entries(row: dict[str, object]) -> Counter[int]:
    found: Counter[int] = Counter()
    parts = row["parts"]
    assert isinstance(parts, list)
    for entry in parts:
        found[entry >> COUNT_BITS] += entry & ((1 << COUNT_BITS) - 1)
    return found


@given(st.lists(VALUES, min_size=1, max_size=60), st.booleans())
def test_a_packed_series_has_the_counts_of_its_parts(values: list[float], apart: bool) -> None:
    rows = partials(values, "percentile", apart=apart)
    expected: dict[tuple[str, object], Counter[int]] = {}
    for row in merged(rows).to_pylist():
        expected.setdefault((row["entity"], row["bucket"]), Counter())[row["part"]] += row["count"]
    found = packed_partials(rows)
    assert found.schema == PACKED
    assert {(row["entity"], row["bucket"]): entries(row) for row in found.to_pylist()} == expected
    assert sum(found["count"].to_pylist()) == len(values)


def test_lists_are_in_the_order_of_the_values_once_sorted() -> None:
    values = [-1000.0, -0.5, 0.0, 1e-300, 0.5, 1000.0]
    [row] = packed_partials(partials([*values], "percentile(9)", apart=True).slice(0, 6).set_column(
        2, "entity", pa.array(["e"] * 6)
    )).to_pylist()  # fmt: skip
    parts = [entry >> COUNT_BITS for entry in sorted(row["parts"])]
    assert parts == sorted(parts)
    assert parts[2] == 0


def test_the_greatest_part_fits_beside_its_count() -> None:
    greatest = OFFSET + (1 << GREATEST_SCALE) * 1074
    assert greatest << COUNT_BITS < 2**63


def test_a_count_that_does_not_fit_is_the_greatest_that_does_and_not_another_part() -> None:
    rows = partials([5.0], "percentile", apart=True)
    rows = rows.set_column(rows.schema.get_field_index("count"), "count", pa.array([3 << COUNT_BITS]))
    [row] = packed_partials(rows).to_pylist()
    assert row["count"] == 3 << COUNT_BITS
    assert entries(row) == {rows["part"][0].as_py(): (1 << COUNT_BITS) - 1}


def test_long_lists_have_their_counts_added_up_first() -> None:
    rows = partials([5.0] * 4 * LONG, "percentile", apart=True)
    same_minute = rows.set_column(3, rows.schema.field("bucket"), pa.repeat(rows["bucket"][0], rows.num_rows))
    assert [len(row["parts"]) for row in packed_partials(same_minute).to_pylist()] == [1, 1]


def test_other_functions_and_mixtures_keep_their_rows_and_have_no_list() -> None:
    mixed = pa.concat_tables([partials([1.0, 2.0], name, apart=False) for name in ("avg", "percentile", "latest")])
    rows = packed_partials(mixed).to_pylist()
    assert Counter(row["function"] for row in rows) == {"avg": 2, "percentile(6)": 2, "latest": 2}
    assert all((row["parts"] is not None) == row["function"].startswith("percentile") for row in rows)
