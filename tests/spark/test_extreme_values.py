"""Any value that a receiver takes: an overflow is the matter of its own series, and no batch or fold stops for it."""

import logging
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.function import Function
from penstock.model.grouping import MOST
from penstock.model.level import Level
from penstock.model.name import LONGEST_NAME
from penstock.model.partial import merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.model.segment import Segment, seal
from penstock.spark.reading import read_table
from penstock.tables.overflow import NO_OVERFLOW, Overflow, OverflowLog
from penstock.tables.port import SCHEMAS, Tables, open_tables, read_level, read_top_n
from penstock.tables.query import Question, answer_from_tables
from penstock.testing import FakeClock
from tests.examples import examples
from tests.servers import PostgreSQL
from tests.spark.engine import Engine
from tests.spark.pipeline import Job

HUGE = 1.7e308
FUNCTIONS = ("avg", "sum", "count", "percentile", "histogram(-5,0,5)", "latest", "apdex(3)", "top_n(3)", "cpm")
VALUES = (HUGE, -HUGE, sys.float_info.max, -sys.float_info.max, 5e-324, -5e-324, 0.0, -0.0, 1.0, 2.0**63, -(2.0**63))
COUNTS = (1, 2, 1 << 39, (1 << 40) - 1)  # the last is the most that a histogram's bucket may count
TIMES = (1, 60_000_000, 1_700_000_000_000_000, 4_102_444_799_999_999)
NAMES = ("a", "n" * LONGEST_NAME)
PLAIN = "plain"
Point = tuple[str, str, float, int, int, int]  # function, name, value, count, time, batch

