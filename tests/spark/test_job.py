"""From segments to tables: exact, whatever the batches, the order and the crashes."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.model.level import Level
from penstock.model.partial import PARTIALS, merged, of_points
from penstock.model.point import chunk_type
from penstock.model.segment import Segment, seal
from penstock.spark.job import start_job
from penstock.spark.source import SCHEMA
from penstock.spark.tables import Tables

pytestmark = pytest.mark.spark
HOUR_US = 3_600_000_000


class Edge:
    """Seals random points into segments and remembers every partial that it sealed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.folder.mkdir()
        self._rng = random.Random(seed)
        self._next = 0
        self.sealed: list[pa.Table] = []

    def seal(self, writer: str = "edge", points: int = 500) -> None:
        rng = self._rng
        entities = [f"e{rng.randrange(30)}" for _ in range(points)]
        times = [rng.randrange(50 * HOUR_US) for _ in range(points)]  # any order, days apart
        chunk = chunk_type(rng.choice(["cpu", "rps"])).of(entities, times, [rng.gauss(0, 10) for _ in range(points)])
        partials = of_points([chunk])
        seal(self.folder, Segment(writer, self._next, self._next + 4), partials)
        self._next += 5
        self.sealed.append(partials)

    def expected(self, level: Level) -> dict[tuple[str, str, int], tuple[Any, ...]]:
        """All partials merged at once, in plain Python."""
        found: dict[tuple[str, str, int], tuple[Any, ...]] = {}
        width = level.minutes * 60_000_000
        for row in pa.concat_tables(self.sealed).to_pylist():
            bucket = int(row["bucket"].timestamp()) * 1_000_000 // width * width
            key = (row["metric"], row["entity"], bucket)
            count, total, low, high = found.get(key, (0, 0.0, float("inf"), float("-inf")))
            low, high = min(low, row["min"]), max(high, row["max"])
            found[key] = (count + row["count"], total + row["sum"], low, high)
        return found


def contents(tables: Tables, level: Level) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    rows = tables.read(level).to_pylist()
    return {
        (r["metric"], r["entity"], int(r["bucket"].timestamp()) * 1_000_000): (r["count"], r["sum"], r["min"], r["max"])
        for r in rows
    }


def assert_exact(tables: Tables, edge: Edge) -> None:
    for level in Level:
        found, expected = contents(tables, level), edge.expected(level)
        assert found.keys() == expected.keys()
        for key, (count, total, low, high) in expected.items():
            assert found[key] == (count, pytest.approx(total, rel=1e-9, abs=1e-9), low, high)


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "segments", seed=3)


class Job:
    """Starts and stops the query as often as a test likes."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self.tables = Tables(folder / "tables")
        self.query: StreamingQuery | None = None

    def run(self, checkpoint: str = "checkpoint") -> None:
        """Work off everything that is sealed, then stop."""
        query = start_job(self._spark, self._folder / "segments", self.tables, self._folder / checkpoint)
        self.query = query
        try:
            query.processAllAvailable()
        finally:
            query.stop()


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Iterator[Job]:
    job = Job(spark, tmp_path)
    yield job
    if job.query:
        job.query.stop()


def test_the_source_declares_exactly_the_schema_of_partials(spark: SparkSession) -> None:
    empty = spark.createDataFrame([], SCHEMA).toArrow()
    assert empty.schema.names == PARTIALS.names
    assert [field.type for field in empty.schema] == [field.type for field in PARTIALS]


def test_tables_equal_one_merge_of_everything_over_batches_writers_and_restarts(job: Job, edge: Edge) -> None:
    edge.seal()
    edge.seal("other")
    job.run()
    edge.seal()
    edge.seal("third")
    edge.seal("other")
    job.run()

    assert_exact(job.tables, edge)


def test_a_batch_that_runs_again_after_a_crash_between_tables_adds_nothing_twice(
    job: Job, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended = job.tables.append

    def crash_after_hour(name: str, rows: pa.Table, query: str, batch: int) -> bool:
        done = appended(name, rows, query, batch)
        if name == "hour":
            raise RuntimeError("power cut")
        return done

    edge.seal()
    monkeypatch.setattr(job.tables, "append", crash_after_hour)
    with pytest.raises(Exception, match="power cut"):
        job.run()
    monkeypatch.undo()
    edge.seal()
    job.run()

    assert_exact(job.tables, edge)


def test_top_n_is_exact_over_several_batches(job: Job, edge: Edge) -> None:
    for _ in range(2):
        edge.seal(points=3000)
        job.run()

    everything = merged(pa.concat_tables(edge.sealed)).to_pylist()
    groups: dict[tuple[str, Any], list[tuple[float, str]]] = {}
    for row in everything:
        groups.setdefault((row["metric"], row["bucket"]), []).append((-row["max"], row["entity"]))
    expected = {group: [entity for _, entity in sorted(rows)[:3]] for group, rows in groups.items()}
    found: dict[tuple[str, Any], list[str]] = {}
    for row in job.tables.read_top_n(3).to_pylist():
        found.setdefault((row["metric"], row["bucket"]), []).append(row["entity"])
    assert found == expected


def test_ties_in_top_n_go_to_the_entity_that_sorts_first(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    rows = of_points([chunk_type("cpu").of(["b", "a", "c"], [0, 0, 0], [1.0, 1.0, 1.0])])
    tables.append("top_n", rows.select(["metric", "bucket", "entity", "max"]), "q", 0)

    assert tables.read_top_n(2)["entity"].to_pylist() == ["a", "b"]
