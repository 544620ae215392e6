"""Spark SQL over the tables: views that are never stale, filters that choose files, functions for any percentile."""

import math
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession, datasource

from penstock.errors import ConfigError
from penstock.model.distinct import register_of
from penstock.model.finals import nearest_rank
from penstock.model.function import FUNCTIONS, Function
from penstock.model.level import Level
from penstock.model.partial import merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.spark import register
from penstock.spark.table_source import TableReader
from penstock.tables.catalog_sql import catalog_sql
from penstock.tables.delta import DeltaTables
from penstock.tables.port import SCHEMAS, TOP_N, open_tables
from penstock.tables.snapshot import read_snapshot
from penstock.tables.table_rows import RECORDS
from tests.tables.adding import add
from tests.tables.test_snapshot import START, Point, assert_truth, batch, partials_of, percentiles

pytestmark = pytest.mark.spark


@pytest.fixture
def sql(spark: SparkSession) -> Iterator[SparkSession]:
    yield spark
    spark.sql("DROP DATABASE IF EXISTS penstock CASCADE")


def test_views_are_the_truth_of_this_second_whatever_was_folded_and_vacuumed_since(
    sql: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(5)
    names = sorted(set(FUNCTIONS) - {"top_n"})
    points: list[Point] = [
        (rng.choice(names), entity_of({"shop": rng.choice("ab")}), rng.randrange(7200), rng.gauss(3, 20), n % 3)
        for n in range(300)
    ]
    tables = open_tables(str(tmp_path / "tables"))
    register(sql, tmp_path / "tables")
    assert sql.table("penstock.minute").count() == 0  # before there are tables
    for number in range(3):
        rows = partials_of([point for point in points if point[4] == number])
        add(tables, "minute", rows, batch(number))
        if number < 2:
            tables.compact("minute")
            tables.vacuum(0)
        found = pa.table(sql.table("penstock.minute").toArrow())
        assert_truth(found, [point for point in points if point[4] <= number], Level.MINUTE)
    assert sql.table("penstock.metrics").columns[:3] == ["metric", "type", "function"]
    assert [row.viewName for row in sql.sql("SHOW VIEWS IN penstock").collect() if row.namespace] == [
        "day", "hour", "metrics", "minute", "top_n",
    ]  # fmt: skip


def test_filters_of_a_query_choose_files_and_rows(
    sql: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tables.fold.SMALL_BYTES", 0)  # else what is over becomes one file
    tables = open_tables(str(tmp_path / "tables"))
    percentiles(tables, 0, seed=1)
    tables.compact("minute")
    register(sql, tmp_path / "tables", labels=["shop"])

    def tasks(condition: str) -> int:
        return sql.sql(f"SELECT * FROM penstock.minute WHERE {condition}").rdd.getNumPartitions()

    assert tasks("true") == 4  # a file for each hour
    assert tasks(f"date = date '{START:%Y-%m-%d}'") == 2
    assert tasks(f"bucket >= timestamp '{START:%Y-%m-%d %H:%M}' AND bucket < '{START:%Y-%m-%d 23:30}'") == 1
    north = sql.sql("SELECT labels['shop'] FROM penstock.minute WHERE label.shop = 'north'").collect()
    assert {row[0] for row in north} == {"north"}


def test_a_reader_leaves_out_what_filters_on_keys_and_named_labels_rule_out(tmp_path: Path) -> None:
    """What Spark would throw away again is not sent to it at all."""
    percentiles(open_tables(str(tmp_path / "tables")), 0, seed=1)

    def read(*filters: datasource.Filter) -> list[dict[str, Any]]:
        reader = TableReader(str(tmp_path / "tables"), "minute", ("shop",))
        assert reader.pushFilters(list(filters)) == list(filters)
        pieces = reader.partitions()
        return [row for piece in pieces for rows in reader.read(piece) for row in rows.to_pylist()]

    everything = read()
    south = read(datasource.EqualTo(("label", "shop"), "south"))
    assert south == [row for row in everything if row["label"]["shop"] == "south"]
    series = south[0]["series"]
    assert read(datasource.In(("series",), (series, "none"))) == [r for r in everything if r["series"] == series]
    assert read(datasource.EqualTo(("metric",), "other")) == []
    late = START + timedelta(minutes=30)
    assert read(datasource.GreaterThan(("bucket",), late)) == [r for r in everything if r["bucket"] > late]
    # Those on values are left to Spark: a value is known once all rows of a bucket are merged.
    assert read(datasource.GreaterThan(("value",), 1e9)) == everything


def test_any_percentile_and_distinct_count_follows_over_any_grouping(sql: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(9)
    tables = open_tables(str(tmp_path / "tables"))
    values = {shop: [rng.lognormvariate(3, 1) for _ in range(700)] for shop in ("a", "b")}
    users = {shop: {f"user {rng.randrange(3000)}" for _ in range(1500)} for shop in values}
    made = []
    for shop in values:
        entity = entity_of({"shop": shop})
        times = pa.array([START + timedelta(minutes=n % 90) for n in range(1500)], pa.timestamp("us", tz="UTC"))
        for scale, metric in ((6, "fine"), (3, "coarse")):
            function = Function("percentile", (float(scale),))
            made.append(
                partials_of_columns(metric, function, pa.array([entity] * 700), times[:700], pa.array(values[shop]))
            )
        registers = [register_of(user, 12) for user in sorted(users[shop])]
        parts, ranks = (pa.array([one[place] for one in registers if one]) for place in (0, 1))
        names = pa.array([entity] * len(registers))
        more = {"parts": parts.cast(pa.int64())}
        made.append(
            partials_of_columns("users", Function("distinct", (12.0,)), names, times[: len(registers)],
                       ranks.cast(pa.float64()), **more)
        )  # fmt: skip
    add(tables, "minute", merged(pa.concat_tables(made)), batch(0))
    register(sql, tmp_path / "tables")

    found = sql.sql(
        "SELECT metric, penstock_percentile(penstock_merge(array_agg(distribution)), 0.999) AS p99_9, sum(count) AS n "
        "FROM penstock.minute WHERE metric IN ('fine', 'coarse') GROUP BY metric"
    ).collect()
    exact = nearest_rank([*values["a"], *values["b"]], 99.9)
    assert {row.metric: row.n for row in found} == {"fine": 1400, "coarse": 1400}
    for row in found:
        assert row.p99_9 == pytest.approx(exact, rel={"fine": 0.0055, "coarse": 0.045}[row.metric])
    (row,) = sql.sql(
        "SELECT penstock_distinct(penstock_merge(array_agg(distribution))) AS users FROM penstock.minute "
        "WHERE metric = 'users'"
    ).collect()
    truth = len(users["a"] | users["b"])
    assert row.users == pytest.approx(truth, rel=4 * 1.04 / math.sqrt(4096))
    rank = sql.sql(
        "SELECT penstock_percentile(array_agg(named_struct('index', id, 'count', 1L, 'value', double(id))), 0.55) "
        "FROM range(1, 101)"
    ).collect()
    assert rank[0][0] == 55.0


def test_a_source_without_a_table_or_place_says_what_is_missing(sql: SparkSession) -> None:
    with pytest.raises(Exception, match=r"option\('table'\) must be one of minute, hour, day, top_n, metrics, got ''"):
        sql.read.format("penstock-table").load()
    with pytest.raises(ConfigError, match="tables must be a path or a file:// URI"):
        register(sql, "s3://bucket/tables")
    with pytest.raises(ConfigError, match="a database has these views itself"):
        TableReader("postgresql://localhost/db", "hour", ()).partitions()


def test_printed_statements_make_the_same_views_in_a_catalog(sql: SparkSession, tmp_path: Path) -> None:
    """There is no Delta connector here: tables of the same rows stand in for those that name Delta tables."""
    rng = random.Random(6)
    names = sorted(set(FUNCTIONS) - {"top_n"})
    points: list[Point] = [
        (rng.choice(names), entity_of({"shop": rng.choice("ab")}), rng.randrange(7200), rng.gauss(3, 20), n % 3)
        for n in range(300)
    ]
    tables = DeltaTables(tmp_path / "tables")
    for number in range(3):
        add(tables, "minute", partials_of([point for point in points if point[4] == number]), batch(number))
        if number == 1:
            tables.compact("minute")
    for number, (record, value) in enumerate((("a", 3.0), ("b", 2.0), ("c", 4.0), ("d", 1.0))):
        row = pa.table([["minute"], ["m"], ["top_n(3)"], ["e"], [START], [record], [value]], schema=RECORDS)
        add(tables, TOP_N, row, batch(number))
    sql.sql("CREATE DATABASE penstock")
    for name in SCHEMAS:
        sql.createDataFrame(tables._rows(name)).write.saveAsTable(f"penstock.{name}_rows")
    sql.createDataFrame(tables.metrics()).write.saveAsTable("penstock.metrics")
    statements = catalog_sql("spark", str(tmp_path / "tables")).split(";\n")
    assert sum(f"using delta location '{tables.folder.as_uri()}/" in statement for statement in statements) == 5
    for statement in statements:
        if statement.strip() and "using delta" not in statement:
            sql.sql(statement)

    found = pa.table(sql.table("penstock.minute").toArrow())
    assert_truth(found, points, Level.MINUTE, distinct=3 * 1.04 / math.sqrt(4096))
    expected = {row["metric"] + str(row["bucket"]) + row["series"]: row for row in
                read_snapshot(tables, "minute").to_pylist()}  # fmt: skip
    for row in found.to_pylist():
        entries = expected[row["metric"] + str(row["bucket"]) + row["series"]]["distribution"]
        assert [entry["value"] for entry in row["distribution"] or ()] == pytest.approx(
            [entry["value"] for entry in entries or ()]
        )
    top = sql.sql("SELECT rank, record[''], value FROM penstock.top_n ORDER BY rank").collect()
    assert [tuple(row) for row in top] == [(1, "c", 4.0), (2, "a", 3.0), (3, "b", 2.0)]
    assert sql.table("penstock.hour").count() == sql.table("penstock.day").count() == 0
    (row,) = sql.sql(
        "SELECT penstock.penstock_percentile(penstock.penstock_merge(array_agg(distribution)), 1) AS p100 "
        "FROM penstock.minute WHERE metric = 'percentile'"
    ).collect()
    assert row.p100 == pytest.approx(max(value for name, _, _, value, _ in points if name == "percentile"), rel=0.006)
