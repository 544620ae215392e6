"""Points: what telemetry is made of before anything is merged.

A point is one value of one series at one time. Points travel as columns: a `Chunk` holds many points of one metric as
an Arrow table, because in CPython the price is per call and a chunk costs as many calls as a single point.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa

POINTS = pa.schema(
    [
        pa.field("entity", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


def entity_of(labels: Mapping[str, str]) -> str:
    """The one text that stands for a set of labels: JSON with sorted keys, so every engine can read it back."""
    return json.dumps(labels, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class Chunk:
    """Points of one metric, as columns. Each metric has a class of its own, so a batch queue can dispatch by type."""

    __slots__ = ("points",)
    metric: ClassVar[str]

    def __init__(self, points: pa.Table) -> None:
        self.points = points

    def __len__(self) -> int:
        return int(self.points.num_rows)

    @property
    def nbytes(self) -> int:
        return int(self.points.nbytes)

    @classmethod
    def of(cls, entities: list[str], times: Any, values: list[float]) -> "Chunk":
        """A chunk from parallel columns; `times` are microseconds since the epoch (or an Arrow array of them)."""
        moments = pa.array(times, pa.int64()).cast(POINTS.field("time").type)
        columns = [pa.array(entities, pa.string()), moments, pa.array(values, pa.float64())]
        return cls(pa.table(columns, schema=POINTS))


def chunk_type(metric: str) -> type[Chunk]:
    """The chunk class of `metric`; always the same class for the same name."""
    return _types.setdefault(metric, type(f"Chunk[{metric}]", (Chunk,), {"metric": metric, "__slots__": ()}))


_types: dict[str, type[Chunk]] = {}
