"""With late points, restarts, folds and expiry: final rows are the batch answer as of their fold, views that of now."""

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.model.finals import with_finals
from penstock.model.function import Function
from penstock.model.level import Level
from penstock.model.partial import PARTIALS, merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.tables.labels import entity_from_table_labels
from penstock.tables.port import SCHEMAS, TOP_N, TableBatch, Tables, open_tables, read_level
from penstock.tables.table_rows import RECORDS
from tests.examples import examples
from tests.servers import PostgreSQL
from tests.tables.adding import add

duckdb = pytest.importorskip("duckdb")
START = datetime(2026, 11, 1, tzinfo=UTC)
FUNCTIONS = ("avg", "percentile", "latest", "sum", "count", "cpm", "histogram(-5,0,5)", "distinct(6)", "apdex(3)")
SHOWN = ("count", "sum", "min", "max", "value", "avg", "p50", "p95", "p99")
TIMES: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
Point = tuple[str, str, datetime, float, int]  # function, shop, time, value, register
Answer = dict[tuple[str, str, datetime], tuple[Any, ...]]


def some_points(rng: random.Random, days: range) -> list[Point]:
    """Of a few minutes of each of these days, so that most rows merge."""
    return [
        (
            rng.choice(FUNCTIONS),
            rng.choice(("north", "south")),
            START + timedelta(days=rng.choice(days), seconds=rng.randrange(240)),
            round(rng.gauss(0, 10), 3),
            rng.randrange(64),
        )
        for _ in range(rng.randrange(1, 60))
    ]


def partials_of(points: list[Point]) -> pa.Table:
    made = [PARTIALS.empty_table()]
    for text in FUNCTIONS:
        own = [point for point in points if point[0] == text]
        if not own:
            continue
        function = Function.parse(text)
        _, shops, moments, numbers, registers = zip(*own)
        more: dict[str, Any] = {"parts": pa.array(registers)} if text.startswith("distinct") else {}
        values = pa.array([float(register % 7 + 1) for register in registers] if more else numbers)
        if function.spec.score is not None:
            scores = function.scores(values)
            more["states"] = {"count": pa.array([1] * len(own)), "sum": scores, "min": scores, "max": scores}
        times = pa.array(moments, pa.timestamp("us", tz="UTC"))
        entities = pa.array([entity_of({"shop": shop}) for shop in shops])
        made.append(
            partials_of_columns(text.partition("(")[0], function, entities, times, values, **more).cast(PARTIALS)
        )
    return merged(pa.concat_tables(made))


def answer_of(rows: pa.Table) -> Answer:
    found = {(row["function"], row["entity"], row["bucket"]): tuple(row[name] for name in SHOWN) for row in _rows(rows)}
    assert len(found) == rows.num_rows
    return found


