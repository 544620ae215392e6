"""Count, sum, min, max, avg by (metric, entity, minute) as others do it, over the same rows in Parquet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from penstock.model.partial import IDENTITY, STATES

KEYS = ["metric", "entity", "minute"]


def noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def merged(partials: DataFrame) -> DataFrame:
    """One row per identity: what the peers compute, over partials."""
    states = [getattr(F, state.merge)(state.name).alias(state.name) for state in STATES]
    return partials.repartition(*IDENTITY).groupBy(*IDENTITY).agg(*states)


def peers(spark: SparkSession, parquet: Path) -> dict[str, Callable[[], Any]]:
    """Count, sum, min, max, avg by (metric, entity, minute) as others do it over the same rows in Parquet."""
    files = str(parquet / "*.parquet")
    return {
        "Spark's own Parquet path": lambda: noop(spark_rolled_up(spark, parquet)),
        "DuckDB (Parquet)": lambda: duckdb.sql(duckdb_roll_up(files)).to_arrow_table(),
        "Polars (Parquet)": lambda: polars_rolled_up(files),
    }


def spark_rolled_up(spark: SparkSession, parquet: Path) -> DataFrame:
    raw = spark.read.parquet(str(parquet)).withColumn("minute", F.date_trunc("minute", "time"))
    value = F.col("value")
    of = [F.count("*").alias("count"), F.sum(value).alias("sum"), F.min(value), F.max(value), F.avg(value)]
    return raw.groupBy(*KEYS).agg(*of)


def duckdb_roll_up(files: str) -> str:
    return (
        "select metric, entity, date_trunc('minute', time) m, count(*) n, sum(value) s, min(value), max(value), "
        f"avg(value) from '{files}' group by 1, 2, 3"
    )


def polars_rolled_up(files: str) -> pl.DataFrame:
    value = pl.col("value")
    lazy = pl.scan_parquet(files).with_columns(minute=pl.col("time").dt.truncate("1m")).group_by(KEYS)
    of = [value.count().alias("n"), value.sum().alias("s"), value.min().alias("l"), value.max().alias("h")]
    return lazy.agg(*of, value.mean().alias("a")).collect()
