"""Partial aggregates: states that merge, whatever the order and grouping, and are divided only at the end.

One row is one series (metric, entity) in one bucket of time. Every column that is not part of that identity has a
commutative, associative merge, named here once; the edge runs it through pyarrow and Spark as a built-in function of
the same name, so both always agree.

    points ──of_points──► partials ──merged──► partials ──with_finals──► what people read
                              ▲                    │
                              └────── again ───────┘
"""

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.level import Level
from penstock.model.point import Chunk


@dataclass(frozen=True, slots=True)
class PartialColumn:
    """One state of a partial aggregate and how two of them become one."""

    name: str
    type: Any  # an Arrow type
    merge: Literal["sum", "min", "max"]


IDENTITY = ("metric", "entity", "bucket")
STATES = (
    PartialColumn("count", pa.int64(), "sum"),
    PartialColumn("sum", pa.float64(), "sum"),
    PartialColumn("min", pa.float64(), "min"),
    PartialColumn("max", pa.float64(), "max"),
)
PARTIALS = pa.schema(
    [
        pa.field("metric", pa.string()),
        pa.field("entity", pa.string()),
        pa.field("bucket", pa.timestamp("us", tz="UTC")),
        *(pa.field(state.name, state.type) for state in STATES),
    ]
)


def of_points(chunks: list[Chunk]) -> pa.Table:
    """Chunks of one metric as minute partials: one group-by over all of them."""
    points = pa.concat_tables([chunk.points for chunk in chunks])
    # Without its zone: rounding in UTC needs no calendar, and asking for one costs as much as the group-by.
    bucket = pc.floor_temporal(points["time"].cast(pa.timestamp("us")), unit="minute")
    raw = pa.table({"entity": points["entity"], "bucket": bucket, "value": points["value"]})
    grouped = raw.group_by(["entity", "bucket"], use_threads=False).aggregate(
        [("value", "count"), ("value", "sum"), ("value", "min"), ("value", "max")]
    )
    bucket = grouped["bucket"].cast(PARTIALS.field("bucket").type)
    states = [grouped[f"value_{state.name}"] for state in STATES]
    metric = pa.repeat(pa.scalar(chunks[0].metric), grouped.num_rows)
    return pa.table([metric, grouped["entity"], bucket, *states], schema=PARTIALS)


def merged(partials: pa.Table) -> pa.Table:
    """One row per identity, whatever order its partials came in."""
    grouped = partials.group_by(list(IDENTITY), use_threads=False).aggregate([(s.name, s.merge) for s in STATES])
    columns = [grouped[name] for name in IDENTITY] + [grouped[f"{state.name}_{state.merge}"] for state in STATES]
    return pa.table(columns, schema=PARTIALS)


def with_finals(partials: pa.Table, level: Level) -> pa.Table:
    """Merged partials with the values that people read: `avg`, and `cpm` (points per minute of the bucket)."""
    count = partials["count"].cast(pa.float64())
    return partials.append_column("avg", pc.divide(partials["sum"], count)).append_column(
        "cpm", pc.divide(count, float(level.minutes))
    )
