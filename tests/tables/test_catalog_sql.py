"""Statements that make the views in an engine: DuckDB's in a plain DuckDB, others as far as their engines are here."""

import math
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pytest
import sqlglot
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.model.distinct import register_of
from penstock.model.finals import nearest_rank
from penstock.model.function import FUNCTIONS, Function
from penstock.model.level import Level
from penstock.model.partial import merged, partials_of_columns
from penstock.tables.catalog_sql import catalog_sql
from penstock.tables.delta import DeltaTables
from penstock.tables.port import SCHEMAS, TOP_N, TableBatch, open_tables
from penstock.tables.snapshot import read_snapshot
from penstock.tables.table_rows import RECORDS
from tests.examples import examples
from tests.servers import PostgreSQL
from tests.tables.adding import add
from tests.tables.test_layout import some_points
from tests.tables.test_snapshot import START, Point, assert_truth, batch, partials_of, points_of_any_kind

DISTINCT = 3 * 1.04 / math.sqrt(1 << 12)  # estimates of rows that were not folded yet are of another estimator


def connected(location: str) -> Any:
    connection = duckdb.connect()
    connection.execute("set timezone = 'UTC'")
    connection.execute(catalog_sql("duckdb", location))
    return connection


def rows(connection: Any, view: str) -> pa.Table:
    return connection.sql(f"from penstock.{view}").to_arrow_table()


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(points_of_any_kind, st.sampled_from(("", "parquet:")), st.sets(st.integers(0, 3)), st.booleans())
def test_views_are_the_truth_of_this_second_whatever_is_folded(
    points: list[Point], kind: str, folded_after: set[int], has_checkpoint: bool
) -> None:
    with TemporaryDirectory() as folder:
        location = f"{kind}{folder}/it's tables"
        tables = open_tables(location)
        for number in range(4):
            own = [point for point in points if point[4] == number]
            if own:
                add(tables, "minute", partials_of(own), TableBatch("src", {}, {f"w{number}": 0}))
            if number in folded_after:
                tables.compact("minute")
                if has_checkpoint and not kind and (Path(tables.path("minute")) / "_delta_log").is_dir():  # type: ignore[attr-defined]
                    DeltaTable(str(tables.path("minute"))).create_checkpoint()  # type: ignore[attr-defined]
        assert_truth(rows(connected(location), "minute"), points, Level.MINUTE, distinct=DISTINCT)


def test_hours_and_days_are_per_minute_of_their_width_and_distributions_say_what_they_stand_for(tmp_path: Path) -> None:
    tables = open_tables(str(tmp_path))
    points: list[Point] = [
        (name, "e", second, 3.0, 0)
        for name in ("cpm", "sum_per_min", "percentile", "histogram", "distinct", "latest", "avg")
        for second in (0, 1)
    ]
    for level in ("hour", "day"):
        made = partials_of(points)
        place = made.schema.get_field_index("bucket")
        made = made.set_column(place, "bucket", pa.array([START] * made.num_rows, made.schema.field("bucket").type))
        add(tables, level, made, batch(0))
        found = rows(connected(str(tmp_path)), level).sort_by("metric")
        expected = read_snapshot(tables, level).sort_by("metric")
        assert found["value"].to_pylist() == pytest.approx(expected["value"].to_pylist())
        for one, other in zip(found["distribution"].to_pylist(), expected["distribution"].to_pylist()):
            values = [[entry["value"] for entry in entries or ()] for entries in (one, other)]
            assert values[0] == pytest.approx(values[1])
            assert [entry["index"] for entry in one or ()] == [entry["index"] for entry in other or ()]


def test_records_of_a_top_n_are_ranked_over_what_is_folded_and_what_is_not(tmp_path: Path) -> None:
    tables = open_tables(str(tmp_path))
    for number, (record, value) in enumerate((("a", 3.0), ("b", 2.0), ("c", 4.0), ("d", 1.0))):
        row = pa.table([["minute"], ["m"], ["top_n(3)"], ["e"], [START], [record], [value]], schema=RECORDS)
        add(tables, TOP_N, row, batch(number))
        if number == 1:
            tables.compact(TOP_N)
    found = connected(str(tmp_path)).sql("select \"rank\", record[''], value from penstock.top_n order by 1").fetchall()
    assert found == [(1, "c", 4.0), (2, "a", 3.0), (3, "b", 2.0)]


