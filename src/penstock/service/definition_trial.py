"""A trial of definitions: what they make of points, without a queue, segments or tables."""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.definition import Definition, Definitions
from penstock.model.finals import with_finals
from penstock.model.function import Function
from penstock.model.level import Level
from penstock.model.metric_description import Descriptions
from penstock.model.partial import PARTIALS, TOP_N_ORDER, merged_encoded
from penstock.model.point import Chunk, PointKind
from penstock.receive.sink import Done

_COUNT = Function("count")
_RANKS = (50, 95, 99)
_OFF_BY_UNIT = 20.0  # a threshold so many times above every value is in another unit than they are


@dataclass(slots=True)
class TriedMetric:
    """What came of one metric."""

    kind: PointKind
    points: int = 0  # of a histogram: what it counted
    labels: set[str] = field(default_factory=set)
    greatest: float = float("-inf")


@dataclass(frozen=True, slots=True)
class TriedSeries:
    """What a definition gives for one entity (of a top_n: for one record), over all points."""

    labels: dict[str, str]
    value: float | None
    ranks: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class TriedDefinition:
    """What a definition made of the points, and what does not fit."""

    definition: Definition
    points: int  # of its source
    taken: int  # that passed its filter
    series: list[TriedSeries]  # those of the greatest values first
    problems: list[str]  # it matches nothing, or a label of its entity never occurs
    notes: list[str]


class DefinitionTrial:
    """Applies definitions to points. It is a `Sink`, so that an intake can be put before it.

    Threads: one at a time.
    """

    def __init__(self, definitions: Definitions) -> None:
        self.definitions = definitions
        self.metrics: dict[str, TriedMetric] = {}
        self._made: dict[str, pa.Table] = {}
        self._taken: dict[str, int] = {}
        self._minutes: set[int] = set()

    def submit(self, chunks: Sequence[Chunk], done: Done, requests: bytes = b"") -> bool:
        for chunk in chunks:
            self.take(chunk.metric, chunk.kind, chunk.finite().points)
        done(None)
        return True

    def describe(self, metrics: Descriptions) -> None:
        pass  # units are no part of a trial

    def take(self, metric: str, kind: PointKind, points: pa.Table) -> None:
        """Points of one metric, with the states of a distribution or without."""
        if not points.num_rows:
            return
        known = self.metrics.setdefault(metric, TriedMetric(kind))
        known.points += pc.sum(points["count"]).as_py() if "count" in points.column_names else points.num_rows
        known.greatest = max(known.greatest, pc.max(points["value"]).as_py())
        for entity in pc.unique(points["entity"]).to_pylist():
            known.labels.update(json.loads(entity))
        self._minutes.update(pc.unique(pc.divide(points["time"].cast(pa.int64()), 60_000_000)).to_pylist())
        for definition in self.definitions.of(metric):
            counted = replace(definition, function=_COUNT).partials(points)
            self._taken[definition.name] = self._taken.get(definition.name, 0) + (pc.sum(counted["count"]).as_py() or 0)
            before = [self._made[definition.name]] if definition.name in self._made else []
            made = _at_one_time(definition.partials(points, kind))
            self._made[definition.name] = merged_encoded(pa.concat_tables([*before, made]))

    def results(self) -> list[TriedDefinition]:
        """One for each definition, in the order of the file."""
        return [self._result(definition) for definition in self.definitions.metrics]

    def _result(self, definition: Definition) -> TriedDefinition:
        source, taken = self.metrics.get(definition.source), self._taken.get(definition.name, 0)
        if source is None:
            others = self.metrics.keys() - {metric.source for metric in self.definitions.metrics}
            close = difflib.get_close_matches(definition.source, others, n=3)
            meant = f"; did you mean {', '.join(close)}?" if close else ""
            return TriedDefinition(definition, 0, 0, [], [f"no point of {definition.source} came{meant}"], [])
        problems = [] if taken else ["no point passes the filter"]
        notes = list(_notes(definition, source))
        has = f"{definition.source} has {', '.join(sorted(source.labels)) or 'none'}"
        for label, key in definition.labels.items():
            if label not in source.labels:
                text = f"label {label!r} ({key}) never occurs; {has}"
                (problems if key == "entity" else notes).append(text)
        return TriedDefinition(definition, source.points, taken, self._series(definition), problems, notes)

    def _series(self, definition: Definition) -> list[TriedSeries]:
        made = self._made[definition.name].cast(PARTIALS)
        if definition.function.spec.keeps_records:
            rows = made.sort_by(list(TOP_N_ORDER)).to_pylist()
            return [TriedSeries(_labels(row["entity"], row["record"]), row["max"], {}) for row in rows]
        per = len(self._minutes) if definition.function.spec.is_per_minute else 1
        ranks = [f"p{rank}" for rank in _RANKS] if definition.function.spec.has_percentiles else []
        found = [
            TriedSeries(
                _labels(row["entity"]),
                None if row["value"] is None else row["value"] / per,
                {rank: row[rank] for rank in ranks},
            )
            for row in with_finals(made, Level.MINUTE, _RANKS).to_pylist()
        ]
        return sorted(found, key=lambda one: float("inf") if one.value is None else -one.value)


def _labels(entity: str, record: str | None = None) -> dict[str, str]:
    found: dict[str, str] = json.loads(entity)
    return {**found, **(json.loads(record) if record else {})}


def _at_one_time(partials: pa.Table) -> pa.Table:
    """All buckets as one."""
    place = partials.schema.get_field_index("bucket")
    times = pa.repeat(pa.scalar(0, pa.int64()), partials.num_rows).cast(partials.schema.field("bucket").type)
    return partials.set_column(place, partials.schema.field("bucket"), times)


def _notes(definition: Definition, source: TriedMetric) -> Iterator[str]:
    spec, name = definition.function.spec, definition.function.name
    adds_up = spec.final is not None and spec.final.state == "sum" and spec.final.per in ("", "minutes")
    if source.kind is PointKind.COUNTER and not (adds_up or spec.is_matched or spec.counts_distinct):
        yield (
            f"{definition.source} is a counter and each point an increment: {name} is of increments; "
            "sum and sum_per_min add them up"
        )
    if name == "apdex" and definition.function.parameters[0] > _OFF_BY_UNIT * source.greatest:
        yield (
            f"threshold {definition.function.parameters[0]:g} is far above every value (the greatest is "
            f"{source.greatest:g}): is it in the unit of {definition.source}?"
        )
