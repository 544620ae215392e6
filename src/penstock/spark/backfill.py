"""Backfill: whole days of all tables made anew from the segments that are still there."""

import json
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC as ZONE
from datetime import date, datetime, time
from pathlib import Path

import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.errors import RowsMissing, TableConflict
from penstock.model.function import is_function
from penstock.model.level import Level
from penstock.spark.job import job_resume_point
from penstock.spark.rollup import rolled_up, rollup_series_of, spark_function_is
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.spark.table_sink import SinkOrder, spark_files_for, written_by_spark
from penstock.tables.port import SCHEMAS, Tables


@dataclass(frozen=True, slots=True)
class Backfilled:
    """Points of the days before, in the day table, and after."""

    before: int
    after: int


def backfill(
    spark: SparkSession,
    tables: Tables,
    segments: Path,
    first: date,
    until: date,
    *,
    allow_loss: bool = False,
    not_at: Mapping[Level, tuple[str, ...]] | None = None,
) -> Backfilled:
    """Replace the days from `first` to before `until`, in every table, by what the segments say.

    Only segments that the tables hold already are read: what the job has not added yet, it will add. TableConflict if
    the job adds something at the same time, or if a table would hold fewer points of a metric, because segments were
    cleaned up, unless `allow_loss`. `not_at` are the metrics that a level does without.
    """
    left_out = not_at or {}
    folder = SegmentSourceFolder(segments)
    held, ahead = job_resume_point(tables, folder)
    if ahead:
        raise TableConflict("one table is a batch ahead of another: let the job run once, then backfill")
    start, end = (datetime.combine(day, time(), ZONE) for day in (first, until))

    def check() -> None:
        if job_resume_point(tables, folder) != (held, ahead):
            raise TableConflict("the job has added a batch during the backfill: stop the job first, or try again")

    options = {"path": str(segments), "upTo": json.dumps(held), "tasks": str(spark.sparkContext.defaultParallelism)}
    reading = spark.read.format("penstock").options(**options)
    rows = _between(reading.load(), start, end)
    after = _points_of(rows)
    before = {level: _points(tables, level, start, end) for level in Level}
    check()  # else what it has added would look like a loss
    for level, points in before.items():
        for metric in sorted(points.keys() - set(left_out.get(level, ()))):
            if after.get(metric, 0) < points[metric] and not allow_loss:
                raise TableConflict(
                    f"of metric {metric!r} the segments hold {after.get(metric, 0)} points of these days, table "
                    f"{level.value!r} {points[metric]}: segments were cleaned up, and a backfill would lose the "
                    "difference (--allow-loss does it all the same)"
                )
    found = Backfilled(sum(before[Level.DAY].values()), sum(after.values()))
    with (
        tempfile.TemporaryDirectory(prefix="penstock-sink-") as exchange,
        closing(tables.landing("backfill")) as landing,
    ):
        order = SinkOrder(landing, left_out)
        reports = written_by_spark(rows.transform(rolled_up), order, Path(exchange))
        for level in Level:
            written = sum(report.points[level.value] for report in reports)
            if written != found.after:
                raise RowsMissing(
                    f"the segments hold {found.after} points of these days, {written} were written for table "
                    f"{level.value!r}: nothing was replaced"
                )
        for name in SCHEMAS:
            tables.replace(name, spark_files_for(reports, name), start, end, check)
    return found


def _between(rows: DataFrame, start: datetime, end: datetime) -> DataFrame:
    return rows.where((F.col("bucket") >= F.lit(start)) & (F.col("bucket") < F.lit(end)))


def _points(tables: Tables, level: Level, start: datetime, end: datetime) -> dict[str, int]:
    """The points of each metric in a table; not of `latest`, of which rows come and go without any loss."""
    rows = tables.partials(level, start, end)
    rows = rows.filter(pc.invert(is_function(rows["function"], lambda spec: spec.keeps_newest)))
    found = rows.group_by("metric").aggregate([("count", "sum")]).to_pylist()
    return {row["metric"]: row["count_sum"] for row in found}


def _points_of(rows: DataFrame) -> dict[str, int]:
    counts = ~spark_function_is(lambda spec: spec.keeps_newest)
    counted = rows.transform(rollup_series_of).where(counts).groupBy("metric").agg(F.sum("count"))
    return {metric: int(points) for metric, points in counted.collect()}
