"""The questions of the guide, as they stand there, in Spark SQL and DuckDB: their answers are what the points say."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.model.distinct import register_of
from penstock.model.finals import nearest_rank
from penstock.model.function import Function
from penstock.model.partial import merged, partials_of_columns
from penstock.model.point import entity_of
from penstock.spark import register
from penstock.tables.catalog_sql import catalog_sql
from penstock.tables.port import TOP_N, TableBatch, Tables, open_tables
from penstock.tables.table_rows import RECORDS
from tests.tables.adding import add

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "query.md").read_text()
QUESTIONS = [
    part.partition("\n")[2].strip().rstrip(";")
    for part in (ROOT / "examples" / "questions.sql").read_text().split("\n\n")[1:]
]
TODAY = datetime.now(UTC).date()
Ask = Callable[[str], list[tuple[Any, ...]]]


@dataclass
class Shop:
    """Raw points of two weeks, and the tables that hold them: some folded, some not."""

    tables: Tables
    rng: random.Random = field(default_factory=lambda: random.Random(8))
    durations: dict[tuple[str, datetime], list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statements: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    orders: dict[tuple[str, date], int] = field(default_factory=lambda: defaultdict(int))
    users: dict[date, set[str]] = field(default_factory=lambda: defaultdict(set))

    def trade(self, number: int) -> None:
        """A batch of points."""
        rng, rows = self.rng, defaultdict[str, list[pa.Table]](list)
        for service, host in (("cart", "a"), ("cart", "b"), ("pay", "a")):
            for hour in (1, 5):
                moment = _at(TODAY - timedelta(days=1), hour)
                values = [rng.lognormvariate(3, 1) for _ in range(40)]
                self.durations[service, moment] += values
                rows["hour"].append(_partials("request.duration", "percentile", {"service": service, "host": host},
                                              moment, values))  # fmt: skip
        for endpoint, rate in (("/pay", 0.3), ("/cart", 0.1)):
            failed = [float(rng.random() < rate) for _ in range(100)]
            self.errors[endpoint] += failed
            moment = _at(TODAY - timedelta(days=1), 3)
            rows["hour"].append(_partials("request.errors", "percent", {"endpoint": endpoint}, moment, failed))
        for days in range(1, 15):
            for shop in ("north", "south"):
                day, count = TODAY - timedelta(days=days), rng.randrange(1, 9)
                self.orders[shop, day] += count
                rows["day"].append(_partials("orders", "count", {"shop": shop}, _at(day, 0), [1.0] * count))
                if days < 3:
                    seen = {f"user {rng.randrange(400)}" for _ in range(200)}
                    self.users[day] |= seen
                    rows["day"].append(_users({"shop": shop}, _at(day, 0), sorted(seen)))
        for name, made in rows.items():
            add(self.tables, name, merged(pa.concat_tables(made)), TableBatch("src", *_step(number)))
        add(self.tables, TOP_N, self._records(), TableBatch("src", *_step(number)))

    def _records(self) -> pa.Table:
        listed = []
        for n in range(30):
            statement, value = f"select {n % 15}", self.rng.uniform(1, 100)
            self.statements[statement].append(value)
            moment = _at(TODAY - timedelta(days=1), 2) + timedelta(minutes=n % 5)
            record = entity_of({"statement": statement})
            listed.append(("minute", "statement.duration", "top_n(20)", entity_of({"db": "x"}), moment, record, value))
        return pa.table(list(map(list, zip(*listed))), schema=RECORDS)


def _at(day: date, hour: int) -> datetime:
    return datetime.combine(day, time(hour), UTC)


def _step(number: int) -> tuple[dict[str, int], dict[str, int]]:
    return {"w": number - 1} if number else {}, {"w": number}


def _partials(metric: str, function: str, labels: dict[str, str], moment: datetime, values: list[float]) -> pa.Table:
    moments = pa.array([moment] * len(values), pa.timestamp("us", tz="UTC"))
    entities = pa.array([entity_of(labels)] * len(values))
    return partials_of_columns(metric, Function.parse(function), entities, moments, pa.array(values))


def _users(labels: dict[str, str], moment: datetime, users: list[str]) -> pa.Table:
    registers = [register for user in users if (register := register_of(user, 12))]
    moments = pa.array([moment] * len(registers), pa.timestamp("us", tz="UTC"))
    entities = pa.array([entity_of(labels)] * len(registers))
    ranks = pa.array([float(rank) for _, rank in registers])
    parts = pa.array([place for place, _ in registers], pa.int64())
    return partials_of_columns("users", Function.parse("distinct(12)"), entities, moments, ranks, parts=parts)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    made = Shop(open_tables(str(tmp_path_factory.mktemp("shop") / "tables")))
    made.trade(0)
    for name in ("hour", "day", TOP_N):
        made.tables.compact(name)
    made.trade(1)
    return made


@pytest.fixture(scope="module", params=["spark", "duckdb"])
def ask(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Ask]:
    if request.param == "spark":
        spark: SparkSession = request.getfixturevalue("spark")
        register(spark, shop.tables.location)
        yield lambda question: [tuple(row) for row in spark.sql(question).collect()]
        spark.sql("DROP DATABASE penstock CASCADE")
        return
    connection = duckdb.connect()
    connection.execute("set timezone = 'UTC'")
    connection.execute(catalog_sql("duckdb", shop.tables.location))
    yield lambda question: [tuple(row.values()) for row in connection.sql(question).to_arrow_table().to_pylist()]


def test_p95_by_service_per_hour(ask: Ask, shop: Shop) -> None:
    found = ask(QUESTIONS[0])
    expected = {key: nearest_rank(values, 95) for key, values in shop.durations.items()}
    assert [(service, moment.replace(tzinfo=UTC)) for service, moment, _ in found] == sorted(expected)
    assert [p95 for *_, p95 in found] == [pytest.approx(expected[key], rel=0.0055) for key in sorted(expected)]


def test_error_rate_per_endpoint(ask: Ask, shop: Shop) -> None:
    expected = {endpoint: 100 * sum(failed) / len(failed) for endpoint, failed in shop.errors.items()}
    assert ask(QUESTIONS[1]) == [(one, pytest.approx(expected[one])) for one in ("/pay", "/cart")]


def test_top_10_slow_statements_yesterday(ask: Ask, shop: Shop) -> None:
    slowest = sorted(((max(values), one) for one, values in shop.statements.items()), reverse=True)[:10]
    assert ask(QUESTIONS[2]) == [(one, value) for value, one in slowest]


def test_week_over_week(ask: Ask, shop: Shop) -> None:
    week_ago = TODAY - timedelta(days=7)
    expected = [
        (
            name,
            sum(count for (one, day), count in shop.orders.items() if one == name and day >= week_ago),
            sum(count for (one, day), count in shop.orders.items() if one == name and day < week_ago),
        )
        for name in ("north", "south")
    ]
    assert ask(QUESTIONS[3]) == expected


def test_distinct_users_per_day_over_all_shops(ask: Ask, shop: Shop) -> None:
    found = ask(QUESTIONS[4])
    assert [day for day, _ in found] == sorted(shop.users)
    assert [users for _, users in found] == [
        pytest.approx(len(shop.users[day]), rel=0.05) for day in sorted(shop.users)
    ]


def test_the_guide_has_the_questions_as_they_are_asked_here() -> None:
    assert len(QUESTIONS) == 5
    for question in QUESTIONS:
        assert f"```sql\n{question};\n```" in PAGE


def test_the_guides_example_for_polars_needs_no_penstock(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(shop.tables.location).parent)
    (example,) = [part.partition("```")[0] for part in PAGE.split("```python\n") if "scan_delta" in part[:200]]
    names: dict[str, Any] = {}
    exec(example.replace("order.duration", "request.duration"), names)
    assert len(names["hours"].collect()) == 6
    assert isinstance(names["hours"], polars.LazyFrame)
