"""Reading the tables with Spark: partials merged and turned into final values, as `penstock.model.finals` does it."""

import os
from collections.abc import Callable, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.exponential import OFFSET
from penstock.model.finals import rank_name
from penstock.model.function import COUNT_PER_MINUTE, FUNCTIONS, MEAN, RANKS, Final, FunctionSpec
from penstock.model.level import Level
from penstock.model.packed import COUNT_BITS
from penstock.model.partial import SERIES, STATES
from penstock.spark.distinct_sketches import spark_sketch_of
from penstock.spark.rollup import rollup_series_of, spark_function_is
from penstock.tables.port import open_tables


def read_table(
    spark: SparkSession, path: str | os.PathLike[str], level: Level | str, ranks: Sequence[float] = RANKS
) -> DataFrame:
    """One row per series and bucket of a level with its final values: count, sum, min, max, avg, cpm, value, p50 …"""
    level = Level(level)
    return spark_partials_of(spark, path, level).transform(lambda rows: spark_rows_with_finals(rows, level, ranks))


def read_segments(spark: SparkSession, path: str | os.PathLike[str], ranks: Sequence[float] = RANKS) -> DataFrame:
    """The same for minutes, straight from a folder of segments: all that is sealed, in the tables yet or not."""
    rows = spark.read.format("penstock").option("path", os.fspath(path)).option("packed", "true").load()
    return spark_rows_with_finals(rows, Level.MINUTE, ranks)


def spark_partials_of(spark: SparkSession, path: str | os.PathLike[str], level: Level) -> DataFrame:
    """The rows of a level as they lie in the table: partials, packed where it is made of files."""
    tables = open_tables(os.fspath(path))
    files = getattr(tables, "file_uris", None)
    if files is None:  # a database: through the driver
        return spark.createDataFrame(tables.partials(level))
    found = files(level.value)
    if not found:
        return spark.createDataFrame(tables.partials(level))
    matter = spark_function_is(_has_percentiles) | spark_function_is(_counts_distinct)
    return spark.read.parquet(*found).select(
        "metric",
        "function",
        _entity().alias("entity"),
        "bucket",
        F.coalesce(F.try_element_at("distribution", F.lit(-1))["index"], F.lit(0)).alias("part"),
        *(state.name for state in STATES),
        F.when(matter, F.transform("distribution", _packed_entry)).alias("parts"),
    )


def _entity() -> Column:
    """The labels as JSON; what was no JSON is kept under the empty name."""
    is_plain = F.map_keys("labels") != F.array(F.lit(""))
    return F.when(is_plain, F.to_json("labels")).otherwise(F.element_at("labels", F.lit("")))


def _packed_entry(entry: Column) -> Column:
    return F.coalesce(F.shiftleft(entry["index"], COUNT_BITS).bitwiseOR(entry["count"]), F.lit(0))


def spark_rows_with_finals(partials: DataFrame, level: Level, ranks: Sequence[float] = RANKS) -> DataFrame:
    """Partials of a level, packed or not, with their final values. They are shuffled once.

    Everything is said in few expressions: Java interprets a generated method of more than 8,000 bytes, for ever.
    """
    rows = partials.transform(_with_parts)
    names = [state.name for state in STATES]
    # Of `latest` only the newest part counts, and of two at the same time the greater.
    newest = F.max(F.struct("part", "max", *(name for name in names if name != "max"))).alias("newest")
    states = [getattr(F, state.merge)(state.name).alias(state.name) for state in STATES]
    latest = spark_function_is(lambda spec: spec.keeps_newest)
    scale = F.when(spark_function_is(_has_percentiles), _first_parameter("double"))
    return (
        rows.repartition(*SERIES)  # a list that is collected before the shuffle would be written and read once more
        .groupBy(*SERIES)
        .agg(*states, newest, _parts())
        .select(
            *SERIES,
            *(F.when(latest, F.col("newest")[name]).otherwise(F.col(name)).alias(name) for name in names),
            "parts",
            F.pow(F.lit(2.0), -scale).alias("width"),
        )
        .withColumn("estimates", _estimates(ranks))
        .select(
            *SERIES,
            *names,
            _final(MEAN, level).alias("avg"),
            _final(COUNT_PER_MINUTE, level).alias("cpm"),
            _value(level).alias("value"),
            *(F.get("estimates", F.lit(position)).alias(rank_name(rank)) for position, rank in enumerate(ranks)),
        )
    )