def test_any_percentile_and_distinct_count_follows_over_any_grouping(tmp_path: Path) -> None:
    rng = random.Random(4)
    values = [value for _, _, value in some_points(3, 500)]
    users = {f"user {rng.randrange(5000)}" for _ in range(4000)}
    registers = [register for user in sorted(users) if (register := register_of(user, 12))]
    moments = pa.array([START] * max(len(values), len(registers)), pa.timestamp("us", tz="UTC"))
    shops = pa.array([f'{{"shop":"{n % 3}"}}' for n in range(len(moments))])
    made = [
        partials_of_columns("t", Function("percentile", (6.0,)), shops[:500], moments[:500], pa.array(values)),
        partials_of_columns(
            "users",
            Function("distinct", (12.0,)),
            shops[: len(registers)],
            moments[: len(registers)],
            pa.array([float(rank) for _, rank in registers]),
            parts=pa.array([place for place, _ in registers], pa.int64()),
        ),
    ]
    add(open_tables(str(tmp_path)), "minute", merged(pa.concat_tables(made)), batch(0))
    connection = connected(str(tmp_path))
    (found,) = connection.sql(
        "select penstock_percentile(penstock_merge(array_agg(distribution)), 0.999), sum(count) from penstock.minute "
        "where metric = 't'"
    ).fetchall()
    assert found == (pytest.approx(nearest_rank(values, 99.9), rel=0.0055), 500)
    (found,) = connection.sql(
        "select penstock_distinct(penstock_merge(array_agg(distribution))) from penstock.minute where metric = 'users'"
    ).fetchall()
    assert found[0] == pytest.approx(len(users), rel=DISTINCT)


def test_the_command_prints_statements_that_a_plain_shell_takes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    add(open_tables(str(tmp_path / "tables")), "minute", partials_of([("avg", "e", 0, 3.0, 0)]), batch(0))
    command = [sys.executable, "-m", "penstock", "tables", "sql", "--engine", "duckdb", "--tables", "tables"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    connection = duckdb.connect(str(tmp_path / "own.duckdb"))
    connection.execute(ran.stdout)
    assert connection.sql("select metric, value from penstock.minute").fetchall() == [("avg", 3.0)]
    assert connection.sql("from penstock.metrics").fetchall() == []
    connection.close()
    assert duckdb.connect(str(tmp_path / "own.duckdb")).sql("show all tables").fetchall() == []


@pytest.mark.parametrize(
    ("engine", "location", "complaint"),
    [
        ("trino", "parquet:/data/tables", "--engine must be duckdb for plain Parquet tables, got 'trino'"),
        ("duckdb", "postgresql://me:secret@host/db", "--engine must be postgres for tables in PostgreSQL"),
        ("postgres", "/data/tables", "--engine must be postgres for tables in PostgreSQL, and for no others"),
    ],
)
def test_an_engine_that_cannot_read_such_tables_is_refused(engine: str, location: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        catalog_sql(engine, location)
    assert "secret" not in str(refused.value)


def test_statements_for_trino_translated_to_duckdb_give_the_truth_of_this_second(tmp_path: Path) -> None:
    """No Trino is here. Its statements are read by a parser of its dialect and run in an engine that is."""
    rng = random.Random(3)
    names = sorted(set(FUNCTIONS) - {"top_n", "distinct"})  # of distinct counts Trino has no estimate of ours
    points: list[Point] = [
        (rng.choice(names), f'{{"shop":"{rng.choice("ab")}"}}', rng.randrange(7200), rng.gauss(3, 20), n % 3)
        for n in range(300)
    ]
    tables = DeltaTables(tmp_path)
    for number in range(3):
        add(tables, "minute", partials_of([point for point in points if point[4] == number]), batch(number))
        if number == 1:
            tables.compact("minute")
    connection = duckdb.connect()
    connection.execute("set timezone = 'UTC'; create schema penstock")
    for name in SCHEMAS:
        connection.register("own_rows", tables._rows(name))
        connection.execute(f"create table penstock.{name}_rows as from own_rows")
    printed = catalog_sql("trino", str(tmp_path))
    assert printed.count(f"table_location => '{tmp_path.as_uri()}/") == 5
    views = [one for one in sqlglot.transpile(printed, read="trino", write="duckdb") if " VIEW " in one]
    assert len(views) == 4
    for view in views:
        # Trino makes columns of the fields of an entry by itself.
        entries = "LATERAL (SELECT UNNEST(one.distribution, recursive := true)) AS entry"
        connection.execute(view.replace('UNNEST(one.distribution) AS entry("index", "count")', entries))

    assert_truth(rows(connection, "minute"), points, Level.MINUTE)


def test_statements_for_databricks_are_those_for_spark_and_its_parser_takes_them() -> None:
    printed = catalog_sql("databricks", "/data/tables")
    assert printed == catalog_sql("spark", "/data/tables")
    assert {type(one).__name__ for one in sqlglot.parse(printed, read="databricks")} == {"Create"}


@pytest.mark.server
def test_statements_for_postgresql_make_its_views_anew(tmp_path: Path) -> None:
    with PostgreSQL(tmp_path) as server, psycopg.connect(server.url, autocommit=True) as connection:
        add(open_tables(server.url), "minute", partials_of([("percentile", "e", 0, 3.0, 0)]), batch(0))
        connection.execute("drop view penstock.minute, penstock.hour, penstock.day, penstock.top_n, penstock.metrics")
        connection.execute(catalog_sql("postgres", server.url).encode())
        found = connection.execute("select metric, count, p99 from penstock.minute").fetchall()
        assert found == [("percentile", 1, 3.0)]


def test_a_place_without_tables_is_said(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "tables",
        "sql",
        "--engine",
        "duckdb",
        "--tables",
        f"parquet:{tmp_path}",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ran.stdout.startswith("set variable")
    assert f"there are no tables at {tmp_path} on this machine yet" in ran.stderr
