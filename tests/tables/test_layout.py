"""The layout: any engine reads the tables with one plain line, and gets what the points say."""

import random
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import TablesOutdated
from penstock.model.finals import nearest_rank, with_finals
from penstock.model.function import FUNCTIONS, Function
from penstock.model.level import Level
from penstock.model.partial import SERIES, merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.tables import fold
from penstock.tables.fold import fold_rows, run_folds_here
from penstock.tables.labels import entity_from_table_labels, table_labels_of_entity
from penstock.tables.port import TableBatch, Tables, open_tables, read_level
from penstock.tables.table_rows import (
    LEVEL_ROWS,
    SORTED_BY,
    VALUES,
    increment_table_rows,
    packed_table_rows,
    table_partials,
)
from tests.examples import examples
from tests.tables.adding import add

duckdb = pytest.importorskip("duckdb")
polars = pytest.importorskip("polars")
DAY = datetime(2026, 11, 1, 22, tzinfo=UTC)
TEXTS = {"histogram": "histogram(-5,0,5)", "apdex": "apdex(3)", "top_n": "top_n(3)"}
SHOPS = ("north", "south")


def some_points(seed: int, count: int = 600) -> list[tuple[str, datetime, float]]:
    """Of two shops, around midnight."""
    rng = random.Random(seed)
    return [
        (rng.choice(SHOPS), DAY + timedelta(seconds=rng.randrange(4 * 3600)), round(rng.lognormvariate(3, 1), 3))
        for _ in range(count)
    ]


def partials_of(points: list[tuple[str, datetime, float]], *functions: str) -> pa.Table:
    entities = pa.array([entity_of({"shop": shop, "region": "eu"}) for shop, _, _ in points])
    times = pa.array([moment for _, moment, _ in points], pa.timestamp("us", tz="UTC"))
    values = pa.array([value for _, _, value in points])
    made = [partials_of_columns(text, Function.parse(text), entities, times, values) for text in functions]
    return merged(pa.concat_tables(made))


