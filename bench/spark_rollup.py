"""Roll-up on Spark beside its peers, on the same rows in the same run: `make bench-spark`.

Raw rows (20 metrics × 500 entities, 167,000 a minute, in the order of time) as segments that no L1 has merged, and as
Parquet for the peers:
count, sum, min, max, avg by (metric, entity, minute). Arms take turns in one warm JVM; the tables show medians.
The machine's load is printed, since wall times on a busy one only compare with each other.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.model.segment import Segment, seal
from penstock.spark.delta import DeltaTables
from penstock.spark.job import JobConfig, start_job
from penstock.spark.reading import with_finals
from penstock.spark.rollup import merged
from penstock.spark.session import archive_path, start_session

METRICS, ENTITIES = 20, 500
SEGMENT_ROWS, SEGMENT_MS = 250_000, 90_000  # 10 M rows are an hour, as time goes by: 16.7 points a series and minute


def points(rows: int, seed: int) -> pa.Table:
    """The raw points of segment number `seed` as columns; values have a heavy tail."""
    rng = random.Random(seed)
    metrics = pa.array([f"service.metric.{n}" for n in range(METRICS)])
    entities = pa.array([f'{{"endpoint":"GET /things/{n}","service":"s{n % 20}"}}' for n in range(ENTITIES)])
    base = pa.array([rng.lognormvariate(3, 1) for _ in range(10_007)])  # prime: no pattern with the keys
    index = pa.array(rng.choices(range(METRICS * ENTITIES), k=rows), pa.int32())
    times = pa.array(rng.choices(range(seed * SEGMENT_MS, (seed + 1) * SEGMENT_MS), k=rows), pa.int64())
    moments = pc.add(pc.multiply(times, 1000), 1_700_000_040_000_000).cast(pa.timestamp("us", tz="UTC"))
    return pa.table(
        {
            "metric": metrics.take(pc.divide(index, ENTITIES)),
            "entity": entities.take(pc.subtract(index, pc.multiply(pc.divide(index, ENTITIES), ENTITIES))),
            "time": moments,
            "value": base.take(pc.bit_wise_and(pc.cast(times, pa.int32()), 8191)),
        }
    )


def as_partials(raw: pa.Table, function: Function = AVG) -> pa.Table:
    """One row a point: what L1 would have merged."""
    rows = raw.num_rows
    bucket = pc.floor_temporal(raw["time"].cast(pa.timestamp("us")), unit="minute").cast(PARTIALS.field("bucket").type)
    zero = pa.repeat(pa.scalar(0, pa.int64()), rows)
    part = function.parts(raw["value"], raw["time"]) if function.splits else zero
    name, one = pa.repeat(pa.scalar(str(function)), rows), pa.repeat(pa.scalar(1, pa.int64()), rows)
    value = raw["value"]
    columns = [raw["metric"], name, raw["entity"], bucket, part, pa.nulls(rows, pa.string()), one, value, value, value]
    return pa.table(columns, schema=PARTIALS)


def write(folder: Path, rows: int) -> None:
    """The same points as segments, as segments of percentiles, and as Parquet."""
    for name in ("segments", "percentiles", "parquet"):
        (folder / name).mkdir(parents=True)
    for n in range(max(1, rows // SEGMENT_ROWS)):
        raw = points(min(rows, SEGMENT_ROWS), n)
        seal(folder / "segments", Segment("edge", n, n), as_partials(raw))
        seal(folder / "percentiles", Segment("edge", n, n), as_partials(raw, Function.parse("percentile")))
        pq.write_table(raw, folder / "parquet" / f"{n}.parquet", compression="zstd")


def noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def timed(arms: dict[str, Callable[[], Any]], rounds: int, rows: int) -> None:
    """Every arm in turn, `rounds` times after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            arm()
            if number:
                seconds[name].append(time.perf_counter() - began)
    first = statistics.median(next(iter(seconds.values())))
    for name, taken in seconds.items():
        median = statistics.median(taken)
        speed = rows / median / 1e6
        print(f"  {name:<46} {median:7.2f} s  {speed:7.2f} M rows/s   penstock is {median / first:5.2f} × as fast")


