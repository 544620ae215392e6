"""What a start costs: from nothing to the first table."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.spark_data import Shape, write_segments
from penstock.spark.java import find_java_for_spark
from penstock.spark.job import JobConfig, start_job
from penstock.spark.session import archive_path, make_archive
from penstock.tables.delta import DeltaTables


def starts() -> None:
    """A new process, a session, one batch of a job, its tables: with and without the class-data archive."""
    print("cold start to the first table: session / table, 100,000 rows")
    if not archive_path(find_java_for_spark()).exists():
        make_archive()
    with tempfile.TemporaryDirectory() as scratch:
        segments = write_segments(Path(scratch) / "segments", Shape(100_000))
        for number in range(3):
            for kind in ("with", "without"):
                tables = Path(scratch) / f"tables-{number}-{kind}"
                command = [sys.executable, "-m", "bench.spark_start", str(segments), str(tables)]
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
