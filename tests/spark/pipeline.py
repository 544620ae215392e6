"""What the tests of the pipeline share: an edge that seals random points, a job to start and stop, plain answers."""

import random
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.model import share_batches
from penstock.model.exponential import DEFAULT_SCALE, percentile_relative_error
from penstock.model.finals import nearest_rank, rank_name
from penstock.model.function import AVG, RANKS, Function
from penstock.model.level import Level
from penstock.model.partial import merged, partials_of_columns
from penstock.model.segment import Segment, seal
from penstock.spark.job import JobConfig, start_job
from penstock.tables.labels import entity_from_table_labels
from penstock.tables.port import Tables, open_tables, read_level, read_top_n
from penstock.tables.table_rows import VALUES

MINUTE_US, HOUR_US = 60_000_000, 3_600_000_000
ERROR = 1.000001 * percentile_relative_error(DEFAULT_SCALE)  # and what rounding adds
Key = tuple[str, str, str, int]
Row = tuple[str, str, str, int, float]  # metric, function, entity, microseconds, value


class Edge:
    """Seals random points into segments and remembers every point."""

    def __init__(
        self,
        folder: Path,
        seed: int = 3,
        functions: tuple[Function, ...] = (AVG,),
        minutes: int = 3000,
        *,
        keeps_shares: bool = False,
    ) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.rng = random.Random(seed)
        self.functions = functions
        self.minutes = minutes  # that points are of
        self._least = 1 if keeps_shares else 1 << 32  # rows and entities of a segment that keeps shares apart
        self.new_queue()
        self.points: list[Row] = []

    def new_queue(self) -> None:
        """Count from the beginning again, as another queue does."""
        self._queue = uuid.uuid4().hex
        self._next: dict[str, int] = defaultdict(int)  # of each writer, as its queue counts
        self._covered: dict[tuple[Path, str], int] = defaultdict(int)  # in a folder, of a writer, up to before this

    def seal(self, writer: str = "edge", points: int = 500, folder: Path | None = None) -> Path:
        """A segment of points in any order, by default days apart."""
        rng = self.rng
        metric = rng.choice(["cpu", "rps"])
        entities = [f"e{rng.randrange(30)}" for _ in range(points)]
        times = [rng.randrange(self.minutes * MINUTE_US) for _ in range(points)]
        # One metric around zero, one with a tail so heavy that it has no mean.
        values = [rng.gauss(0, 10) if metric == "rps" else rng.paretovariate(0.8) for _ in range(points)]
        moments = pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        tables = []
        for function in self.functions:
            tables.append(partials_of_columns(metric, function, pa.array(entities), moments, pa.array(values)))
            self.points += [(metric, str(function), *row) for row in zip(entities, times, values)]
        folder, first = folder or self.folder, self._next[writer]
        folder.mkdir(exist_ok=True)
        self._next[writer] += 5
        segment = Segment(writer, self._covered[folder, writer], self._next[writer] - 1)  # as the exporter names them
        self._covered[folder, writer] = self._next[writer]
        with patch.multiple(share_batches, _MANY_ROWS=self._least, _MANY_ENTITIES=self._least):
            return seal(folder, segment, merged(pa.concat_tables(tables)), (f"{self._queue}-{writer}", first))

    def groups(self, level: Level) -> dict[Key, list[tuple[int, float]]]:
        """All points, by series and bucket."""
        width = level.minutes * MINUTE_US
        found: dict[Key, list[tuple[int, float]]] = defaultdict(list)
        for metric, function, entity, time, value in self.points:
            found[(metric, function, entity, time // width * width)].append((time, value))
        return found


def contents(tables: Tables, level: Level) -> dict[Key, dict[str, Any]]:
    rows = read_level(tables, level).to_pylist()
    found = {(r["metric"], r["function"], r["entity"], int(r["bucket"].timestamp()) * 1_000_000): r for r in rows}
    assert len(found) == len(rows)
    return found


def final_contents(tables: Any, level: Level) -> dict[Key, dict[str, Any]]:
    """What a reader sees that asks `where is_final` and knows nothing else."""
    rows = tables._rows(level.value)
    rows = rows.filter(rows["is_final"])
    entities = pa.array([entity_from_table_labels(labels) for labels in rows["labels"].to_pylist()], pa.string())
    listed = rows.append_column("entity", entities).to_pylist()
    found = {(r["metric"], r["function"], r["entity"], int(r["bucket"].timestamp()) * 1_000_000): r for r in listed}
    assert len(found) == len(listed)
    return found


def assert_same_values(found: dict[Key, dict[str, Any]], expected: dict[Key, dict[str, Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for name in ("count", "sum", "min", "max", *VALUES):
            assert found[key][name] == pytest.approx(row[name], rel=1e-9, abs=1e-9), (key, name)


def assert_exact(tables: Tables, edge: Edge) -> None:
    """The tables are those of one plain aggregation of all points."""
    for level in Level:
        found, expected = contents(tables, level), edge.groups(level)
        assert found.keys() == expected.keys()
        for key, points in expected.items():
            row, values = found[key], [value for _, value in points]
            if key[1] == "latest":
                assert row["value"] == max(points)[1]
                continue
            assert (row["count"], row["min"], row["max"]) == (len(values), min(values), max(values))
            assert row["sum"] == pytest.approx(sum(values), rel=1e-9, abs=1e-9)
            if key[1].startswith("percentile"):
                for rank in RANKS:
                    exact = nearest_rank(values, rank)
                    assert row[rank_name(rank)] == pytest.approx(exact, rel=ERROR, abs=0)
    assert top_of(tables) == expected_top(edge)


def top_of(tables: Tables, n: int = 3) -> dict[tuple[str, str, int], list[str]]:
    found: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for row in read_top_n(tables, n).to_pylist():
        bucket = int(row["bucket"].timestamp()) * 1_000_000
        found[(row["metric"], row["function"], bucket)].append(row["entity"])
    return found


def expected_top(edge: Edge, n: int = 3) -> dict[tuple[str, str, int], list[str]]:
    groups: dict[tuple[str, str, int], list[tuple[float, str]]] = defaultdict(list)
    for (metric, function, entity, bucket), points in edge.groups(Level.MINUTE).items():
        if function != "latest":
            groups[(metric, function, bucket)].append((-max(value for _, value in points), entity))
    return {group: [entity for _, entity in sorted(members)[:n]] for group, members in groups.items()}


class Job:
    """Starts and stops the query as often as a test likes."""

    def __init__(self, spark: SparkSession, folder: Path, location: str | None = None) -> None:
        self._spark = spark
        self.folder = folder
        self.tables = open_tables(location or str(folder / "tables"))
        self.config = JobConfig(segments=folder / "segments", checkpoint=str(folder / "checkpoint"), available_now=True)

    def run(self, **changes: Any) -> StreamingQuery:
        """Work off everything that is sealed, then stop. Raises what the query failed with."""
        return patiently(lambda: start_job(self._spark, self.tables, replace(self.config, **changes)))


def patiently(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query and wait until it ends; again if a Python process of Spark's was late.

    Spark waits 10 s for the one in which a source plans, which no setting changes; on a busy machine its start takes
    longer. That is no task, so it is not repeated by Spark either. The job's supervisor does the same as this.
    """
    for _ in range(4):
        query = start()
        try:
            query.awaitTermination()
            return query
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error):
                raise
            late = error
        finally:
            query.stop()
    raise late


Failing = Callable[..., Any]
