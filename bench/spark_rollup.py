"""Roll-up on Spark beside its peers, on the same rows in the same run: `make bench PART=spark`.

Raw rows (20 metrics × 500 entities, 167,000 a minute, in the order of time) as segments that no L1 has merged, and as
Parquet for the peers: count, sum, min, max, avg by (metric, entity, minute). Arms take turns in one warm JVM; the
tables show medians. Every arm's answer is checked before it is timed. The machine's load is printed, since wall times
on a busy one only compare with each other.

    python -m bench.spark_rollup                     everything but the long ones: some minutes
    python -m bench.spark_rollup --only percentiles  one part: basics, percentiles, job, l1
    python -m bench.spark_rollup --growth            1 M to 30 M rows, 1 k to 1 M series: half an hour; one part of it
                                                     with rows, series (as many points of each), sparse (ever
                                                     fewer), kept (segments and writers that the tables hold)
    python -m bench.spark_rollup --start             from nothing to the first table, with and without the class archive
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.streaming.query import StreamingQuery

from bench.processes import cpu_seconds, peak_memory
from bench.spark_data import PERCENTILE, Shape, write_l1_segments, write_parquet, write_segments
from bench.spark_growth import growth
from bench.spark_kept import kept
from bench.spark_peers import KEYS, duckdb_roll_up, merged, noop, peers, polars_rolled_up, spark_rolled_up
from bench.spark_start import starts
from penstock.model.exponential import DEFAULT_SCALE, percentile_relative_error
from penstock.model.partial import PARTIALS
from penstock.model.segment import read_segment_encoded
from penstock.spark import read_segments
from penstock.spark.job import JobConfig, start_job
from penstock.spark.pieces import SparkReadPiece
from penstock.spark.rollup import rolled_up
from penstock.spark.session import start_session
from penstock.spark.source import SegmentReader, SegmentSource
from penstock.tables.delta import DeltaTables
from penstock.tables.port import SCHEMAS

SMALL_BATCH, SMALL_BATCHES = 100_000, 20
UNBOUNDED = 1 << 40
WARM_UP = 4  # runs of an arm until Java has compiled what counts: a job's driver lives long
Arm = tuple[Callable[[], DataFrame], Callable[[DataFrame], Any]]


class UnmergedSource(SegmentSource):
    """The same segments with every row handed to Spark, to show what merging in the tasks is worth."""

    @classmethod
    def name(cls) -> str:
        return "penstock-unmerged"

    def reader(self, schema: Any) -> "UnmergedReader":
        merging = super().reader(schema)
        return UnmergedReader(merging._folder, None, merging._tasks)


class UnmergedReader(SegmentReader):
    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SparkReadPiece)
        for name in partition.names:
            yield from read_segment_encoded(self._folder.folder / name, partition.share).cast(PARTIALS).to_batches()


def timed(arms: dict[str, Callable[[], Any]], rounds: int, rows: int) -> None:
    """Every arm in turn, `rounds` times after some that are not counted: wall time, and that of all cores."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(WARM_UP + rounds):
        for name, arm in arms.items():
            began, worked = time.perf_counter(), cpu_seconds()
            arm()
            if number >= WARM_UP:
                seconds[name].append((time.perf_counter() - began, cpu_seconds() - worked))
    first: tuple[float, float] | None = None
    for name, taken in seconds.items():
        wall, cores = (statistics.median(column) for column in zip(*taken))
        first = first or (wall, cores)
        ours = f"penstock is {wall / first[0]:5.2f} × as fast, {cores / first[1]:5.2f} × by core-seconds"
        print(f"  {name:<40} {wall:7.2f} s {rows / wall / 1e6:7.2f} M rows/s {cores:6.1f} core-s   {ours}", flush=True)


