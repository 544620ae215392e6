"""Group-bys over numbers give what a schoolbook's would, whatever the keys look like."""

import math
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.model.grouping import grouped_partials

KEYS = ("entity", "bucket", "part", "record")
AGGREGATES = [("count", "sum"), ("value", "count"), ("value", "sum"), ("value", "min"), ("value", "max")]
FAR = 2**62  # parts so far apart that no array has a place for each

Row = tuple[Any, ...]  # entity, bucket, part, record, count, value
rows_of = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", ""]),
        st.one_of(st.integers(-3, 3).map(lambda n: n * 60_000_000), st.integers(-(10**15), 10**15)),
        st.one_of(st.integers(-2, 2), st.sampled_from([FAR, -FAR])),
        st.sampled_from([None, "x", "y"]),
        st.integers(0, 2**40),
        st.floats(-1e9, 1e9),
    ),
    min_size=1,
    max_size=40,
)


def table_of(rows: list[Row], *, encoded: bool = False, pieces: int = 1) -> pa.Table:
    types = (pa.string(), pa.timestamp("us", "UTC"), pa.int64(), pa.string(), pa.int64(), pa.float64())
    schema = pa.schema(list(zip((*KEYS, "count", "value"), types)))
    tables = []
    for piece in range(pieces):
        columns = zip(*rows[piece::pieces]) if rows[piece::pieces] else [()] * 6
        table = pa.table([pa.array(c, field.type) for c, field in zip(columns, schema)], schema=schema)
        for text in ("entity", "record") if encoded else ():
            table = table.set_column(schema.get_field_index(text), text, table[text].dictionary_encode())
        tables.append(table)
    return pa.concat_tables(tables)


def schoolbook(rows: list[Row]) -> dict[Row, list[Row]]:
    groups = defaultdict(list)
    for *key, count, value in rows:
        groups[tuple(key)].append((count, value))
    return groups


def found_in(table: pa.Table) -> dict[Row, Row]:
    table = table.set_column(1, "bucket", table["bucket"].cast(pa.int64()))
    rows = [tuple(row.values()) for row in table.to_pylist()]
    found = {row[: len(KEYS)]: row[len(KEYS) :] for row in rows}
    assert len(found) == len(rows), "a key occurs twice"
    return found


@given(rows_of, st.booleans(), st.integers(1, 3))
@example([("a", 0, 0, None, 2**62, 0.0), ("a", 0, 0, None, 1, 0.0)], False, 1)  # exact where a double is not
@example([("a", 0, 0, "x", 1, 1.0), ("b", 2**30 * 60_000_000, 2**31 - 1, "y", 1, 2.0)], False, 1)  # beyond 63 bits
def test_groups_are_those_of_a_schoolbook(rows: list[Row], encoded: bool, pieces: int) -> None:
    table = grouped_partials(table_of(rows, encoded=encoded, pieces=pieces), KEYS, AGGREGATES)

    found, expected = found_in(table), schoolbook(rows)
    assert found.keys() == expected.keys()
    for key, members in expected.items():
        counts, values = zip(*members)
        count, points, total, least, greatest = found[key]
        assert (count, points, least, greatest) == (sum(counts), len(values), min(values), max(values))
        assert math.isclose(total, math.fsum(values), rel_tol=1e-9, abs_tol=1e-6)
    assert table.schema.types[:4] == [
        pa.dictionary(pa.int32(), pa.string()), pa.timestamp("us", "UTC"), pa.int64(),
        pa.dictionary(pa.int32(), pa.string()),
    ]  # fmt: skip


@pytest.mark.parametrize("missing", [math.nan, None])
def test_what_is_no_number_is_left_out_of_the_least_and_greatest(missing: float | None) -> None:
    rows = [("a", 0, 0, None, 1, 1.0), ("a", 0, 0, None, 1, missing), ("a", 0, 0, None, 1, 3.0)]

    [(_, _, _, least, greatest)] = found_in(grouped_partials(table_of(rows), KEYS, AGGREGATES)).values()

    assert (least, greatest) == (1.0, 3.0)


def test_lists_hold_every_row_of_their_group() -> None:
    rows = [("ab"[n % 2], 0, 0, None, n, 0.0) for n in range(6)]

    found = found_in(grouped_partials(table_of(rows), KEYS, [("count", "list")]))

    assert {key[0]: sorted(values) for key, (values,) in found.items()} == {"a": [0, 2, 4], "b": [1, 3, 5]}