@pytest.fixture(params=["", "parquet:"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return open_tables(f"{request.param}{tmp_path / 'tables'}")


def added(tables: Tables, points: list[tuple[str, datetime, float]], number: int) -> None:
    rows = partials_of(points, "percentile", "avg", "latest")
    add(tables, "minute", rows, TableBatch("src", {"w": number - 1} if number else {}, {"w": number}))


def test_final_rows_are_one_line_of_sql_in_any_engine_and_late_increments_wait_for_the_next_fold(
    tables: Tables, tmp_path: Path
) -> None:
    points = some_points(1)
    for number in range(3):
        added(tables, points[number::3], number)
    tables.compact("minute")
    late = some_points(2, 5)
    added(tables, late, 3)

    groups: dict[tuple[str, datetime], list[tuple[datetime, float]]] = defaultdict(list)
    for shop, moment, value in points:
        groups[shop, moment.replace(second=0)].append((moment, value))
    expected = {key: [value for _, value in group] for key, group in groups.items()}
    files = list(tables.file_uris("minute"))  # type: ignore[attr-defined]
    found = duckdb.sql(
        f"select labels['shop'], epoch(bucket), avg, p95, count, min, max, value from read_parquet({files}) "
        "where metric = 'percentile' and is_final"
    ).fetchall()
    found = [(shop, datetime.fromtimestamp(seconds, UTC), *rest) for shop, seconds, *rest in found]
    assert {(shop, bucket) for shop, bucket, *_ in found} == expected.keys()
    assert len(found) == len(expected)
    for shop, bucket, avg, p95, count, least, greatest, value in found:
        values = expected[shop, bucket]
        assert (count, least, greatest) == (len(values), min(values), max(values))
        assert avg == value == pytest.approx(sum(values) / len(values))
        assert p95 == pytest.approx(nearest_rank(values, 95), rel=0.006)

    if tables.location.startswith("parquet:"):
        frame = polars.scan_parquet(files)
    else:
        frame = polars.scan_delta(str(tmp_path / "tables" / "minute"))
    rows = frame.filter(polars.col("is_final"), polars.col("metric") == "latest").collect().to_dicts()
    newest = {(dict(_pairs(row["labels"]))["shop"], row["bucket"]): row["value"] for row in rows}
    assert newest == {key: max(group)[1] for key, group in groups.items()}
    assert {row["date"] for row in rows} == {date(2026, 11, 1), date(2026, 11, 2)}
    assert {row["p95"] for row in rows} == {None}

    now = with_finals(partials_of(points + late, "percentile", "avg", "latest"), Level.MINUTE)
    assert _close(read_level(tables, Level.MINUTE), now)


def _pairs(labels: Any) -> Any:
    return labels.items() if isinstance(labels, dict) else ((one["key"], one["value"]) for one in labels)


def _close(found: pa.Table, expected: pa.Table) -> bool:
    assert found.column_names == expected.column_names
    for name in expected.column_names:
        wanted = expected[name].to_pylist()
        assert found[name].to_pylist() == (wanted if name in SERIES else pytest.approx(wanted)), name
    return True


def test_a_fold_rewrites_no_file_whose_hours_got_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "SMALL_BYTES", 0)  # else what is over becomes one file
    tables = open_tables(str(tmp_path / "tables"))
    added(tables, some_points(1), 0)
    tables.compact("minute")
    before = set(tables.file_uris("minute"))  # type: ignore[attr-defined]
    assert len(before) == 4  # two hours before midnight, two after
    added(tables, [("north", DAY + timedelta(minutes=70), 1.0)], 1)
    tables.compact("minute")
    after = set(tables.file_uris("minute"))  # type: ignore[attr-defined]

    assert len(before & after) == 3
    (new,) = after - before
    assert {bucket.hour for bucket in pq.read_table(new, partitioning=None)["bucket"].to_pylist()} == {23}


def test_final_files_are_sorted_and_have_small_row_groups_and_a_page_index(tmp_path: Path) -> None:
    tables = open_tables(str(tmp_path / "tables"))
    for number in range(3):
        added(tables, some_points(number), number)
    tables.compact("minute")

    for path in tables.file_uris("minute"):  # type: ignore[attr-defined]
        rows = pq.read_table(path, partitioning=None)
        keys = list(zip(*(rows[name].to_pylist() for name in SORTED_BY["minute"])))
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
        group = pq.read_metadata(path).row_group(0)
        assert group.num_rows <= 1 << 13
        assert group.column(0).has_column_index
        assert group.column(0).has_offset_index


def test_a_table_says_its_format_and_one_of_another_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for kind in ("", "parquet:"):
        folder = tmp_path / (kind.strip(":") or "delta")
        tables = open_tables(f"{kind}{folder}")
        added(tables, some_points(1, 5), 0)
        if kind:
            (folder / "minute" / "_format").write_text("3")
        else:
            table = DeltaTable(str(folder / "minute"))
            assert table.metadata().configuration["penstock.format"] == "2"
            assert table.metadata().partition_columns == ["date"]
            table.alter.set_table_properties({"penstock.format": "3"}, raise_if_not_exists=False)
        with pytest.raises(TablesOutdated, match=r"'minute' .* has format 3, .* or a later one"):
            tables.describe("minute")


TIMES: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=examples(30), **TIMES)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(set(FUNCTIONS) - {"top_n"})),
            st.sampled_from(("a", "b")),
            st.integers(0, 200),
            st.floats(-50, 50),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(tuple(Level)),
)
def test_folding_increments_in_any_grouping_gives_the_values_of_one_plain_merge(
    points: list[tuple[str, str, int, float, int]], level: Level
) -> None:
    made: dict[int, list[pa.Table]] = defaultdict(list)
    for name, entity, second, value, number in points:
        times = pa.array([second * 1_000_000], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        more = {"parts": pa.array([second % 16])} if name == "distinct" else {}
        taken = pa.array([float(second % 20 + 1)]) if name == "distinct" else pa.array([value])
        function = Function.parse(TEXTS.get(name, name))
        made[number].append(partials_of_columns(name, function, pa.array([entity]), times, taken, **more))
    rows = LEVEL_ROWS.empty_table()
    for number in sorted(made):  # each fold takes in what the folds before have made final
        rows = pa.concat_tables([rows, increment_table_rows(packed_table_rows(merged(pa.concat_tables(made[number]))))])
        if number % 2:
            rows = fold_rows(level.value, rows)
    rows = fold_rows(level.value, rows)

    expected = with_finals(merged(pa.concat_tables([one for some in made.values() for one in some])), level)
    assert set(rows["is_final"].to_pylist()) == {True}
    entities = [entity_from_table_labels(labels) for labels in rows["labels"].to_pylist()]
    rows = rows.append_column("entity", pa.array(entities)).sort_by([(name, "ascending") for name in SERIES])
    _close(rows.select([*SERIES, "count", "sum", "min", "max", *VALUES]),
           expected.select([*SERIES, "count", "sum", "min", "max", *VALUES]))  # fmt: skip
    _close(with_finals(table_partials(rows), level), expected)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4) | st.text(max_size=20))
def test_every_entity_becomes_labels_and_comes_back(made: dict[str, str] | str) -> None:
    entity = made if isinstance(made, str) else entity_of(made)
    pairs, series = table_labels_of_entity(entity)
    assert entity_from_table_labels(pairs) == entity
    assert len(series) == 32
    if isinstance(made, dict) and list(made) != [""]:
        assert dict(pairs) == made


def test_a_task_takes_a_share_of_the_series_where_all_would_be_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "TASK_BYTES", 20_000)
    tables, taken = open_tables(str(tmp_path / "tables")), []
    times = pa.array([DAY] * 500, pa.timestamp("us", tz="UTC"))
    entities = pa.array([entity_of({"host": str(n)}) for n in range(500)])
    rows = merged(partials_of_columns("m", Function.parse("avg"), entities, times, pa.array([1.0] * 500)))
    for number in range(2):
        add(tables, "minute", rows, TableBatch("src", {"w": number - 1} if number else {}, {"w": number}))

    def run(tasks: Any) -> Any:
        taken.extend(tasks)
        return run_folds_here(tasks)

    done = tables.compact("minute", run)
    assert (done.rows_before, done.rows_after) == (1000, 500)
    assert len(taken) > 10
    assert set(read_level(tables, Level.MINUTE)["count"].to_pylist()) == {2}