def check(name: str, found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Groups, points and their sum."""
    exact = found[:2] == expected[:2] and abs(found[2] - expected[2]) <= 1e-9 * abs(expected[2])
    if not exact:
        raise AssertionError(f"{name}: got groups, points, sum = {found}, expected {expected}")


def totals(frame: DataFrame, count: str = "count", total: str = "sum") -> tuple[Any, ...]:
    row = frame.agg(F.count("*"), F.sum(count), F.sum(total)).first()
    assert row is not None
    return tuple(row)


def basics(spark: SparkSession, folder: Path, rounds: int, shape: Shape) -> None:
    print("count, sum, min, max, avg by (metric, entity, minute)")
    segments, parquet = write_segments(folder / "segments", shape), write_parquet(folder / "parquet", shape)
    files = str(parquet / "*.parquet")

    def ours() -> DataFrame:
        return _segments(spark, segments).transform(merged)

    def unmerged() -> DataFrame:
        return spark.read.format("penstock-unmerged").option("path", str(segments)).load().transform(merged)

    expected = duckdb.sql(f"select count(*), sum(n), sum(s) from ({duckdb_roll_up(files)})").fetchall()[0]
    assert expected[1] == shape.rows
    for name, frame in {"penstock": ours(), "unmerged": unmerged(), "spark": spark_rolled_up(spark, parquet)}.items():
        check(name, totals(frame), expected)
    by_polars = polars_rolled_up(files)
    check("polars", (by_polars.height, by_polars["n"].sum(), by_polars["s"].sum()), expected)
    arms: dict[str, Callable[[], Any]] = {
        "penstock (segments)": lambda: noop(ours()),
        "the same without merging in the tasks": lambda: noop(unmerged()),
        **peers(spark, parquet),
    }
    timed(arms, rounds, shape.rows)


def percentiles(spark: SparkSession, folder: Path, rounds: int, shape: Shape) -> None:
    print("the same with p50, p95, p99")
    segments = write_segments(folder / "percentiles", shape, PERCENTILE)
    parquet = folder / "parquet" if (folder / "parquet").exists() else write_parquet(folder / "parquet", shape)
    files, ranks = str(parquet / "*.parquet"), (50, 95, 99)

    def sql(quantile: str) -> str:
        found = ", ".join(f"{quantile}(value, {rank / 100}) p{rank}" for rank in ranks)
        columns = "metric, entity, date_trunc('minute', time) as bucket, count(*) n"
        return f"select {columns}, {found} from '{files}' group by 1, 2, 3"

    def approx() -> None:
        raw = spark.read.parquet(str(parquet)).withColumn("minute", F.date_trunc("minute", "time"))
        noop(raw.groupBy(*KEYS).agg(F.count("*"), F.percentile_approx("value", [0.5, 0.95, 0.99])))

    ours = read_segments(spark, segments, ranks).select("metric", "entity", "bucket", "count", "p50", "p95", "p99")
    found = ours.toArrow()  # DuckDB reads it by its name
    error = ", ".join(f"max(abs(found.p{rank} / exact.p{rank} - 1))" for rank in ranks)
    join = f"from found join ({sql('quantile_disc')}) exact using (metric, entity, bucket)"
    answer = duckdb.sql(f"select count(*), sum(found.count), {error} {join}").fetchall()[0]
    bound = percentile_relative_error(DEFAULT_SCALE)
    if answer[0] != found.num_rows or answer[1] != shape.rows or max(answer[2:]) > bound * (1 + 1e-9):
        raise AssertionError(f"percentiles: got groups, points, errors = {answer}, {found.num_rows} groups of ours")
    print(f"  largest error of p50, p95, p99 over {answer[0]:,} groups: {max(answer[2:]):.3%} (stated {bound:.3%})")
    arms: dict[str, Callable[[], Any]] = {
        "penstock (exponential buckets, 0.54 %)": lambda: noop(read_segments(spark, segments, ranks)),
        "Spark's percentile_approx": approx,
        "DuckDB's t-digest": lambda: duckdb.sql(sql("approx_quantile")).to_arrow_table(),
        "DuckDB, exact": lambda: duckdb.sql(sql("quantile_disc")).to_arrow_table(),
    }
    timed(arms, rounds, shape.rows)


def _segments(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.format("penstock").option("path", str(folder)).load()


def job(spark: SparkSession, folder: Path, rounds: int, shape: Shape) -> None:
    """The full job with batches of 100 k, 1 M and all rows, beside the same query into noop."""
    print("full job: minute + hour + day + top-n into Delta, warm")
    segments = folder / "segments" if (folder / "segments").exists() else write_segments(folder / "segments", shape)
    small = write_segments(folder / "small", Shape(SMALL_BATCH), copies=SMALL_BATCHES)
    _full_job(spark, folder / "warm-up", segments, 4, shape.rows)  # lets Java compile what counts
    for label, source, files, rows in (
        ("100 k rows a batch", small, 1, SMALL_BATCH * SMALL_BATCHES),
        ("1 M rows a batch", segments, 4, shape.rows),
        ("all rows in one batch", segments, shape.segments, shape.rows),
        ("all rows in one batch, again", segments, shape.segments, shape.rows),
    ):
        _batches(f"penstock job, {label}", _full_job(spark, folder / label, source, files, rows))
        print(f"  {'':<46} most memory so far: {peak_memory()}")
    into_noop = (
        spark.readStream.format("penstock")
        .options(path=str(segments), maxFilesPerTrigger="4")
        .load()
        .writeStream.foreachBatch(lambda rows, _: noop(rows.transform(rolled_up)))
        .option("checkpointLocation", str(folder / "checkpoint-noop"))
        .trigger(availableNow=True)
        .start()
    )
    into_noop.awaitTermination()
    _batches("the same plan into noop", into_noop)


def _full_job(spark: SparkSession, folder: Path, segments: Path, files: int, rows: int) -> StreamingQuery:
    """The job over all segments, so many a batch; every table holds every point."""
    config = JobConfig(
        segments=segments,
        checkpoint=folder / "checkpoint",
        available_now=True,
        max_files=files,
        max_rows=UNBOUNDED,
        max_bytes=UNBOUNDED,
    )
    tables = DeltaTables(folder / "tables")
    query = start_job(spark, tables, config)
    query.awaitTermination()
    for name in SCHEMAS:
        if name != "top_n":
            counted = duckdb.read_parquet(tables.file_uris(name)).sum("count").fetchall()[0]
            assert counted == (rows,), f"{name}: {counted} points, expected {rows}"
    return query


def _batches(label: str, query: Any) -> None:
    progress = [one for one in query.recentProgress if one["numInputRows"]]
    taken = [one["batchDuration"] / 1000 for one in progress]
    warm = statistics.median(taken[1:] or taken)
    parts = {name: statistics.median(one["durationMs"].get(name, 0) for one in progress[1:] or progress) for name in
             ("addBatch", "walCommit", "commitOffsets", "latestOffset", "queryPlanning")}  # fmt: skip
    detail = ", ".join(f"{name} {ms:.0f}" for name, ms in parts.items())
    print(f"  {label:<46} {warm:7.2f} s a batch, {len(taken)} of them   (first: {taken[0]:.2f} s; ms: {detail})")


def l1(spark: SparkSession, folder: Path, rounds: int, shape: Shape) -> None:
    print("input that L1 has merged (ten seconds)")
    rows = write_l1_segments(folder / "l1", shape)
    frame = _segments(spark, folder / "l1").transform(merged)
    _, points, _ = totals(frame)
    assert points == shape.rows, f"{points} points, expected {shape.rows}"
    timed({f"penstock, {rows:,} partials, as raw points": lambda: noop(frame)}, rounds, shape.rows)


PARTS = {"basics": basics, "percentiles": percentiles, "job": job, "l1": l1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(PARTS), action="append")
    parser.add_argument("--growth", nargs="*", choices=["rows", "series", "sparse", "kept"])
    parser.add_argument("--start", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])  # Spark's workers
    print(f"{arguments.rows:,} rows, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if arguments.start:
        starts()
        return
    spark = start_session("local[*]", {"spark.driver.memory": "4g"})
    spark.dataSource.register(UnmergedSource)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.growth is not None:
            kinds = arguments.growth or ("rows", "series", "sparse", "kept")
            growth(spark, folder, arguments.rounds, kinds)
            if "kept" in kinds:
                kept(spark, folder / "kept", arguments.rounds)
        else:
            for name in arguments.only or PARTS:
                PARTS[name](spark, folder, arguments.rounds, Shape(arguments.rows))
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    spark.stop()


if __name__ == "__main__":
    main()
