"""What becomes of the cost of a row as rows and series grow, beside what becomes of it for the peers."""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from bench.processes import cpu_seconds, peak_memory
from bench.spark_data import METRICS, SEGMENT_ROWS, Shape, write_parquet, write_segments
from bench.spark_peers import merged, noop, peers

ROWS = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
SERIES = (1_000, 10_000, 100_000, 1_000_000)
WARM_UP = 6  # runs until Java has compiled what counts
AT_ROWS = 5_000_000  # at which the series grow
AT_POINTS = 5  # of a series and minute, so that there are as many groups however many series: a million


def growth(spark: SparkSession, folder: Path, rounds: int, kinds: Sequence[str]) -> None:
    if "rows" in kinds:
        print("growth of the rows, 10,000 series, 16.7 points a series and minute")
        _grow(spark, folder / "rows", rounds, {f"{rows:,} rows": Shape(rows) for rows in ROWS})
    if "series" in kinds:
        print(f"growth of the series, {AT_ROWS:,} rows, {AT_POINTS} points a series and minute")
        _grow(spark, folder / "series", rounds, {f"{series:,} series": _crowded(series) for series in SERIES})
    if "sparse" in kinds:
        print(f"growth of the series, {AT_ROWS:,} rows, 167,000 rows a minute: ever fewer points a series and minute")
        shapes = {f"{series:,} series": Shape(AT_ROWS, series // METRICS) for series in SERIES}
        _grow(spark, folder / "sparse", rounds, shapes)


def _crowded(series: int) -> Shape:
    """So many series, and as many rows a minute as it takes that each has its points."""
    return Shape(AT_ROWS, series // METRICS, 60_000 * SEGMENT_ROWS // (series * AT_POINTS))


def _grow(spark: SparkSession, folder: Path, rounds: int, shapes: dict[str, Shape]) -> None:
    """Ours alone first, from the smallest on, for the memory; then every engine in turns, over every shape."""
    arms: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, shape in shapes.items():
        segments, parquet = write_segments(folder / name / "segments", shape), folder / name / "parquet"
        frame = spark.read.format("penstock").option("path", str(segments)).load().transform(merged)
        groups = _checked(frame, shape)
        for _ in range(1 if arms else WARM_UP):
            noop(frame)
        print(f"  {name:<20} {groups:>10,} groups, most memory so far: {peak_memory()}", flush=True)
        arms[name, "penstock"] = partial(noop, frame)
        for peer, arm in peers(spark, write_parquet(parquet, shape)).items():
            arms[name, peer] = arm
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in arms}
    engines = list(dict.fromkeys(engine for _, engine in arms))
    for _, engine in product(range(rounds), engines):
        of_engine = {key: arm for key, arm in arms.items() if key[1] == engine}
        next(iter(of_engine.values()))()  # not counted: Spark ends Python processes that were idle while others ran
        for key, arm in of_engine.items():
            began, worked = time.perf_counter(), cpu_seconds()
            arm()
            taken[key].append((time.perf_counter() - began, cpu_seconds() - worked))
    first: dict[str, tuple[float, float]] = {}
    for (name, engine), seconds in sorted(taken.items(), key=lambda one: engines.index(one[0][1])):
        wall, cores = (statistics.median(column) / shapes[name].rows * 1e6 for column in zip(*seconds))
        least = first.setdefault(engine, (wall, cores))
        times = f"{wall:6.3f} µs a row ({wall / least[0]:.2f} × the first)"
        works = f"{cores:6.3f} µs of a core ({cores / least[1]:.2f} ×)"
        print(f"  {engine:<26} {name:<18} {times}, {works}", flush=True)
    shutil.rmtree(folder)


def _checked(frame: DataFrame, shape: Shape) -> int:
    row = frame.agg(F.count("*"), F.sum("count")).first()
    assert row is not None
    assert row[1] == shape.segments * min(shape.rows, SEGMENT_ROWS), f"{row[1]} points of {shape.rows}"
    return int(row[0])
