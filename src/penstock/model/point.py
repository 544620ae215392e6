"""Points: what telemetry is made of before anything is merged.

A point is one value of one series at one time. Points travel as columns: a `Chunk` holds many points of one metric,
because in CPython the price is per call, and a chunk costs as many calls as a single point.

Histograms come as distributions: a row stands for `count` values near `value` (one bucket), and gives their sum and
what their least and greatest may be.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from penstock.model.columns import ChunkColumns

POINTS = pa.schema(
    [
        pa.field("entity", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)
STATED = ("count", "sum", "min", "max")  # what a row of a distribution has beside its value
DISTRIBUTIONS = pa.schema(
    [*POINTS, *(pa.field(name, pa.int64() if name == "count" else pa.float64(), nullable=False) for name in STATED)]
)


class PointKind(Enum):
    """What a metric's points are. It decides the functions of a metric without a definition."""

    GAUGE = "gauge"  # each is a value of its own
    EVENT = "event"  # the same, of something that happened: no value holds until the next
    COUNTER = "counter"  # each is an increment: they add up
    DISTRIBUTION = "distribution"  # each stands for many values


VALUES = (PointKind.GAUGE, PointKind.EVENT)  # kinds whose points are values, so that the last one says something
# What the `metrics` table calls them.
TYPES = {kind: "histogram" if kind is PointKind.DISTRIBUTION else kind.value for kind in PointKind}


def entity_of(labels: Mapping[str, str]) -> str:
    """The one text that stands for a set of labels: JSON with sorted keys, so every engine can read it back."""
    return json.dumps(labels, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class Chunk:
    """Points of one metric, as columns. Each metric has a class of its own, so a batch queue can dispatch by type.

    Made of an Arrow table, or of plain arrays with codes in place of texts. Those are its `columns`, and `points` is
    the table made of them. ValueError if a table has other columns or types.
    """

    __slots__ = ("_points", "columns")
    metric: ClassVar[str]
    kind: ClassVar[PointKind] = PointKind.GAUGE

    def __init__(self, points: pa.Table | ChunkColumns) -> None:
        self.columns = points if isinstance(points, ChunkColumns) else None
        self._points: pa.Table | None = None if isinstance(points, ChunkColumns) else points
        expected = DISTRIBUTIONS if self.kind is PointKind.DISTRIBUTION else POINTS
        if self._points is not None and not self._points.schema.equals(expected):
            raise ValueError(f"points of {self.metric!r} must have the schema\n{expected}\ngot\n{self._points.schema}")

    def __len__(self) -> int:
        return len(self.columns) if self.columns is not None else int(self.points.num_rows)

    @property
    def points(self) -> pa.Table:
        if self._points is None:
            assert self.columns is not None
            self._points = self.columns.table(DISTRIBUTIONS if self.columns.states else POINTS)
        return self._points

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes if self.columns is not None else int(self.points.nbytes)

    def finite(self) -> "Chunk":
        """Without NaN and infinities: one of them would make the sum of its series useless for good."""
        columns = self.columns
        is_finite = np.isfinite(self.points["value"].to_numpy() if columns is None else columns.values)
        if is_finite.all():
            return self
        return type(self)(self.points.filter(pa.array(is_finite)) if columns is None else columns.take(is_finite))

    @classmethod
    def of(cls, entities: list[str], times: Any, values: list[float]) -> "Chunk":
        """A chunk from parallel columns; `times` are microseconds since the epoch (or an Arrow array of them)."""
        moments = pa.array(times, pa.int64()).cast(POINTS.field("time").type)
        columns = [pa.array(entities, pa.string()), moments, pa.array(values, pa.float64())]
        return cls(pa.table(columns, schema=POINTS))


def chunk_type(metric: str, kind: PointKind = PointKind.GAUGE) -> type[Chunk]:
    """The chunk class of `metric`: the same for the same name and kind, as long as it is referenced.

    ValueError if the name has a NUL or half a character; `name.metric_name_fault` checks the rest.
    """
    made = {"metric": metric, "kind": kind, "__slots__": ()}
    return _types.setdefault((metric, kind), type(f"Chunk[{metric}]", (Chunk,), made))


# Weak: names come from outside, and there may be any number of them.
_types: WeakValueDictionary[tuple[str, PointKind], type[Chunk]] = WeakValueDictionary()
