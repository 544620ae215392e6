"""A batch that is small enough for the driver: the same roll-up as `rollup`, in pyarrow.

Planning, shuffling and writing four frames costs Spark a second or two, whatever their size; most batches have so few
rows that the driver merges and writes them in a tenth of that. The executors still read and pre-merge the segments.
"""

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.function import is_function
from penstock.model.level import Level
from penstock.model.partial import merged
from penstock.tables.port import LEVEL_ROWS, TOP_N, TOP_N_ROWS, folded


def tables_of(partials: pa.Table) -> dict[str, pa.Table]:
    """What a batch adds to every table."""
    minutes = merged(partials)
    series = minutes.filter(pc.is_null(minutes["record"]))
    hours = at(series, Level.HOUR)
    found = {Level.MINUTE: series, Level.HOUR: hours, Level.DAY: at(hours, Level.DAY)}
    return {level.value: rows.select(LEVEL_ROWS.names) for level, rows in found.items()} | {TOP_N: top_n(minutes)}


def at(partials: pa.Table, level: Level) -> pa.Table:
    """Merged partials in the buckets of `level`, one row per series, bucket and part."""
    moments = partials["bucket"].cast(pa.timestamp("us"))  # without its zone: in UTC rounding needs no calendar
    buckets = pc.floor_temporal(moments, unit=level.value).cast(partials["bucket"].type)
    found = merged(partials.set_column(partials.schema.get_field_index("bucket"), "bucket", buckets))
    latest = is_function(found["function"], lambda spec: spec.keeps_newest)
    if pc.any(latest).as_py():  # one point, as `rollup.at` has it: there may have been several at that time
        newest = {"count": pa.scalar(1, pa.int64()), "sum": found["max"], "min": found["max"]}
        for name, state in newest.items():
            states = pc.if_else(latest, state, found[name])
            found = found.set_column(found.schema.get_field_index(name), found.schema.field(name), states)
    return found


def top_n(partials: pa.Table) -> pa.Table:
    """The greatest of each minute, as `rollup.top_n` finds them."""
    ranked = is_function(partials["function"], lambda spec: spec.is_ranked)
    wanted = pc.or_(pc.is_valid(partials["record"]), ranked)
    return folded(TOP_N, partials.filter(wanted).select(TOP_N_ROWS.names))


def without(rows: pa.Table, metrics: tuple[str, ...]) -> pa.Table:
    """The rows of all metrics but these."""
    return rows.filter(pc.invert(pc.is_in(rows["metric"], pa.array(metrics, pa.string())))) if metrics else rows
