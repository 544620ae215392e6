"""What becomes of the cost of a row as rows and series grow, and what a start costs."""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from bench.processes import cpu_seconds, peak_memory
from bench.spark_data import METRICS, SEGMENT_ROWS, Shape, write_segments
from penstock.spark.delta import DeltaTables
from penstock.spark.java import find_java
from penstock.spark.job import JobConfig, start_job
from penstock.spark.rollup import merged
from penstock.spark.session import archive_path, make_archive

ROWS = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
SERIES = (1_000, 10_000, 100_000, 1_000_000)
WARM_UP = 6  # runs until Java has compiled what counts
AT_ROWS = 5_000_000  # at which the series grow
AT_POINTS = 5  # of a series and minute, so that there are as many groups however many series: a million


def growth(spark: SparkSession, folder: Path, rounds: int, kinds: Sequence[str]) -> None:
    if "rows" in kinds:
        print("growth of the rows, 10,000 series, 16.7 points a series and minute")
        _grow(spark, folder, rounds, {f"{rows:,} rows": Shape(rows) for rows in ROWS})
    if "series" in kinds:
        print(f"growth of the series, {AT_ROWS:,} rows, {AT_POINTS} points a series and minute")
        _grow(spark, folder, rounds, {f"{series:,} series": _crowded(series) for series in SERIES})
    if "sparse" in kinds:
        print(f"growth of the series, {AT_ROWS:,} rows, 167,000 rows a minute: ever fewer points a series and minute")
        _grow(spark, folder, rounds, {f"{series:,} series": Shape(AT_ROWS, series // METRICS) for series in SERIES})


def _crowded(series: int) -> Shape:
    """So many series, and as many rows a minute as it takes that each has its points."""
    return Shape(AT_ROWS, series // METRICS, 60_000 * SEGMENT_ROWS // (series * AT_POINTS))


def _grow(spark: SparkSession, folder: Path, rounds: int, shapes: dict[str, Shape]) -> None:
    first: tuple[float, float] | None = None
    for name, shape in shapes.items():
        segments = write_segments(folder / "growing", shape)
        frame = spark.read.format("penstock").option("path", str(segments)).load().transform(merged)
        groups = _checked(frame, shape)
        for _ in range(1 if first else WARM_UP):
            frame.write.format("noop").mode("overwrite").save()
        taken = []
        for _ in range(rounds):
            began, worked = time.perf_counter(), cpu_seconds()
            frame.write.format("noop").mode("overwrite").save()
            taken.append((time.perf_counter() - began, cpu_seconds() - worked))
        wall, cores = (statistics.median(column) / shape.rows * 1e6 for column in zip(*taken))
        first = first or (wall, cores)
        times = f"{wall:6.2f} µs a row ({wall / first[0]:.2f} × the first)"
        works = f"{cores:6.2f} µs of a core ({cores / first[1]:.2f} ×)"
        print(f"  {name:<20} {times}, {works}; {groups:>10,} groups, most memory: {peak_memory()}", flush=True)
        shutil.rmtree(segments)


def _checked(frame: DataFrame, shape: Shape) -> int:
    row = frame.agg(F.count("*"), F.sum("count")).first()
    assert row is not None
    assert row[1] == shape.segments * min(shape.rows, SEGMENT_ROWS), f"{row[1]} points of {shape.rows}"
    return int(row[0])


def starts() -> None:
    """A new process, a session, one batch of a job, its tables: with and without the class-data archive."""
    print("cold start to the first table: session / table, 100,000 rows")
    if not archive_path(find_java()).exists():
        make_archive()
    with tempfile.TemporaryDirectory() as scratch:
        segments = write_segments(Path(scratch) / "segments", Shape(100_000))
        for number in range(3):
            for kind in ("with", "without"):
                tables = Path(scratch) / f"tables-{number}-{kind}"
                command = [sys.executable, "-m", "bench.spark_growth", str(segments), str(tables)]
                environ = os.environ | ({"PENSTOCK_ARCHIVE": "none"} if kind == "without" else {})
                began = time.perf_counter()
                ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
                took = time.perf_counter() - began
                print(f"  {kind:<8} the archive: {ran.stdout.strip()} s session, {took:6.1f} s in all")


def _first_table(segments: Path, folder: Path) -> None:
    from penstock.spark.session import start_session

    began = time.perf_counter()
    spark = start_session()
    spark.range(1).collect()
    print(f"{time.perf_counter() - began:.1f}")
    tables = DeltaTables(folder / "tables")
    config = JobConfig(segments=segments, checkpoint=folder / "checkpoint", available_now=True)
    start_job(spark, tables, config).awaitTermination()
    assert tables.describe("day").rows > 0
    os._exit(0)  # the table is there: how long Java takes to end is another matter


if __name__ == "__main__":
    _first_table(Path(sys.argv[1]), Path(sys.argv[2]))
