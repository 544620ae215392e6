"""What a batch covers, told by the rows themselves: each task that reads adds one mark to what it has read.

    metric  function  entity                 count                    sum
    ""      ""        the coverage as JSON   points that it has read  1

A mark goes through the same plan as the points and is merged like them, so the sink learns exactly once, whatever tasks
Spark repeats, which sequences the batch holds, how many tasks have read it and how many points they have read. What
the sink has written must be that.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.function import Function
from penstock.model.partial import PARTIALS
from penstock.model.segment import Origin
from penstock.tables.port import TableBatch

MARK = ""  # no function has an empty name


@dataclass(frozen=True, slots=True)
class SparkBatchCoverage:
    """The sequences of a batch, of the writers that moved: after `start`, up to `end`; read by so many tasks."""

    source: str
    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    tasks: int = 0

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> "SparkBatchCoverage":
        found = json.loads(text)
        origins = {writer: (queue, first) for writer, (queue, first) in found.pop("origins").items()}
        return SparkBatchCoverage(origins=origins, **found)

    def batch(self) -> TableBatch:
        return TableBatch(self.source, self.start, self.end, self.origins)


def spark_coverage_mark(coverage: str, points: int) -> pa.RecordBatch:
    """The mark of one task."""
    row: dict[str, Any] = dict.fromkeys(PARTIALS.names)
    row |= {"metric": "", "function": MARK, "entity": coverage, "bucket": 0, "part": 0, "count": points, "sum": 1.0}
    row |= {"min": 0.0, "max": 0.0}
    return pa.RecordBatch.from_pylist([row], schema=PARTIALS)


def spark_points_of(rows: pa.RecordBatch | pa.Table) -> int:
    """The points that every level must hold: not those of which only the newest or the greatest stay."""
    functions = pc.unique(rows["function"]).to_pylist()
    passing = [text for text in functions if text != MARK and _loses_points(Function.parse(text))]
    counted = rows["count"]
    if passing or MARK in functions:
        left_out = pc.is_in(rows["function"], pa.array([MARK, *passing], pa.string()))
        counted = pc.filter(counted, pc.invert(left_out))
    return pc.sum(counted).as_py() or 0


def _loses_points(function: Function) -> bool:
    return function.spec.keeps_newest or function.spec.keeps_records
