"""Folds as tasks of Spark: executors read, merge and write, the driver commits what they report."""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from penstock.tables.fold import FoldReport, FoldTask, Run, fold_files


def run_folds_on_spark(spark: SparkSession) -> Run:
    """Runs tasks of folds as one job, on half of the cores: the others are for the batches of the streaming job."""
    context = spark.sparkContext

    def run(tasks: Sequence[FoldTask]) -> list[FoldReport]:
        at_once = min(len(tasks), max(1, context.defaultParallelism // 2))  # executors come and go
        days = sorted({f"{task.start:%Y-%m-%d}" for task in tasks})
        context.setLocalProperty("spark.job.description", f"fold {tasks[0].table} of {', '.join(days)}")
        return context.parallelize(tasks, at_once).map(fold_files).collect()

    return run