def read_sketches(spark: SparkSession, path: str | os.PathLike[str], level: Level | str) -> DataFrame:
    """The `sketch` of every series and bucket that counts distinct values, for Spark's own functions.

    read_sketches(spark, path, "day").groupBy("metric").agg(F.hll_sketch_estimate(F.hll_union_agg("sketch")))
    """
    rows = spark_partials_of(spark, path, Level(level)).where(spark_function_is(_counts_distinct))
    return rows.transform(_with_parts).groupBy(*SERIES).agg(_parts()).select(*SERIES, _sketch().alias("sketch"))


def _final(final: Final, level: Level) -> Column:
    value = F.col(final.state).cast("double")
    if final.per == "minutes":
        value = value / F.lit(float(level.minutes))
    elif final.per == "count":
        value = value / F.nullif(F.col("count"), F.lit(0))
    return value * F.lit(final.factor)


def _value(level: Level) -> Column:
    value = F.when(spark_function_is(_counts_distinct), F.hll_sketch_estimate(_sketch()).cast("double"))
    for final in {spec.final for spec in FUNCTIONS.values() if spec.final}:
        value = value.when(spark_function_is(_gives(final)), _final(final, level))
    return value


def _with_parts(partials: DataFrame) -> DataFrame:
    """Partials with a list of entries like those of `penstock.model.packed`, where all parts of a series matter."""
    ranked, distinct = spark_function_is(_has_percentiles), spark_function_is(_counts_distinct)
    number = F.when(distinct, F.col("max").cast("bigint")).otherwise(F.col("count"))
    entry = F.coalesce(F.shiftleft("part", COUNT_BITS).bitwiseOR(number), F.lit(0))  # never null, and Spark knows it
    listed = F.when(ranked | distinct, F.array(entry))
    if "parts" in partials.columns:
        return partials.withColumn("parts", F.coalesce("parts", listed))
    return partials.transform(rollup_series_of).withColumn("parts", listed)


def _parts() -> Column:
    """All entries of a series in ascending order."""
    return F.sort_array(F.flatten(F.collect_list("parts"))).alias("parts")


def _sketch() -> Column:
    return spark_sketch_of(F.col("parts"), COUNT_BITS, _first_parameter("int"))


def _gives(final: Final) -> Callable[[FunctionSpec], bool]:
    return lambda spec: spec.final == final


def _has_percentiles(spec: FunctionSpec) -> bool:
    return spec.has_percentiles


def _counts_distinct(spec: FunctionSpec) -> bool:
    return spec.counts_distinct


def _first_parameter(type_: str) -> Column:
    """The whole number that a row's function has as its first parameter; else null."""
    return F.regexp_extract("function", r"\((\d+)\)", 1).try_cast(type_)


def _estimates(ranks: Sequence[float]) -> Column:
    """The value that stands for the part at each rank, never outside of what the series really holds; else null."""
    wanted = F.array(*(F.lit(float(rank)) for rank in ranks))
    return F.when(F.col("width").isNotNull(), F.transform(F.transform(wanted, _entry_at), _estimate))


def _entry_at(rank: Column) -> Column:
    wanted = F.greatest(F.ceil(F.col("count") * rank / 100), F.lit(1))
    # Where every entry is one point, as with few of them, the rank is a position.
    direct = F.element_at("parts", wanted.cast("int"))
    return F.when(F.size("parts") == F.col("count"), direct).otherwise(_counted(wanted))


def _estimate(entry: Column) -> Column:
    """The middle 2·l·b/(b+1) of a bucket from l to l·b: as far from one end as from the other."""
    part = F.shiftright(entry, COUNT_BITS)
    low, base = F.pow(F.lit(2.0), (F.abs(part) - OFFSET) * F.col("width")), F.pow(F.lit(2.0), "width")
    middle = F.signum(part) * low * (F.lit(2.0) - F.lit(2.0) / (base + 1))
    return F.least(F.greatest(middle, "min"), "max")


def _counted(wanted: Column) -> Column:
    """The entry with which the counts reach `wanted`."""

    def step(state: Column, entry: Column) -> Column:
        left = state["left"] - entry.bitwiseAND(F.lit((1 << COUNT_BITS) - 1))
        reached = state["entry"].isNull() & (left <= 0)
        return F.struct(left.alias("left"), F.when(reached, entry).otherwise(state["entry"]).alias("entry"))

    start = F.struct(wanted.alias("left"), F.lit(None).cast("bigint").alias("entry"))
    return F.aggregate("parts", start, step, lambda state: state["entry"])
