"""Tables are folded by Spark's tasks, while the job goes on."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.definition import Definitions
from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.spark.fold_tasks import run_folds_on_spark
from penstock.spark.reading import read_table
from penstock.tables import fold
from penstock.tables.maintenance import Maintenance
from penstock.tables.port import SCHEMAS, open_tables, read_level
from tests.spark.engine import Engine
from tests.spark.pipeline import Edge, Job, assert_exact
from tests.tables.test_truth import Run, answer_of, assert_equal, batch_answer

pytestmark = pytest.mark.spark
KEEP = dict.fromkeys(SCHEMAS, 1e9)


def test_executors_fold_and_the_job_goes_on_in_the_same_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = Edge(tmp_path / "segments", 5, (AVG, Function.parse("latest"), Function.parse("percentile")))
    job = Job(spark, tmp_path)
    maintenance = Maintenance(job.tables, 3600.0, KEEP, Definitions, run=run_folds_on_spark(spark))

    def not_here(_: object) -> None:
        raise AssertionError("folded in the driver")

    monkeypatch.setattr(fold, "fold_files", not_here)
    for _ in range(2):
        edge.seal()
        edge.seal()
        job.run(max_files=1)
        maintenance.fold()
        for level in Level:
            rows = job.tables._rows(level.value)  # type: ignore[attr-defined]
            assert set(rows["is_final"].to_pylist()) == {True}
            assert rows.num_rows == read_level(job.tables, level).num_rows
    assert not [one.value for one in maintenance.samples() if one.name.endswith("failures_total") and one.value]
    assert_exact(job.tables, edge)


def test_many_days_are_folded_by_one_job(spark: SparkSession, tmp_path: Path) -> None:
    edge = Edge(tmp_path / "segments", 6, minutes=6 * 1440)
    engine = Engine(tmp_path / "segments", open_tables(str(tmp_path / "tables")))
    edge.seal()
    engine.run()
    assert len({file.date for file in engine.tables.files("hour")}) == 6  # type: ignore[attr-defined]
    context = spark.sparkContext
    context.setJobGroup("folding", "")
    engine.tables.compact("hour", run_folds_on_spark(spark))
    jobs = context.statusTracker().getJobIdsForGroup("folding")
    context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]

    assert len(jobs) == 1
    assert_exact(engine.tables, edge)


def test_with_late_points_folds_and_expiry_spark_gives_the_batch_answer(spark: SparkSession, tmp_path: Path) -> None:
    run = Run(lambda: open_tables(str(tmp_path / "tables")), 7)
    run.steps(6)
    run.tables.compact("minute", run_folds_on_spark(spark))
    run.folded = list(run.live)
    run.steps(4)

    rows = read_table(spark, tmp_path / "tables", "minute").toArrow()
    assert_equal(answer_of(rows), batch_answer(run.live))
    files = run.tables.file_uris("minute")  # type: ignore[attr-defined]
    final = spark.read.parquet(*files).where("is_final").withColumn("entity", F.to_json("labels")).toArrow()
    assert_equal(answer_of(final), batch_answer(run.folded))
