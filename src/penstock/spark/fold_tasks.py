"""Folds as tasks of Spark: executors read, merge and write, the driver commits what they report."""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from penstock.tables.fold import FoldReport, FoldTask, Run, fold_files


def run_folds_on_spark(spark: SparkSession) -> Run:
    """Runs the tasks of a fold on half of the cores: the others are for the batches of the job."""
    context = spark.sparkContext

    def run(tasks: Sequence[FoldTask]) -> list[FoldReport]:
        at_once = max(1, context.defaultParallelism // 2)  # executors come and go
        found: list[FoldReport] = []
        for start in range(0, len(tasks), at_once):
            some = tasks[start : start + at_once]
            context.setLocalProperty("spark.job.description", f"fold {some[0].table} of {some[0].start:%Y-%m-%d}")
            found += context.parallelize(some, len(some)).map(fold_files).collect()
        return found

    return run
