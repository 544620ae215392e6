"""L2: what a batch adds to the tables, as Spark plans it. Frames in, frames out, built-in expressions only.

    partials ── together ──► exchange by series ── at_every_level ──► 3 rows each ── merged_in ──► rows for the tables

One job of two stages: the tasks of the first read segments, those of the second merge and write. All rows of a series
are in one task, so nothing is shuffled twice and a series and bucket is merged once.
"""

from collections.abc import Callable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.function import FunctionSpec, names_where
from penstock.model.level import Level
from penstock.model.partial import IDENTITY, STATES
from penstock.tables.port import SCHEMAS, TOP_N

TABLE = "table"  # the number of the table, in the order of `SCHEMAS`, that a row is for
NUMBERS = {name: number for number, name in enumerate(SCHEMAS)}


def rolled_up(partials: DataFrame) -> DataFrame:
    """What the tables get of a batch: one row for each table, series, bucket and part."""
    return partials.transform(together).transform(at_every_level).transform(merged_in)


def together(partials: DataFrame) -> DataFrame:
    """The rows of one series in one task. The tasks that read have merged them, so nothing is left to merge first."""
    return partials.repartition("metric", "function", "entity")


def at_every_level(partials: DataFrame) -> DataFrame:
    """Every row in its minute, hour and day; a record of a top-n only in its own table."""
    levels = F.array(*(_place(NUMBERS[level.value], _floor(level)) for level in Level))
    records = F.array(_place(NUMBERS[TOP_N], F.col("bucket")))
    places = F.when(F.col("record").isNull(), levels).otherwise(records)
    others = [name for name in partials.columns if name != "bucket"]
    return partials.select(*others, F.inline(places))


def merged_in(rows: DataFrame) -> DataFrame:
    """One row per table and identity."""
    return rows.groupBy(TABLE, *IDENTITY).agg(*_states())


def series_of(partials: DataFrame) -> DataFrame:
    """The rows of partials that belong into the table of their level: all but the records of a top-n."""
    return partials.where(F.col("record").isNull())


def function_is(claim: Callable[[FunctionSpec], bool]) -> Column:
    """Whether `claim` holds of a row's function."""
    return F.substring_index("function", "(", 1).isin(*names_where(claim))


def _states() -> list[Column]:
    return [getattr(F, state.merge)(state.name).alias(state.name) for state in STATES]


def _place(number: int, bucket: Column) -> Column:
    return F.struct(F.lit(number).cast("tinyint").alias(TABLE), bucket.alias("bucket"))


def _floor(level: Level) -> Column:
    """The beginning of a bucket in UTC; `date_trunc` would go by the time zone of the session."""
    moment = F.unix_micros("bucket")
    return F.timestamp_micros(moment - F.pmod(moment, F.lit(level.minutes * 60_000_000)))