def basics(spark: SparkSession, folder: Path, rounds: int, rows: int) -> None:
    print("count, sum, min, max, avg by (metric, entity, minute)")
    keys, files = ["metric", "entity", "minute"], str(folder / "parquet" / "*.parquet")
    sql = (
        "select metric, entity, date_trunc('minute', time) m, count(*), sum(value), min(value), max(value), avg(value) "
        f"from '{files}' group by 1, 2, 3"
    )

    def spark_parquet() -> None:
        raw = spark.read.parquet(str(folder / "parquet")).withColumn("minute", F.date_trunc("minute", "time"))
        aggregates = [F.count("*"), F.sum("value"), F.min("value"), F.max("value"), F.avg("value")]
        noop(raw.groupBy(*keys).agg(*aggregates))

    def polars() -> None:
        value = pl.col("value")
        lazy = pl.scan_parquet(files).with_columns(minute=pl.col("time").dt.truncate("1m")).group_by(keys)
        of = [value.count().alias("n"), value.sum().alias("s"), value.min().alias("l"), value.max().alias("h")]
        lazy.agg(*of, value.mean().alias("a")).collect()

    timed(
        {
            "penstock (segments)": lambda: noop(_segments(spark, folder / "segments").transform(merged)),
            "Spark's own Parquet path": spark_parquet,
            "DuckDB (Parquet)": lambda: duckdb.sql(sql).to_arrow_table(),
            "Polars (Parquet)": polars,
        },
        rounds,
        rows,
    )


def ranks(spark: SparkSession, folder: Path, rounds: int, rows: int) -> None:
    print("the same with p50, p95, p99")
    files = str(folder / "parquet" / "*.parquet")
    quantiles = ", ".join(f"approx_quantile(value, {q})" for q in (0.5, 0.95, 0.99))
    sql = f"select metric, entity, date_trunc('minute', time) m, count(*), {quantiles} from '{files}' group by 1, 2, 3"

    def approx() -> None:
        raw = spark.read.parquet(str(folder / "parquet")).withColumn("minute", F.date_trunc("minute", "time"))
        found = F.percentile_approx("value", [0.5, 0.95, 0.99])
        noop(raw.groupBy("metric", "entity", "minute").agg(F.count("*"), found))

    def ours() -> None:
        noop(with_finals(_segments(spark, folder / "percentiles"), Level.MINUTE, (50, 95, 99)))

    timed(
        {
            "penstock (exponential buckets, 0.54 %)": ours,
            "Spark's percentile_approx": approx,
            "DuckDB's t-digest": lambda: duckdb.sql(sql).to_arrow_table(),
        },
        rounds,
        rows,
    )


def _segments(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.format("penstock").option("path", str(folder)).load()


def job(spark: SparkSession, folder: Path, batches: int) -> None:
    """The full job: four segments (1 M raw rows) a batch into Delta, beside reading and merging them only."""
    print("full job: minute + hour + day + top-n into Delta, 1 M raw rows a batch, warm")
    config = JobConfig(segments=folder / "segments", checkpoint=folder / "checkpoint", available_now=True, max_files=4)
    query = start_job(spark, DeltaTables(folder / "tables"), config)
    query.awaitTermination()
    taken = [progress["batchDuration"] / 1000 for progress in query.recentProgress if progress["numInputRows"]]
    warm = statistics.median(taken[1:] or taken)
    print(f"  {'penstock job':<46} {warm:7.2f} s a batch  {1.0 / warm:7.2f} M raw rows/s   (first: {taken[0]:.2f} s)")
    names = sorted(path.name for path in (folder / "segments").glob("*.arrow"))[:4]
    (folder / "four").mkdir()
    for name in names:
        os.link(folder / "segments" / name, folder / "four" / name)
    arm = {"the same rows into noop": lambda: noop(_segments(spark, folder / "four").transform(merged))}
    timed(arm, batches, 1_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder, arguments.rows)
        began = time.perf_counter()
        spark = start_session("local[*]", {"spark.driver.memory": "4g"})
        spark.range(10).groupBy("id").count().collect()
        from penstock.spark.java import find_java

        kind = "with" if archive_path(find_java()).exists() else "without"
        print(f"start to first result {time.perf_counter() - began:.1f} s, {kind} the class-data archive")
        print(f"{arguments.rows:,} rows, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        basics(spark, folder, arguments.rounds, arguments.rows)
        ranks(spark, folder, arguments.rounds, arguments.rows)
        job(spark, folder, arguments.rounds)
        print(f"load at the end {os.getloadavg()[0]:.1f}")
        spark.stop()


if __name__ == "__main__":
    main()
