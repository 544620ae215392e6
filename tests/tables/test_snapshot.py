"""The tables as they are this second: any reader gets what one plain aggregation of all points gives."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.model.finals import with_finals
from penstock.model.function import FUNCTIONS, Function
from penstock.model.level import Level
from penstock.model.partial import SERIES, merged, partials_of_columns
from penstock.tables.labels import entity_from_table_labels
from penstock.tables.port import TOP_N, TableBatch, Tables, open_tables
from penstock.tables.snapshot import VIEW_SCHEMAS, Wanted, plan_pieces, read_snapshot
from penstock.tables.table_rows import RECORDS, VALUES
from tests.examples import examples
from tests.tables.adding import add
from tests.tables.test_layout import TEXTS, some_points

START = datetime(2026, 11, 1, 23, tzinfo=UTC)
COMPARED = [*SERIES, "count", "sum", "min", "max", *VALUES]
Point = tuple[str, str, int, float, int]  # function, entity, second, value, batch
points_of_any_kind = st.lists(
    st.tuples(
        st.sampled_from(sorted(set(FUNCTIONS) - {"top_n"})),
        st.sampled_from(('{"shop":"a"}', '{"shop":"b"}', "no labels")),
        st.integers(0, 2 * 3600),
        st.floats(-50, 50),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=60,
)


def partials_of(points: list[Point]) -> pa.Table:
    made = []
    for name, entity, second, value, _ in points:
        times = pa.array([START + timedelta(seconds=second)], pa.timestamp("us", tz="UTC"))
        more = {"parts": pa.array([second % 16])} if name == "distinct" else {}
        taken = pa.array([float(second % 20 + 1)]) if name == "distinct" else pa.array([value])
        function = Function.parse(TEXTS.get(name, name))
        made.append(partials_of_columns(name, function, pa.array([entity]), times, taken, **more))
    return merged(pa.concat_tables(made))


def batch(number: int) -> TableBatch:
    return TableBatch("src", {"w": number - 1} if number else {}, {"w": number})


def assert_truth(rows: pa.Table, points: list[Point], level: Level, *, distinct: float = 1e-6) -> None:
    """Rows of a view are those of one plain aggregation. `distinct`: how far estimates may be off."""
    expected = with_finals(partials_of(points), level).select(COMPARED)
    entities = pa.array([entity_from_table_labels(labels) for labels in rows["labels"].to_pylist()], pa.string())
    rows = rows.append_column("entity", entities).sort_by([(name, "ascending") for name in SERIES])
    is_distinct = [text.startswith("distinct") for text in expected["function"].to_pylist()]
    for name in COMPARED:
        wanted, found = expected[name].to_pylist(), rows[name].to_pylist()
        if name in SERIES:
            assert found == wanted, name
            continue
        for one, other, estimated in zip(found, wanted, is_distinct, strict=True):
            assert one == pytest.approx(other, rel=distinct if estimated else 1e-9, abs=1e-9), name


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(points_of_any_kind, st.sampled_from(("", "parquet:")), st.sets(st.integers(0, 3)))
def test_a_snapshot_is_the_truth_of_this_second_whatever_is_folded(
    points: list[Point], kind: str, folded_after: set[int]
) -> None:
    with TemporaryDirectory() as folder:
        tables = open_tables(f"{kind}{folder}/tables")
        for number in range(4):
            own = [point for point in points if point[4] == number]
            if own:
                add(tables, "minute", partials_of(own), TableBatch("src", {}, {f"w{number}": 0}))
            if number in folded_after:
                tables.compact("minute")
        assert_truth(read_snapshot(tables, "minute"), points, Level.MINUTE)


def percentiles(tables: Tables, number: int, seed: int, count: int = 400) -> None:
    points: list[Point] = [
        ("percentile", f'{{"shop":"{shop}"}}', int((moment - START).total_seconds()), value, 0)
        for shop, moment, value in some_points(seed, count)
    ]
    add(tables, "minute", partials_of(points), batch(number))


def test_only_files_that_may_hold_what_is_wanted_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tables.fold.SMALL_BYTES", 0)  # else what is over becomes one file
    tables = open_tables(str(tmp_path / "tables"))
    percentiles(tables, 0, seed=1)
    tables.compact("minute")
    percentiles(tables, 1, seed=2, count=1)

    def planned(**wanted: Any) -> list[bool]:
        return [piece.is_folded for piece in plan_pieces(tables, "minute", Wanted(**wanted))]

    assert sorted(planned()) == [False, True, True, True]  # of the hour that got a point, files are merged
    assert planned(start=START - timedelta(minutes=50), end=START - timedelta(minutes=1)) in ([True], [False])
    assert planned(start=START + timedelta(days=1)) == []
    hour = Wanted(START, START + timedelta(minutes=59), pc.field("metric") == "percentile", (("shop", ("north",)),))
    found = read_snapshot(tables, "minute", hour)
    assert found.num_rows
    assert {dict(labels)["shop"] for labels in found["labels"].to_pylist()} == {"north"}
    nothing = read_snapshot(tables, "minute", Wanted(keys=pc.field("metric") == "other"))
    assert (nothing.num_rows, nothing.schema) == (0, VIEW_SCHEMAS["minute"])


def test_entries_of_a_distribution_say_what_they_stand_for(tmp_path: Path) -> None:
    tables = open_tables(str(tmp_path / "tables"))
    points: list[Point] = [(name, "e", 0, 3.0, 0) for name in ("percentile", "histogram", "distinct", "latest", "avg")]
    add(tables, "minute", partials_of(points), batch(0))
    found = {row["metric"]: row["distribution"] for row in read_snapshot(tables, "minute").to_pylist()}
    stand_for = {metric: entries and [entry["value"] for entry in entries] for metric, entries in found.items()}
    assert stand_for.pop("percentile") == pytest.approx([3.0], rel=0.006)
    assert stand_for == {"histogram": [5.0], "distinct": [4096.0], "latest": [None], "avg": None}


def test_records_of_a_top_n_are_ranked_over_what_is_folded_and_what_is_not(tmp_path: Path) -> None:
    tables = open_tables(str(tmp_path / "tables"))
    for number, (record, value) in enumerate((("a", 3.0), ("b", 2.0), ("c", 4.0), ("d", 1.0))):
        row = pa.table([["minute"], ["m"], ["top_n(3)"], ["e"], [START], [record], [value]], schema=RECORDS)
        add(tables, TOP_N, row, batch(number))
        if number == 1:
            tables.compact(TOP_N)
    found = read_snapshot(tables, TOP_N).sort_by("rank").to_pylist()
    assert [(row["rank"], row["record"], row["value"]) for row in found] == [
        (1, [("", "c")], 4.0),
        (2, [("", "a")], 3.0),
        (3, [("", "b")], 2.0),
    ]
