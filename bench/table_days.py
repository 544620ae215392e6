"""Tables of 10,000 series and 30 days: what they take, what maintaining them takes, and what a question reads.

    python -m bench.table_days [--series 10000] [--days 30] [--only maintain|question|spark|views]

Hours and days of all days; minutes of the last six hours, since those of other hours lie in files that no question
about these opens. Every series is a percentile. Each step is a process of its own, so that its memory is its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.model.finals import Entries
from penstock.model.level import Level
from penstock.model.point import entity_of
from penstock.tables.delta import DeltaTables
from penstock.tables.port import TableBatch
from penstock.tables.table_rows import PACKED_ROWS, distributions_as_table_column, increment_table_rows

METRICS = 20
END = datetime(2026, 11, 1, tzinfo=UTC)
POINTS = {Level.MINUTE: 6, Level.HOUR: 60, Level.DAY: 200}  # entries of a distribution at most
STRETCH = {Level.MINUTE: timedelta(hours=1), Level.HOUR: timedelta(days=1), Level.DAY: timedelta(days=1)}
HOURS = timedelta(hours=6)


def rows_of(level: Level, series: int, start: datetime, buckets: int, seed: int) -> pa.Table:
    """A row for each series and bucket, packed."""
    rng = np.random.default_rng(seed)
    each = series // METRICS
    count = series * buckets
    sizes = rng.integers(1, POINTS[level] + 1, count)
    total = int(sizes.sum())
    first = np.repeat(2**20 + rng.integers(100, 400, count), sizes)
    steps = np.cumsum(rng.integers(1, 4, total))
    within = steps - np.repeat(steps[np.cumsum(sizes) - sizes], sizes)
    entries = Entries(np.r_[0, np.cumsum(sizes)], first + within, rng.integers(1, 4, total))
    names = [f"service.metric.{n}" for n in range(METRICS)]
    texts = [entity_of({"endpoint": f"GET /things/{n}", "service": f"s{n % 20}"}) for n in range(each)]
    number = np.repeat(np.arange(series), buckets)
    values = rng.uniform(2.0 ** ((entries.indexes - 2**20) / 64), 2.0 ** ((entries.indexes + 1 - 2**20) / 64))
    sums = np.add.reduceat(values * entries.numbers, entries.offsets[:-1])
    moments = int(start.timestamp() * 1e6) + np.tile(np.arange(buckets), series) * level.minutes * 60_000_000
    counts = np.add.reduceat(entries.numbers, entries.offsets[:-1])
    columns: dict[str, Any] = {
        "metric": pa.array(names).take(pa.array(number // each)),
        "function": pa.repeat(pa.scalar("percentile(6)"), count),
        "entity": pa.array(texts).take(pa.array(number % each)),
        "bucket": pa.array(moments).cast(PACKED_ROWS.field("bucket").type),
        "count": pa.array(counts),
        "sum": pa.array(sums),
        "min": pa.array(values[entries.offsets[:-1]]),
        "max": pa.array(values[entries.offsets[1:] - 1]),
        "distribution": distributions_as_table_column(entries, np.ones(count, bool)),
    }
    return pa.table([columns[name] for name in PACKED_ROWS.names], schema=PACKED_ROWS)


def fill(folder: Path, series: int, days: int) -> None:
    """Two increments for each series and bucket, as batches leave them."""
    tables = DeltaTables(folder)
    for level in Level:
        number = -1
        stretches = HOURS // STRETCH[level] if level is Level.MINUTE else days
        for stretch in range(stretches):
            start = END - (stretch + 1) * STRETCH[level]
            buckets = int(STRETCH[level] / timedelta(minutes=level.minutes))
            for _ in range(2):
                number += 1
                writer = tables.landing("fill").writer(level.value)
                writer.write(increment_table_rows(rows_of(level, series, start, buckets, number + 1)))
                tables.append(level.value, writer.close(), TableBatch("bench", {"w": number - 1}, {"w": number}))


def maintain(folder: Path) -> dict[str, Any]:
    """Fold, expire, vacuum: seconds of each, and the most memory that this process had."""
    tables, found = DeltaTables(folder), dict[str, Any]()
    for level in Level:
        began = time.perf_counter()
        done = tables.compact(level.value)
        found[f"fold {level.value}"] = f"{time.perf_counter() - began:.1f} s, {done.rows_before} to {done.rows_after}"
        found[f"rows {level.value}"] = done.rows_after
    began = time.perf_counter()
    gone = tables.expire("hour", END - timedelta(days=29))
    found["expire"] = f"{time.perf_counter() - began:.2f} s, {gone} rows"
    began = time.perf_counter()
    found["vacuum"] = f"{tables.vacuum(0)} files, {time.perf_counter() - began:.1f} s"
    found["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


def sizes(folder: Path) -> dict[str, Any]:
    """Bytes of a row: of a series and bucket."""
    tables = DeltaTables(folder)
    found = {level.value: tables.describe(level.value) for level in Level}
    per_day = {level.value: 1440 // level.minutes for level in Level}
    return {
        f"bytes a series and day, {name}": round(one.size_bytes / max(1, one.rows) * per_day[name])
        for name, one in found.items()
    }


QUESTION = """select avg(p95), max(p95) from {source} where date >= date '{day}' and metric = 'service.metric.7'
    and labels['service'] = 's3' and bucket >= timestamp '{since}' and is_final group by bucket"""


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def question(folder: Path) -> dict[str, Any]:
    """One metric, one value of a label, the last six hours, in DuckDB: bytes and seconds, cold and again."""
    import duckdb

    day, since = (END - HOURS).date(), (END - HOURS).strftime("%Y-%m-%d %H:%M:%S+00")
    paths = [file for file in DeltaTables(folder).files("minute") if file.is_final]
    listed = ", ".join(f"'{file.path}'" for file in paths)
    source = f"read_parquet([{listed}], hive_partitioning = true)"
    db = duckdb.connect()
    db.execute("set threads = 2")
    db.execute("set enable_external_file_cache = false")
    asked, found = QUESTION.format(source=source, day=day, since=since), dict[str, Any]()
    for prefetches in (False, True):  # with it, DuckDB 2.0 reads 1 MB for a map in each row group, however small it is
        db.execute(f"set disable_parquet_prefetching = {not prefetches}")
        before, taken = bytes_read(), []
        for _ in range(6):
            began = time.perf_counter()
            rows = db.execute(asked).fetchall()
            taken.append(time.perf_counter() - began)
        size = (bytes_read() - before) / 6 / 2**20
        how = "DuckDB, prefetching" if prefetches else "DuckDB"
        found[how] = f"{taken[0]:.3f} s, then {min(taken[1:]):.3f} s, {size:.1f} MiB"
    found["files"] = f"{len(paths)}, {sum(file.size_bytes for file in paths) / 2**20:.0f} MiB"
    assert len(rows) == 360, len(rows)
    return found


def question_in_spark(folder: Path) -> dict[str, Any]:
    from penstock.spark.session import start_session

    spark = start_session("local[2]", {})
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    uris = [file.path for file in DeltaTables(folder).files("minute") if file.is_final]
    day, since = (END - HOURS).date(), (END - HOURS).strftime("%Y-%m-%d %H:%M:%S")
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        spark.read.option("basePath", str(Path(uris[0]).parents[1])).parquet(*uris).createOrReplaceTempView("minute")
        rows = spark.sql(QUESTION.format(source="minute", day=day, since=since)).collect()
        taken.append(time.perf_counter() - began)
        assert len(rows) == 360, len(rows)
    spark.stop()
    return {"Spark, first and best of five": f"{taken[0]:.2f} s, {min(taken[1:]):.2f} s"}


def question_to_views(folder: Path) -> dict[str, Any]:
    """The same question to the views, which merge increments: in DuckDB, and in Spark with the label named or not."""
    import duckdb

    from penstock.spark import register
    from penstock.spark.session import start_session
    from penstock.tables.catalog_sql import catalog_sql

    db, found = duckdb.connect(), dict[str, Any]()
    db.execute("set threads = 2; set timezone = 'UTC'")
    db.execute(catalog_sql("duckdb", str(folder)))
    spark = start_session("local[2]", {"spark.sql.warehouse.dir": str(folder / "warehouse")})
    register(spark, folder, labels=["service"])
    day, since = (END - HOURS).date(), (END - HOURS).strftime("%Y-%m-%d %H:%M:%S")
    asked = QUESTION.format(source="penstock.minute", day=day, since=since).replace(" and is_final", "")
    named = asked.replace("labels['service']", "label.service")
    asks: dict[str, Callable[[], list[Any]]] = {
        "DuckDB": lambda: db.execute(asked).fetchall(),
        "Spark": lambda: spark.sql(asked).collect(),
        "Spark, label named": lambda: spark.sql(named).collect(),
    }
    for how, ask in asks.items():
        taken = []
        for _ in range(6):
            began = time.perf_counter()
            rows = ask()
            taken.append(time.perf_counter() - began)
            assert len(rows) == 360, len(rows)
        found[f"{how}, first and best of five"] = f"{taken[0]:.2f} s, {min(taken[1:]):.2f} s"
    spark.stop()
    return found


STEPS = {
    "maintain": maintain,
    "sizes": sizes,
    "question": question,
    "spark": question_in_spark,
    "views": question_to_views,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--only", action="append", choices=STEPS)
    parser.add_argument("--folder", type=Path, help="tables that are there already, or are to stay")
    parser.add_argument("--step", choices=("fill", *STEPS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step == "fill":
        fill(given.folder, given.series, given.days)
        return
    if given.step:
        print(json.dumps(STEPS[given.step](given.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        same = [sys.executable, "-m", "bench.table_days", "--folder", str(folder)]
        shape = ["--series", str(given.series), "--days", str(given.days)]
        if not (folder / "hour").exists():
            subprocess.run([*same, *shape, "--step", "fill"], check=True)
        for step in given.only or STEPS:
            ran = subprocess.run([*same, "--step", step], check=True, stdout=subprocess.PIPE, text=True)
            for name, value in json.loads(ran.stdout.splitlines()[-1]).items():
                print(f"  {step:<9} {name:<34} {value}", flush=True)


if __name__ == "__main__":
    main()
