"""Partial aggregates, and the types and texts that they are made of; how they merge: test_function."""

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.chunk_partials import partials_of_chunks
from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import TOP_N_ORDER, first_of_each
from penstock.model.point import PointKind, chunk_type, entity_of

Cpu = chunk_type("cpu")


@pytest.mark.parametrize(("level", "cpm"), [(Level.MINUTE, 120.0), (Level.HOUR, 2.0), (Level.DAY, 120 / 1440)])
def test_the_rate_per_minute_divides_by_the_minutes_of_the_bucket(level: Level, cpm: float) -> None:
    partials = partials_of_chunks([Cpu.of(["a"] * 120, list(range(120)), [2.0] * 120)])
    row: dict[str, Any] = with_finals(partials, level).to_pylist()[0]
    assert row["cpm"] == pytest.approx(cpm)
    assert row["avg"] == 2.0


def test_one_metric_has_one_type() -> None:
    assert chunk_type("cpu") is Cpu
    assert chunk_type("other") is not Cpu
    assert chunk_type("other").metric == "other"
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"null character|surrogates"):
            chunk_type(name)


def test_a_chunk_of_other_columns_or_types_is_refused() -> None:
    for kind in PointKind:
        with pytest.raises(ValueError, match="points of 'cpu' must have the schema"):
            chunk_type("cpu", kind)(pa.table({"entity": ["{}"], "time": [0], "value": ["one"]}))


def test_labels_in_any_order_are_one_entity() -> None:
    assert entity_of({"b": "1", "a": "ü,="}) == entity_of({"a": "ü,=", "b": "1"}) == '{"a":"ü,=","b":"1"}'


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 2.0, math.nan]), st.sampled_from("xyz"))),
    st.integers(1, 3),
)
def test_the_first_of_each_group_are_those_of_a_sort(rows: list[tuple[str, float, str]], n: int) -> None:
    columns: Any = zip(*rows) if rows else ([], [], [])
    types = (pa.string(), pa.float64(), pa.string())
    table = pa.table([pa.array(list(c), t) for c, t in zip(columns, types)], names=["metric", "max", "record"])
    expected = []
    for metric in "ab":
        members = sorted((math.inf if math.isnan(v) else -v, record) for of, v, record in rows if of == metric)
        expected += [(metric, record) for _, record in members[:n]]

    found = first_of_each(table, ["metric"], TOP_N_ORDER, n)

    assert list(zip(found["metric"].to_pylist(), found["record"].to_pylist())) == expected