def _rows(rows: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


def batch_answer(points: list[Point]) -> Answer:
    return answer_of(with_finals(partials_of(points), Level.MINUTE))


def assert_equal(found: Answer, expected: Answer) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        # Estimators of two libraries differ by less than their own error, which is 1.04 / √64 here.
        error, least = (0.05, 1.0) if key[0].startswith("distinct") else (1e-9, 1e-9)
        assert found[key] == pytest.approx(values, rel=error, abs=least), key


class Run:
    """A table's life: what was added, what the last fold saw, what has expired."""

    def __init__(self, open_again: Callable[[], Tables], seed: int) -> None:
        self._open_again = open_again
        self._rng = random.Random(seed)
        self._number = -1
        self.tables = open_again()
        self.live: list[Point] = []
        self.folded: list[Point] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        kind = self._rng.choice(("add", "add", "add", "fold", "expire", "restart"))
        if kind == "add":
            points = some_points(self._rng, range(4))  # of any day: those of days that have expired are late
            self._number += 1
            start = {"w": self._number - 1} if self._number else {}
            add(self.tables, "minute", partials_of(points), TableBatch("src", start, {"w": self._number}))
            self.live += points
        elif kind == "fold":
            self.tables.compact("minute")
            self.folded = list(self.live)
        elif kind == "expire":
            before = START + timedelta(days=self._rng.randrange(1, 3), hours=5)
            metrics = self._rng.choice(((), ("avg", "latest")))
            self.tables.expire("minute", before, metrics)

            def stays(point: Point) -> bool:
                is_doomed = not metrics or point[0].partition("(")[0] in metrics
                return not is_doomed or point[2].date() >= before.date()

            self.live, self.folded = list(filter(stays, self.live)), list(filter(stays, self.folded))
        else:
            self.tables = self._open_again()


@settings(max_examples=examples(5), **TIMES)
@given(st.integers(0, 1 << 32), st.sampled_from(["", "parquet:"]))
def test_in_files(tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str) -> None:
    folder = tmp_path_factory.mktemp("truth")
    run = Run(lambda: open_tables(f"{kind}{folder / 'tables'}"), seed)
    for _ in range(4):
        run.steps(3)
        assert_equal(answer_of(read_level(run.tables, Level.MINUTE)), batch_answer(run.live))
        files = run.tables.file_uris("minute")  # type: ignore[attr-defined]
        if files:
            assert_equal(finals_in_duckdb(files), batch_answer(run.folded))


def finals_in_duckdb(files: list[str]) -> Answer:
    rows = duckdb.sql(
        f"select function, labels['shop'] as shop, epoch_us(bucket) as bucket, {', '.join(SHOWN)} "
        f"from read_parquet({files}, hive_partitioning = true) where is_final"
    ).fetchall()
    moments = {micros: START + timedelta(microseconds=micros - START.timestamp() * 1e6) for _, _, micros, *_ in rows}
    found = {(row[0], entity_of({"shop": row[1]}), moments[row[2]]): tuple(row[3:]) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    with PostgreSQL(tmp_path_factory.mktemp("postgres")) as running:
        yield running


def in_postgres(server: PostgreSQL, source: str) -> Answer:
    with psycopg.connect(server.url) as connection:
        rows = connection.execute(
            f"select function, labels, bucket, {', '.join(SHOWN)} from {source}".encode()
        ).fetchall()
    found = {(row[0], entity_from_table_labels(row[1].items()), row[2].astimezone(UTC)): tuple(row[3:]) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.server
@pytest.mark.parametrize("seed", range(2))
def test_in_postgresql(server: PostgreSQL, seed: int) -> None:
    with psycopg.connect(server.url) as connection:
        for name in (*SCHEMAS, "guard", "metrics"):
            connection.execute(f"drop table if exists penstock_{name} cascade")
        connection.execute("drop schema if exists penstock cascade")
    run = Run(lambda: open_tables(server.url), seed)
    run.tables.landing("first").close()
    for _ in range(4):
        run.steps(3)
        assert_equal(in_postgres(server, "penstock.minute"), batch_answer(run.live))
        assert_equal(in_postgres(server, "penstock_minute where is_final"), batch_answer(run.folded))


@pytest.mark.server
def test_records_have_their_ranks_in_postgresql_also_while_they_are_increments(server: PostgreSQL) -> None:
    tables = open_tables(server.url)
    moment = datetime(2026, 12, 1, tzinfo=UTC)

    def add_records(number: int, *records: tuple[str, float]) -> None:
        rows = [
            {"level": "minute", "metric": "slow", "function": "top_n(2)", "entity": "{}", "bucket": moment}
            | {"record": entity_of({"statement": text}), "max": value}
            for text, value in records
        ]
        batch = TableBatch("top", {"w": number - 1} if number else {}, {"w": number})
        add(tables, TOP_N, pa.Table.from_pylist(rows, schema=RECORDS), batch)

    def ranked() -> list[Any]:
        with psycopg.connect(server.url) as connection:
            asked = connection.execute(
                "select rank, record ->> 'statement', value from penstock.top_n where metric = 'slow' order by rank"
            )
            return asked.fetchall()

    add_records(0, ("b", 1.0), ("a", 1.0), ("c", 0.5))
    assert ranked() == [(1, "a", 1.0), (2, "b", 1.0)]
    tables.compact(TOP_N)
    add_records(1, ("c", 3.0))
    assert ranked() == [(1, "c", 3.0), (2, "a", 1.0)]


@pytest.mark.server
def test_postgresql_finds_labels_by_an_index_and_drops_whole_partitions(server: PostgreSQL) -> None:
    tables = open_tables(server.url)
    points = [("avg", "north", START + timedelta(days=day), 1.0, 0) for day in (100, 101)]
    held = max(tables.held("minute", ["penstock/days/w"]).values(), default=-1)
    add(tables, "minute", partials_of(points), TableBatch("days", {"w": held} if held >= 0 else {}, {"w": held + 1}))
    before = START + timedelta(days=101)
    with psycopg.connect(server.url) as connection:
        connection.execute("set enable_seqscan = off")
        plan = connection.execute(
            'explain select * from penstock_minute where date = %s and labels @> \'{"shop": "north"}\'',
            (before.date(),),
        ).fetchall()
        assert any("labels" in line for (line,) in plan)
        named = "select to_regclass('penstock_minute_20270209')::text"
        assert connection.execute(named).fetchone() == ("penstock_minute_20270209",)

    assert tables.expire("minute", before) >= 1
    with psycopg.connect(server.url) as connection:
        assert connection.execute(named).fetchone() == (None,)


@pytest.mark.server
def test_tables_stay_out_of_the_schema_of_the_views_for_a_role_of_its_name(server: PostgreSQL) -> None:
    assert "penstock:penstock@" in server.url
    tables = open_tables(server.url)
    tables.landing("views").close()
    held = max(tables.held("minute", ["penstock/role/w"]).values(), default=-1)
    point = ("avg", "north", START + timedelta(days=200 + held), 1.0, 0)
    add(tables, "minute", partials_of([point]), TableBatch("role", {"w": held} if held >= 0 else {}, {"w": held + 1}))
    with psycopg.connect(server.url) as connection:
        found = connection.execute("select schemaname from pg_tables where tablename like 'penstock%' group by 1")
        assert found.fetchall() == [("public",)]