points = st.tuples(
    st.sampled_from(FUNCTIONS),
    st.sampled_from(NAMES),
    st.sampled_from(VALUES),
    st.sampled_from(COUNTS),
    st.sampled_from(TIMES),
    st.integers(0, 2),
)
BUSY: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def partials_of(some: list[Point]) -> pa.Table:
    """As a receiver's rows become partials; of counts above 1 as those of a histogram's bucket."""
    made = []
    for text, name, value, count, time, _ in some:
        function = Function.parse(text)
        times = pa.array([time], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        score = function.scores(pa.array([value])).to_pylist()[0]
        columns: dict[str, Any] = {"count": count, "sum": score * count, "min": score, "max": score}
        states = {column: pa.array([one]) for column, one in columns.items()}
        record = pa.array(["r"]) if function.spec.keeps_records else None
        entity = pa.array([entity_of({"host": name, "long": "x" * 5000})])
        made.append(
            partials_of_columns(name, function, entity, times, pa.array([value]), states=states, records=record)
        )
    return merged(pa.concat_tables(made))


def plain_points(number: int) -> pa.Table:
    times = pa.array([TIMES[2]], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return merged(partials_of_columns(PLAIN, Function("avg"), pa.array(["{}"]), times, pa.array([float(number + 1)])))


def seal_batch(folder: Path, number: int, some: list[Point]) -> None:
    own = [partials_of(some)] if some else []
    seal(folder, Segment("w", number, number), merged(pa.concat_tables([*own, plain_points(number)])), ("queue", 0))


def check(tables: Tables, some: list[Point], batches: int) -> None:
    """Every series has its count, min and max; a sum is right or null; the series beside them knows nothing of it."""
    groups: dict[tuple[str, str, int], list[Point]] = defaultdict(list)
    for level in Level:
        width = level.minutes * 60_000_000
        groups.clear()
        for one in some:
            if not one[0].startswith("top_n"):
                groups[one[1], one[0], one[4] // width * width].append(one)
        rows = read_level(tables, level)
        for name, column in zip(rows.column_names, rows.columns):
            if pa.types.is_floating(column.type):
                assert all(map(math.isfinite, filter(None, column.to_pylist()))), name
        found = {
            (row["metric"], row["function"].replace("percentile(6)", "percentile"), row["bucket"].timestamp()): row
            for row in rows.to_pylist()
        }
        assert len(found) == len(groups) + 1
        own = found.pop((PLAIN, "avg", TIMES[2] // width * width / 1e6))
        assert (own["count"], own["sum"], own["max"]) == (batches, sum(range(1, batches + 1)), batches)
        for (name, text, bucket), members in groups.items():
            row = found[name, text, bucket / 1e6]
            scores = [Function.parse(text).scores(pa.array([value])).to_pylist()[0] for _, _, value, *_ in members]
            if text == "latest":
                newest = max(time for *_, time, _ in members)
                assert row["value"] == max(value for _, _, value, _, time, _ in members if time == newest)
                continue
            assert row["count"] == min(sum(count for _, _, _, count, _, _ in members), MOST)
            assert (row["min"], row["max"]) == (min(scores), max(scores))
            size = sum(abs(Fraction(score)) * one[3] for score, one in zip(scores, members))
            if size < sys.float_info.max / 2:
                exact = sum(Fraction(score) * one[3] for score, one in zip(scores, members))
                assert row["sum"] == pytest.approx(float(exact), rel=1e-9, abs=float(size) * 1e-12)
            elif row["sum"] is None:
                assert row["avg"] is None
            else:
                assert abs(row["sum"]) <= size * (1 + Fraction(1, 10**9))
            if text == "percentile":
                assert row["min"] <= row["p50"] <= row["max"]
    read_top_n(tables, 3)


def sealed_and_run(folder: Path, tables: Tables, some: list[Point]) -> None:
    (folder / "segments").mkdir()
    for number in range(3):
        seal_batch(folder / "segments", number, [one for one in some if one[5] == number])
    engine = Engine(folder / "segments", tables)
    engine.run(max_files=1)
    check(tables, some, 3)
    for name in SCHEMAS:
        tables.compact(name)
    check(tables, some, 3)
    seal_batch(folder / "segments", 3, some)
    engine.run()
    for name in SCHEMAS:
        tables.compact(name)
    check(tables, some * 2, 4)


CANCELLING: list[Point] = [
    ("sum", "a", value, 1, TIMES[1], batch) for batch in range(3) for value in (HUGE, HUGE, -HUGE, -HUGE)
]


@settings(max_examples=examples(25), **BUSY)
@given(st.lists(points, max_size=25), st.sampled_from(("", "parquet:")))
@example([("avg", "a", HUGE, 1, TIMES[1], 0), ("avg", "a", HUGE, 1, TIMES[1], 1)], "")
@example(CANCELLING, "")
@example([("percentile", "a", 1.0, (1 << 40) - 1, TIMES[1], 0)] * 20, "parquet:")
def test_no_value_stops_a_batch_or_a_fold_and_other_series_are_exact(some: list[Point], kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        sealed_and_run(Path(name), open_tables(f"{kind}{name}/tables"), some)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    with PostgreSQL(tmp_path_factory.mktemp("postgres")) as server:
        yield server


def emptied(server: PostgreSQL) -> Tables:
    with psycopg.connect(server.url) as connection:
        for name in (*SCHEMAS, "guard"):
            connection.execute(f"drop table if exists penstock_{name} cascade")
    return open_tables(server.url)


@pytest.mark.server
def test_nor_does_any_stop_postgresql(server: PostgreSQL) -> None:
    @settings(max_examples=examples(8), **BUSY)
    @given(st.lists(points, max_size=25))
    @example([("avg", "a", HUGE, 1, TIMES[1], 0), ("avg", "a", HUGE, 1, TIMES[1], 1)])
    @example(CANCELLING)
    def check_some(some: list[Point]) -> None:
        with tempfile.TemporaryDirectory() as name:
            sealed_and_run(Path(name), emptied(server), some)

    check_some()


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["", "parquet:", pytest.param("postgresql", marks=pytest.mark.server)])
def test_nor_does_any_stop_real_spark(
    spark: SparkSession, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """All functions with all values at once, counts beyond 64 bits among them."""
    is_server = kind == "postgresql"
    location = f"{kind}{tmp_path / 'tables'}"
    if is_server:
        server: PostgreSQL = request.getfixturevalue("server")
        emptied(server)
        location = server.url
    some = [
        (function, name, value, COUNTS[number % 4], TIMES[number % 3], number % 2)
        for function in FUNCTIONS
        for number, value in enumerate(VALUES)
        for name in NAMES
    ]
    (tmp_path / "segments").mkdir()
    job = Job(spark, tmp_path, location)
    for number in range(2):
        seal_batch(tmp_path / "segments", number, [one for one in some if one[5] == number])
    job.run(max_files=1)
    check(job.tables, some, 2)
    for name in SCHEMAS:
        job.tables.compact(name)
    check(job.tables, some, 2)
    known = read_level(job.tables, Level.HOUR).to_pylist()
    expected = {(row["metric"], row["function"], row["bucket"].timestamp()): row for row in known}
    read = read_table(spark, location, "hour").withColumn("bucket", F.unix_timestamp("bucket")).collect()
    for row in read:
        own = expected[row["metric"], row["function"], row["bucket"]]
        assert row["count"] == own["count"]
        if own["sum"] is None or row["sum"] is None:  # on which way it overflows is a matter of the order
            assert row["avg"] is None or own["avg"] is None
        else:
            assert row["value"] == pytest.approx(own["value"])
    assert len(read) == len(known)


@pytest.mark.spark
def test_counts_beyond_64_bits_stay_at_the_most_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    job = Job(spark, tmp_path)
    for number in range(3):
        rows = partials_of([("percentile", "a", 1.0, 1 << 39, TIMES[1], 0)])
        huge = rows.set_column(rows.schema.get_field_index("count"), "count", pa.array([MOST - number]))
        together = merged(pa.concat_tables([huge, plain_points(number)]))
        seal(tmp_path / "segments", Segment("w", number, number), together, ("queue", 0))
    job.run()
    for level in Level:
        rows = {row["metric"]: row for row in read_level(job.tables, level).to_pylist()}
        assert (rows["a"]["count"], rows["a"]["p50"]) == (MOST, 1.0)
        assert (rows[PLAIN]["count"], rows[PLAIN]["sum"]) == (3, 6.0)
    read = {row["metric"]: row for row in read_table(spark, str(tmp_path / "tables"), "hour").collect()}
    assert (read["a"]["count"], read["a"]["p50"], read[PLAIN]["sum"]) == (MOST, 1.0, 6.0)


def test_a_query_shows_no_sum_that_is_none(tmp_path: Path) -> None:
    tables = open_tables(str(tmp_path / "tables"))
    sealed_and_run(tmp_path, tables, [("avg", "a", HUGE, 1, TIMES[2], number) for number in range(2)])
    now = datetime.fromtimestamp(TIMES[2] / 1e6, UTC)
    (row,) = answer_from_tables(tables, Question(metric="a", since=timedelta(hours=1)), now)
    assert (row.points, row.value, row.min, row.max) == (4, None, HUGE, HUGE)
    assert tables.overflow.rows > 0


def test_overflows_are_counted_and_named_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    found = OverflowLog(clock)
    with caplog.at_level(logging.WARNING):
        for seconds in (0, 59, 2):
            clock.advance(seconds)
            found.add([NO_OVERFLOW, Overflow(2, 'cpu {"host":"a"}')])
        found.add([NO_OVERFLOW])
    assert found.rows == 6
    assert [record.getMessage().partition(". ")[2] for record in caplog.records] == [
        'rows=2 series=cpu {"host":"a"}',
        'rows=4 series=cpu {"host":"a"}',
    ]
