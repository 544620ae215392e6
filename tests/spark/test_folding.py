"""Tables are folded by Spark's tasks, while the job goes on."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.model.definition import Definitions
from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.spark.fold_tasks import run_folds_on_spark
from penstock.tables import fold
from penstock.tables.maintenance import Maintenance
from penstock.tables.port import SCHEMAS, read_level
from tests.spark.pipeline import Edge, Job, assert_exact

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
