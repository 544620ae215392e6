"""Metric functions: exact over any split and order, percentiles within their stated error."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.model.exponential import (
    percentile_part_middles,
    percentile_parts_of,
    percentile_relative_error,
    percentile_scale_for,
)
from penstock.model.finals import nearest_rank, rank_name, with_finals
from penstock.model.function import RANKS, Function
from penstock.model.level import Level
from penstock.model.partial import merged, partials_of_columns
from tests.examples import examples

Point = tuple[str, int, float]  # entity, microseconds, value
MINUTE_US = 60_000_000
FUNCTIONS = [
    "avg", "sum", "count", "min", "max", "cpm", "sum_per_min", "apdex(100)", "percentile(6)", "histogram(-1,0,10,500)",
    "latest",
]  # fmt: skip
points = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", ""]),
        st.integers(-3 * MINUTE_US, 3 * MINUTE_US),
        st.one_of(st.integers(-1000, 1000).map(float), st.floats(-1e9, 1e9, allow_nan=False)),
    ),
    min_size=1,
    max_size=50,
)


def partials_of(function: Function, rows: Sequence[Point]) -> pa.Table:
    values = pa.array([value for _, _, value in rows], pa.float64())
    times = pa.array([time for _, time, _ in rows], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    entities = pa.array([entity for entity, _, _ in rows], pa.string())
    return merged(partials_of_columns("m", function, entities, times, function.scores(values)))


def plain(function: Function, rows: list[Point]) -> float:
    """The final value of one series and minute as a schoolbook would work it out."""
    values = [value for _, _, value in rows]
    match function.name:
        case "sum" | "sum_per_min":
            return math.fsum(values)
        case "count" | "cpm":
            return float(len(values))
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "apdex":
            satisfied = sum(value <= 100 for value in values)
            tolerating = sum(100 < value <= 400 for value in values)
            return (satisfied + tolerating / 2) / len(values)
        case "latest":
            return max((time, value) for _, time, value in rows)[1]
        case _:
            return math.fsum(values) / len(values)


def merged_anyhow(tables: list[pa.Table], rng: random.Random) -> pa.Table:
    """Merged pairwise, in any order."""
    while len(tables) > 1:
        pair = [tables.pop(rng.randrange(len(tables))) for _ in range(2)]
        tables.append(merged(pa.concat_tables(pair)))
    return tables[0]


@pytest.mark.parametrize("text", FUNCTIONS)
@settings(max_examples=examples(25))
@given(rows=points, parts=st.integers(1, 5), rng=st.randoms(use_true_random=False))
def test_however_points_are_split_and_merged_the_final_value_is_that_of_all_points(
    text: str, rows: list[Point], parts: int, rng: random.Random
) -> None:
    function = Function.parse(text)
    shuffled = rng.sample(rows, len(rows))
    tables = [partials_of(function, some) for part in range(parts) if (some := shuffled[part::parts])]
    groups: dict[tuple[str, int], list[Point]] = defaultdict(list)
    for row in rows:
        groups[(row[0], row[1] // MINUTE_US)].append(row)

    found = with_finals(merged_anyhow(tables, rng), Level.MINUTE).to_pylist()

    assert len(found) == len(groups)
    for row in found:
        members = groups[(row["entity"], int(row["bucket"].timestamp()) // 60)]
        assert row["value"] == pytest.approx(plain(function, members), rel=1e-9, abs=1e-3)
        if function.name == "percentile":
            for rank in RANKS:
                exact = nearest_rank([value for _, _, value in members], rank)
                assert row[f"p{rank}"] == pytest.approx(exact, rel=percentile_relative_error(6) + 1e-9, abs=1e-300)


@settings(max_examples=examples(40))
@given(rows=points, rng=st.randoms(use_true_random=False))
def test_a_histogram_counts_each_value_under_the_first_bound_that_it_does_not_exceed(
    rows: list[Point], rng: random.Random
) -> None:
    function, bounds = Function.parse("histogram(-1,0,10,500)"), (-1, 0, 10, 500)
    cut = rng.randrange(len(rows) + 1)
    tables = [partials_of(function, some) for some in (rows[:cut], rows[cut:]) if some]

    counts: dict[int, int] = defaultdict(int)
    for row in merged(pa.concat_tables(tables)).to_pylist():
        counts[row["part"]] += row["count"]
    expected: dict[int, int] = defaultdict(int)
    for _, _, value in rows:
        expected[sum(value > bound for bound in bounds)] += 1
    assert counts == expected


@settings(max_examples=examples(60))
@given(points, st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_top_n_keeps_exactly_the_greatest_records_whatever_order_they_come_in(
    rows: list[Point], n: int, parts: int, rng: random.Random
) -> None:
    function = Function("top_n", (float(n),))

    def of(some: list[Point]) -> pa.Table:
        entities, times, values = zip(*some)
        moments = pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        one = pa.array(["svc"] * len(some))
        records = pa.array(list(entities), pa.string())
        return partials_of_columns("m", function, one, moments, pa.array(values, pa.float64()), records=records)

    best: dict[int, dict[str, float]] = defaultdict(dict)
    for record, time, value in rows:
        minute = best[time // MINUTE_US]
        minute[record] = max(value, minute.get(record, -math.inf))
    expected = {
        (minute, record, value)
        for minute, records in best.items()
        for value, record in sorted(((-v, r) for r, v in records.items()))[:n]
        for value in (-value,)
    }

    shuffled = rng.sample(rows, len(rows))
    tables = [merged(of(some)) for part in range(parts) if (some := shuffled[part::parts])]
    found = merged(merged_anyhow(tables, rng)).to_pylist()

    assert {(int(row["bucket"].timestamp()) // 60, row["record"], row["max"]) for row in found} == expected


def test_a_rate_divides_what_matches_one_condition_by_what_matches_another() -> None:
    times = pa.array([0, 1, 2, 3], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    numerator, denominator = pa.array([1.0, 0.0, 1.0, 0.0]), pa.array([1, 1, 1, 0], pa.int64())
    entities = pa.array(["a", "a", "a", "b"])
    states = {"count": denominator, "sum": numerator, "min": numerator, "max": numerator}
    partials = partials_of_columns("m", Function("rate"), entities, times, numerator, states=states)

    values = {row["entity"]: row["value"] for row in with_finals(partials, Level.HOUR).to_pylist()}

    assert values == {"a": pytest.approx(200 / 3), "b": None}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_value_lies_in_its_bucket_within_the_relative_error(value: float) -> None:
    part = percentile_parts_of(pa.array([value], pa.float64()), 6)
    middle = percentile_part_middles(part, 6)[0].as_py() if value else 0.0
    if abs(value) > 1e-300 and abs(value) < 1e300:
        assert middle == pytest.approx(value, rel=percentile_relative_error(6) * (1 + 1e-6))
    assert (part[0].as_py() > 0) == (value > 0)
    assert (part[0].as_py() == 0) == (value == 0)


def test_the_scale_follows_from_the_relative_error_that_is_asked_for() -> None:
    assert percentile_scale_for(0.01) == 6
    assert percentile_scale_for(0.02) == 5
    with pytest.raises(ConfigError, match=r"relative_error must be at least 0\.00068, got 0\.0001"):
        percentile_scale_for(0.0001)


@pytest.mark.parametrize("text", [*FUNCTIONS, "percent", "rate", "top_n(20)", "histogram(0.1,12345.678,1e+07)"])
def test_a_functions_text_reads_back(text: str) -> None:
    assert str(Function.parse(text)) == str(Function.parse(str(Function.parse(text))))
    assert Function.parse(str(Function.parse(text))) == Function.parse(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("median", "function must be one of avg, sum"),
        ("apdex", "apdex: needs a threshold above 0"),
        ("apdex(-1)", "needs a threshold above 0"),
        ("histogram(2,1)", "needs ascending bounds"),
        ("percentile(0.5)", "whole scale of 0 to 9"),
        ("top_n(0)", "at least 1"),
        ("avg(1)", "takes no parameters"),
        ("avg(x)", "numbers in its brackets"),
        ("avg(", "a name or name"),
    ],
)
def test_a_function_that_makes_no_sense_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Function.parse(text)


def test_states_of_different_functions_of_one_metric_never_mix() -> None:
    tables = [partials_of(Function.parse(text), [("a", 0, 7.0)]) for text in ("apdex(5)", "apdex(7)", "avg")]
    rows = with_finals(pa.concat_tables(tables), Level.MINUTE).to_pylist()
    assert {row["function"]: row["value"] for row in rows} == {"apdex(5)": 0.5, "apdex(7)": 1.0, "avg": 7.0}


def test_rows_with_and_without_a_record_merge_side_by_side() -> None:
    moment = pa.array([0], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    one, value = pa.array(["e"]), pa.array([1.0])
    tables = [
        partials_of_columns("m", Function.parse("top_n(2)"), one, moment, value, records=pa.array(["r"])),
        partials_of_columns("m", Function.parse("avg"), one, moment, value),
    ]
    rows = merged(pa.concat_tables(tables * 2)).to_pylist()
    assert {(row["function"], row["record"], row["count"]) for row in rows} == {("top_n(2)", "r", 2), ("avg", None, 2)}


@pytest.mark.parametrize("rank", [7, 14, 28, 29, 55, 56, 57, 58, 99.9])
def test_a_percentile_at_any_rank_is_within_its_error_of_an_independent_count(rank: float) -> None:
    """Not of our own nearest rank: 55 / 100 × 100 is 55.00000000000001 in doubles, and would be the 56th value."""
    for count in (10, 100, 1000):
        values = [float(n) for n in range(1, count + 1)]
        rows = with_finals(partials_of(Function.parse("percentile"), [("e", 0, v) for v in values]), Level.DAY, [rank])
        exact = values[max(1, math.ceil(Fraction(str(rank)) * count / 100)) - 1]
        assert rows[rank_name(rank)][0].as_py() == pytest.approx(exact, rel=percentile_relative_error(6) * 1.000001)
        assert nearest_rank(values, rank) == exact


@pytest.mark.parametrize("count", [2**53 + 1, 2**62])
def test_a_count_that_no_double_holds_can_still_be_read(count: int) -> None:
    states = {"count": pa.array([count]), **{name: pa.array([1.0]) for name in ("sum", "min", "max")}}
    times = pa.array([0], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    for text in ("avg", "cpm", "percentile"):
        made = partials_of_columns("m", Function.parse(text), pa.array(["e"]), times, pa.array([1.0]), states=states)
        (row,) = with_finals(made, Level.MINUTE).to_pylist()
        assert row["count"] == count
        assert row["cpm"] == pytest.approx(count)


def test_whole_parameters_travel_in_digits() -> None:
    assert str(Function("top_n", (1_000_000.0,))) == "top_n(1000000)"
    assert str(Function("histogram", (-1e6, 0.25, 1e300))) == "histogram(-1000000,0.25,1e+300)"


@pytest.mark.parametrize(("name", "parameter"), [("histogram", math.nan), ("histogram", math.inf), ("apdex", math.inf)])
def test_parameters_that_are_no_numbers_are_refused(name: str, parameter: float) -> None:
    with pytest.raises(ConfigError, match=f"function {name}: needs .*, got (nan|inf)"):
        Function(name, (parameter,))
