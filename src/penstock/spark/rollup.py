"""L2: merges partials with Spark's built-in expressions. Frames in, frames out."""

from collections.abc import Callable

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.function import FunctionSpec, names_where
from penstock.model.level import Level
from penstock.model.partial import IDENTITY, SERIES, STATES
from penstock.tables.port import TOP_KEPT, TOP_N_ROWS


def merged(partials: DataFrame) -> DataFrame:
    """One row per identity, whatever order its partials came in.

    They are shuffled before they are merged, not after: the tasks that read them have merged them already.
    """
    return partials.repartition(*IDENTITY).groupBy(*IDENTITY).agg(*_states())


def _states() -> list[Column]:
    return [getattr(F, state.merge)(state.name).alias(state.name) for state in STATES]


def series_of(partials: DataFrame) -> DataFrame:
    """The rows of merged partials that belong into the table of their level: all but the records of a top-n."""
    return partials.where(F.col("record").isNull())


def without(*metrics: str) -> Callable[[DataFrame], DataFrame]:
    """The rows of all metrics but these."""
    return lambda rows: rows.where(~F.col("metric").isin(*metrics)) if metrics else rows


def function_is(claim: Callable[[FunctionSpec], bool]) -> Column:
    """Whether `claim` holds of a row's function."""
    return F.substring_index("function", "(", 1).isin(*names_where(claim))


def at(level: Level) -> Callable[[DataFrame], DataFrame]:
    """Merged partials in the buckets of `level`, coarser or the same, one row per series, bucket and part.

    Of `latest` only the part with the greatest time stays. That is no matter of chance: in merged partials a time
    occurs once, so there is no tie.
    """

    def coarser(partials: DataFrame) -> DataFrame:
        bucket = F.col("bucket") if level is Level.MINUTE else _floor(level)
        latest = function_is(lambda spec: spec.keeps_newest)
        grouped = partials.groupBy(
            "metric",
            "function",
            "entity",
            bucket.alias("bucket"),
            F.when(latest, F.lit(None)).otherwise(F.col("part")).alias("kept"),
        ).agg(
            F.max("part").alias("part"),
            F.max_by("max", "part").alias("newest"),
            *_states(),
        )
        return grouped.select(
            *SERIES,
            "part",
            F.when(latest, F.lit(1)).otherwise(F.col("count")).cast("bigint").alias("count"),
            *(_newest_if(latest, name) for name in ("sum", "min", "max")),
        )

    return coarser


def _floor(level: Level) -> Column:
    """The beginning of a bucket in UTC; `date_trunc` would go by the time zone of the session."""
    moment = F.unix_micros("bucket")
    return F.timestamp_micros(moment - F.pmod(moment, F.lit(level.minutes * 60_000_000)))


def _newest_if(latest: Column, name: str) -> Column:
    return F.when(latest, F.col("newest")).otherwise(F.col(name)).alias(name)


def top_n(partials: DataFrame, n: int = TOP_KEPT) -> DataFrame:
    """The greatest of each minute: per metric the `n` first entities, per metric and entity the records of a top-n.

    Ties go to the entity or record that sorts first. The top n of a union is the top n of its parts' top n, so this
    may run on every batch and again on the result.
    """
    is_record = F.col("record").isNotNull()
    wanted = F.when(is_record, F.regexp_extract("function", r"\((\d+)\)", 1).try_cast("int")).otherwise(F.lit(n))
    group = F.when(is_record, F.col("entity"))
    ranked = Window.partitionBy("metric", "function", "bucket", group).orderBy(
        F.desc("max"), F.asc("entity"), F.asc("record")
    )
    return (
        partials.where(is_record | function_is(lambda spec: spec.is_ranked))
        .groupBy("metric", "function", "bucket", "entity", "record")
        .agg(F.max("max").alias("max"))
        .withColumn("rank", F.row_number().over(ranked))
        .where(F.col("rank") <= wanted)
        .select(*TOP_N_ROWS.names)
    )
