"""What a batch costs as segments are kept and writers come and go: it should be the cost of what is new.

Every arm has so many segments that its tables hold already, then takes new ones, one a batch. Arms take turns.

    python -m bench.spark_rollup --growth kept
"""

import statistics
from pathlib import Path

from pyspark.sql import SparkSession

from bench.spark_data import Shape, as_partials, points
from penstock.model.segment import Segment, seal
from penstock.spark.job import JobConfig, start_job
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.tables.delta import DeltaTables
from penstock.tables.port import SCHEMAS, TableBatch

ARMS = {"100 kept": (100, 1), "86,400 kept": (86_400, 1), "1 writer": (300, 1), "300 writers": (300, 300)}
ROWS = 10_000  # of a segment
BATCHES = 12  # of a run; the first two still warm up what is of that run


class _Arm:
    def __init__(self, folder: Path, kept: int, writers: int) -> None:
        self._folder = folder
        self._rows = as_partials(points(Shape(ROWS), 0))
        self._next = kept // writers
        (folder / "segments").mkdir(parents=True)
        self.tables = DeltaTables(folder / "tables")
        for name in (Segment(f"w{w}", n, n).name for w in range(writers) for n in range(self._next)):
            (folder / "segments" / name).touch()  # what the tables hold is not read again
        held = {f"w{w}": self._next - 1 for w in range(writers)}
        for name in SCHEMAS:
            self.tables.append(name, [], TableBatch(SegmentSourceFolder(folder / "segments").identity(), end=held))

    def run(self, spark: SparkSession) -> list[float]:
        """Seconds of each batch."""
        for _ in range(BATCHES):
            seal(self._folder / "segments", Segment("w0", self._next, self._next), self._rows)
            self._next += 1
        config = JobConfig(
            segments=self._folder / "segments",
            checkpoint=self._folder / "checkpoint",
            available_now=True,
            max_files=1,
        )
        query = start_job(spark, self.tables, config)
        query.awaitTermination()
        taken = [one["batchDuration"] / 1000 for one in query.recentProgress if one["numInputRows"]]
        assert len(taken) == BATCHES, f"{len(taken)} batches, expected {BATCHES}"
        return taken[2:]


def kept(spark: SparkSession, folder: Path, rounds: int) -> None:
    print(f"a batch of one segment, {ROWS:,} rows, beside what is kept")
    arms = {name: _Arm(folder / str(number), *sizes) for number, (name, sizes) in enumerate(ARMS.items())}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(1 + rounds):
        for name, arm in arms.items():
            seconds = arm.run(spark)
            taken[name] += seconds if number else []
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    for name, first in zip(medians, ("100 kept", "100 kept", "1 writer", "1 writer")):
        ratio = medians[name] / medians[first]
        print(f"  {name:<14} {medians[name]:6.3f} s a batch   {ratio:.2f} × that of {first}", flush=True)
