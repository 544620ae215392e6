"""L2: merges partials with Spark's built-in expressions. Frames in, frames out."""

from collections.abc import Callable

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from penstock.model.level import Level
from penstock.model.partial import IDENTITY, STATES

TOP_N = 10


def merged(partials: DataFrame) -> DataFrame:
    """One row per series and bucket, whatever order its partials came in."""
    states = [getattr(F, state.merge)(state.name).alias(state.name) for state in STATES]
    return partials.groupBy(*IDENTITY).agg(*states)


def at(level: Level) -> Callable[[DataFrame], DataFrame]:
    """The same partials in the buckets of `level`."""

    def coarser(partials: DataFrame) -> DataFrame:
        if level is Level.MINUTE:
            return partials.transform(merged)
        return partials.withColumn("bucket", F.date_trunc(level.value, "bucket")).transform(merged)

    return coarser


def top_n(partials: DataFrame, n: int = TOP_N) -> DataFrame:
    """Per metric and bucket the `n` entities with the greatest value; ties go to the entity that sorts first.

    The top n of a union is the top n of its parts' top n, so this may run on every batch and again on the result.
    """
    ranked = Window.partitionBy("metric", "bucket").orderBy(F.desc("max"), F.asc("entity"))
    return (
        partials.groupBy(*IDENTITY)
        .agg(F.max("max").alias("max"))
        .withColumn("rank", F.row_number().over(ranked))
        .where(F.col("rank") <= n)
        .select("metric", "bucket", "entity", "max")
    )
