"""L2: what a batch adds to the tables, as Spark plans it. Frames in, frames out, built-in expressions only.

    partials ── together ──► exchange by series ── at_every_level ──► 3 rows each ── merged_in ──► rows for the tables

One job of two stages: the tasks of the first read segments, those of the second merge and write. All rows of a series
are in one task, so nothing is shuffled twice. The sink packs the parts of a series and bucket into one row.
"""

from collections.abc import Callable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it

from penstock.model.function import FunctionSpec, function_names_where
from penstock.model.level import Level
from penstock.model.partial import IDENTITY, STATES
from penstock.tables.port import TOP_N

PLACE = "place"  # the number of the place, in the order of `PLACES`, that a row is for
PLACES = tuple((table, level) for table in ("", TOP_N) for level in Level)  # without a table: that of the level


def rolled_up(partials: DataFrame) -> DataFrame:
    """What the tables get of a batch: one row for each place, series, bucket, part and record of a top-n."""
    return partials.transform(rollup_together).transform(rollup_at_every_level).transform(rollup_merged)


def rollup_together(partials: DataFrame) -> DataFrame:
    """The rows of one series in one task. The tasks that read have merged them, so nothing is left to merge first."""
    return partials.repartition("metric", "function", "entity")


def rollup_at_every_level(partials: DataFrame) -> DataFrame:
    """Every row in its minute, hour and day; a record of a top-n in those of its own table."""
    levels, records = (
        F.array(*(_place(number, _floor(level)) for number, (table, level) in enumerate(PLACES) if table == of))
        for of in ("", TOP_N)
    )
    places = F.when(F.col("record").isNull(), levels).otherwise(records)
    others = [name for name in partials.columns if name != "bucket"]
    return partials.select(*others, F.inline(places))


def rollup_merged(rows: DataFrame) -> DataFrame:
    """One row per place and identity."""
    return rows.groupBy(PLACE, *IDENTITY).agg(*_states())


def rollup_series_of(partials: DataFrame) -> DataFrame:
    """The rows of partials that belong into the table of their level: all but the records of a top-n."""
    return partials.where(F.col("record").isNull())


def spark_function_is(claim: Callable[[FunctionSpec], bool]) -> Column:
    """Whether `claim` holds of a row's function."""
    return F.substring_index("function", "(", 1).isin(*function_names_where(claim))


def _states() -> list[Column]:
    return [getattr(F, state.merge)(state.name).alias(state.name) for state in STATES]


def _place(number: int, bucket: Column) -> Column:
    return F.struct(F.lit(number).cast("tinyint").alias(PLACE), bucket.alias("bucket"))


def _floor(level: Level) -> Column:
    """The beginning of a bucket in UTC; `date_trunc` would go by the time zone of the session."""
    moment = F.unix_micros("bucket")
    return F.timestamp_micros(moment - F.pmod(moment, F.lit(level.minutes * 60_000_000)))
