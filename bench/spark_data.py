"""The points that the Spark benchmarks roll up: the same rows as segments, as segments of L1, and as Parquet."""

import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.model.function import AVG, Function
from penstock.model.partial import PARTIALS, merged, partials_of_columns
from penstock.model.segment import Segment, seal

PERCENTILE = Function.parse("percentile")
SEGMENT_ROWS, SEGMENT_MS = 250_000, 90_000  # 10 M rows are an hour, as time goes by
METRICS = 20
START_US = 1_700_000_040_000_000
TEN_SECONDS_US = 10_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How many rows of how many series. 10 M rows of 10 000 series: 16.7 points a series and minute."""

    rows: int
    entities: int = 500  # of each of the metrics
    segment_ms: int = SEGMENT_MS  # how long it takes until a segment is full

    @property
    def segments(self) -> int:
        return max(1, self.rows // SEGMENT_ROWS)


def points(shape: Shape, number: int) -> pa.Table:
    """The raw points of one segment as columns, within its stretch of time; values have a heavy tail."""
    rng = random.Random(number)
    rows = min(shape.rows, SEGMENT_ROWS)
    metrics = pa.array([f"service.metric.{n}" for n in range(METRICS)])
    entities = pa.array([f'{{"endpoint":"GET /things/{n}","service":"s{n % 20}"}}' for n in range(shape.entities)])
    base = pa.array([rng.lognormvariate(3, 1) for _ in range(10_007)])
    index = pa.array(rng.choices(range(METRICS * shape.entities), k=rows), pa.int32())
    times = pa.array(rng.choices(range(number * shape.segment_ms, (number + 1) * shape.segment_ms), k=rows), pa.int64())
    moments = pc.add(pc.multiply(times, 1000), START_US).cast(pa.timestamp("us", tz="UTC"))
    return pa.table(
        {
            "metric": metrics.take(pc.divide(index, shape.entities)),
            "entity": entities.take(pc.subtract(index, pc.multiply(pc.divide(index, shape.entities), shape.entities))),
            "time": moments,
            "value": base.take(pc.bit_wise_and(pc.cast(times, pa.int32()), 8191)),
        }
    )


def as_partials(raw: pa.Table, function: Function = AVG) -> pa.Table:
    """One row a point: what L1 would have merged."""
    made = partials_of_columns("", function, raw["entity"], raw["time"], raw["value"]).cast(PARTIALS)
    return made.set_column(0, made.schema.field("metric"), raw["metric"])


def as_l1_leaves_it(raw: pa.Table) -> pa.Table:
    """Partials of ten seconds each, as an edge leaves them that merges for so long."""
    slot = pc.divide(pc.cast(raw["time"], pa.int64()), TEN_SECONDS_US)
    pieces = [merged(as_partials(raw.filter(pc.equal(slot, value)))) for value in sorted(pc.unique(slot).to_pylist())]
    return pa.concat_tables(pieces)


def write_segments(folder: Path, shape: Shape, function: Function = AVG, copies: int = 1) -> Path:
    """The segments of the shape, in so many copies one after the other in time."""
    folder.mkdir(parents=True)
    for n in range(shape.segments * copies):
        seal(folder, Segment("edge", n, n), as_partials(points(shape, n), function))
    return folder


def write_l1_segments(folder: Path, shape: Shape) -> int:
    """How many rows are left of the points."""
    folder.mkdir(parents=True)
    rows = 0
    for n in range(shape.segments):
        partials = as_l1_leaves_it(points(shape, n))
        seal(folder, Segment("edge", n, n), partials)
        rows += partials.num_rows
    return rows


def write_parquet(folder: Path, shape: Shape) -> Path:
    folder.mkdir(parents=True)
    for n in range(shape.segments):
        pq.write_table(points(shape, n), folder / f"{n}.parquet", compression="zstd")
    return folder
