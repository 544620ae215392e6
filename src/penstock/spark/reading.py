"""Reading the tables with Spark: partials merged and turned into final values, as `penstock.model.finals` does it."""

import os
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from penstock.model.exponential import OFFSET
from penstock.model.finals import rank_name
from penstock.model.function import FINALS, RANKS, Final
from penstock.model.level import Level
from penstock.model.partial import SERIES, STATES
from penstock.spark.rollup import merged, series_of
from penstock.spark.tables import LEVEL_ROWS, open_tables


def read_table(
    spark: SparkSession, path: str | os.PathLike[str], level: Level | str, ranks: Sequence[float] = RANKS
) -> DataFrame:
    """One row per series and bucket of a level with its final values: count, sum, min, max, avg, cpm, value, p50 …"""
    level = Level(level)
    return partials_of(spark, path, level).transform(lambda rows: with_finals(rows, level, ranks))


def partials_of(spark: SparkSession, path: str | os.PathLike[str], level: Level) -> DataFrame:
    """The rows of a level as they lie in the table."""
    tables = open_tables(os.fspath(path))
    files = getattr(tables, "file_uris", None)
    if files is None:  # a database: through the driver
        return spark.createDataFrame(tables.partials(level))
    found = files(level.value)
    if not found:
        return spark.createDataFrame(tables.partials(level))
    return spark.read.parquet(*found).select(*LEVEL_ROWS.names).withColumn("record", F.lit(None).cast("string"))


def with_finals(partials: DataFrame, level: Level, ranks: Sequence[float] = RANKS) -> DataFrame:
    """Partials of a level, merged, with their final values."""
    # Shuffled once by series, then everything that follows finds its rows where they are.
    rows = partials.repartition(*SERIES).transform(merged).transform(series_of)
    part = Window.partitionBy(*SERIES).orderBy("part")
    upto = F.sum("count").over(part.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    total = F.sum("count").over(Window.partitionBy(*SERIES))
    # Of `latest` only the newest part counts; merged partials have every time once, so there is no tie.
    latest = F.first("function") == "latest"
    states = [
        F.when(latest, F.max_by(state.name, "part")).otherwise(getattr(F, state.merge)(state.name)).alias(state.name)
        for state in STATES
    ]
    return (
        rows.withColumn("upto", upto)
        .withColumn("total", total)
        .withColumn("estimate", _estimate())
        .groupBy(*SERIES)
        .agg(*states, *(_at_rank(rank).alias(rank_name(rank)) for rank in ranks))
        .select(
            *SERIES,
            *(state.name for state in STATES),
            _final(FINALS["avg"], level).alias("avg"),
            _final(FINALS["cpm"], level).alias("cpm"),
            _value(level).alias("value"),
            *(rank_name(rank) for rank in ranks),
        )
    )


def _final(final: Final, level: Level) -> Column:
    value = F.col(final.state).cast("double")
    if final.per == "minutes":
        value = value / F.lit(float(level.minutes))
    elif final.per == "count":
        value = value / F.nullif(F.col("count"), F.lit(0))
    return value * F.lit(final.factor)


def _value(level: Level) -> Column:
    name = F.regexp_extract("function", r"^[a-z_]+", 0)
    value = F.lit(None).cast("double")
    for function, final in FINALS.items():
        value = F.when(name == function, _final(final, level)).otherwise(value)
    return value


def _estimate() -> Column:
    """The value that stands for a part of a percentile, never outside of what the part really holds."""
    scale = F.regexp_extract("function", r"^percentile\((\d+)\)", 1).try_cast("double")
    width = F.pow(F.lit(2.0), -scale)
    base = F.pow(F.lit(2.0), width)
    low = F.pow(F.lit(2.0), (F.abs("part") - OFFSET) * width)
    middle = F.when(F.col("part") == 0, 0.0).otherwise(F.signum("part") * low * 2 * base / (base + 1))
    # least and greatest pass over nulls: without a scale there must be no estimate at all.
    return F.when(scale.isNotNull(), F.least(F.greatest(middle, "min"), "max"))


def _at_rank(rank: float) -> Column:
    wanted = F.greatest(F.ceil(F.col("total") * F.lit(rank / 100)), F.lit(1))
    hit = (F.col("upto") >= wanted) & (F.col("upto") - F.col("count") < wanted)
    return F.max(F.when(hit, F.col("estimate")))
