"""Partial aggregates: any split, any order, any level of pre-merging gives the same answer."""

import math
import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import PARTIALS, TOP_N_ORDER, first_of_each, merged, of_points
from penstock.model.point import chunk_type, entity_of

Cpu = chunk_type("cpu")
points = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", 'quote"d', ""]),
        st.integers(-10 * 60_000_000, 10 * 60_000_000),
        st.floats(-1e9, 1e9, allow_nan=False),
    ),
    min_size=1,
    max_size=60,
)


def plain(rows: list[tuple[str, int, float]]) -> dict[tuple[str, int], tuple[int, float, float, float]]:
    """The aggregation as a schoolbook would do it."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for entity, time, value in rows:
        groups[(entity, time // 60_000_000)].append(value)
    return {key: (len(v), math.fsum(v), min(v), max(v)) for key, v in groups.items()}


def as_dict(partials: pa.Table) -> dict[tuple[str, int], tuple[int, float, float, float]]:
    minute = partials["bucket"].cast(pa.int64()).to_pylist()
    columns = (partials[name].to_pylist() for name in ("entity", "count", "sum", "min", "max"))
    return {(e, m // 60_000_000): (c, s, low, high) for m, e, c, s, low, high in zip(minute, *columns)}


@given(points, st.integers(1, 5), st.randoms(use_true_random=False))
def test_however_points_are_split_and_merged_the_partials_are_those_of_all_points(
    rows: list[tuple[str, int, float]], parts: int, rng: random.Random
) -> None:
    shuffled = rng.sample(rows, len(rows))
    tables = []
    for part in range(parts):
        some = shuffled[part::parts]
        if some:
            tables.append(of_points([Cpu.of(*map(list, zip(*some)))]))
    while len(tables) > 1:  # merge them pairwise in any order
        a = tables.pop(rng.randrange(len(tables)))
        b = tables.pop(rng.randrange(len(tables)))
        tables.append(merged(pa.concat_tables([a, b])))

    found, expected = as_dict(merged(tables[0])), plain(rows)

    assert found.keys() == expected.keys()
    for key, (count, total, low, high) in expected.items():
        assert found[key][0] == count
        assert found[key][1] == pytest.approx(total, rel=1e-9, abs=1e-3)  # sums of ±1e9 cancel; min and max do not
        assert found[key][2:] == (low, high)


def test_a_maximum_of_negative_values_is_negative() -> None:
    partials = of_points([Cpu.of(["a", "a"], [0, 1], [-5.0, -2.0])])
    assert partials["max"].to_pylist() == [-2.0]


def test_what_leaves_has_exactly_the_declared_schema() -> None:
    partials = of_points([Cpu.of(["a"], [0], [1.0]), Cpu.of(["b"], [0], [1.0])])
    assert partials.schema == PARTIALS
    assert merged(partials).schema == PARTIALS
    assert partials["metric"].to_pylist() == ["cpu", "cpu"]


@pytest.mark.parametrize(("level", "cpm"), [(Level.MINUTE, 120.0), (Level.HOUR, 2.0), (Level.DAY, 120 / 1440)])
def test_the_rate_per_minute_divides_by_the_minutes_of_the_bucket(level: Level, cpm: float) -> None:
    partials = of_points([Cpu.of(["a"] * 120, list(range(120)), [2.0] * 120)])
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
