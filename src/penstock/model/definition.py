"""Metric definitions: which metrics are made of which points. The file they come from: `definition_file`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.distinct import register_of
from penstock.model.function import AVG, UNDEFINED, Function
from penstock.model.level import Level
from penstock.model.partial import of_columns, of_each
from penstock.model.point import STATED, Kind, entity_of

BOUNDS = {"above": pc.greater, "at_least": pc.greater_equal, "below": pc.less, "at_most": pc.less_equal}


@dataclass(frozen=True, slots=True)
class Condition:
    """What a point's labels and value must be like."""

    labels: tuple[tuple[str, bool, re.Pattern[str] | frozenset[str]], ...] = ()  # label, whether it must, what
    bounds: tuple[tuple[str, float], ...] = ()

    def accepts(self, labels: Mapping[str, str]) -> bool:
        for label, must, what in self.labels:
            text = labels.get(label, "")
            holds = bool(what.fullmatch(text)) if isinstance(what, re.Pattern) else text in what
            if holds != must:
                return False
        return True

    def of_values(self, values: Any) -> Any | None:
        """Which values are within the bounds; None if there are none."""
        mask = None
        for name, bound in self.bounds:
            within = BOUNDS[name](values, pa.scalar(bound, pa.float64()))
            mask = within if mask is None else pc.and_(mask, within)
        return mask


EVERYTHING = Condition()
FEW = 1_000  # points for which a group-by takes longer than all the rest
_REMEMBERED = 100_000  # entities whose labels need not be parsed again: about 50 MB for each definition


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One metric: its source, what counts, whose it is and what is made of it."""

    name: str
    source: str
    function: Function = AVG
    filter: Condition = EVERYTHING
    entity: tuple[str, ...] | None = None
    match: Condition = EVERYTHING  # percent: what is counted; rate: the numerator
    denominator: Condition = EVERYTHING
    record: tuple[str, ...] | None = None
    of: tuple[str, ...] = ()  # distinct: the labels whose values are counted
    levels: tuple[Level, ...] = tuple(Level)
    ttl: Mapping[Level, float] = field(default_factory=dict)
    _seen: dict[str, "_View"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def partials(self, points: pa.Table) -> pa.Table:
        """What points of the source become. Labels are looked at once for each entity, not for each point.

        A few points are not merged among themselves: whoever has many such tables merges them all at once.
        """
        make = of_columns if points.num_rows > FEW else of_each
        columns = [points[name] for name in ("entity", "time", "value")]
        states = {name: points[name] for name in STATED} if "count" in points.column_names else None
        spec = self.function.spec
        if self._takes_all:
            return make(self.name, self.function, *columns, states=states)
        encoded = points["entity"].combine_chunks().dictionary_encode()
        encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        views = self._views(encoded.dictionary.to_pylist())

        def column(of: list[Any], kind: Any) -> Any:
            return pa.array(of, kind).take(encoded.indices)

        values = points["value"].combine_chunks()
        passes = _all(column([view.passes for view in views], pa.bool_()), self.filter.of_values(values))
        entities = column([view.entity for view in views], pa.string())
        records = column([view.record for view in views], pa.string()) if spec.keeps_records else None
        scores = denominators = parts = None
        counts = states["count"] if states else None
        if spec.is_matched:
            scores = _number(column([view.matches for view in views], pa.bool_()), self.match.of_values(values))
        elif spec.counts_distinct:
            parts = column([view.register for view in views], pa.int64())
            scores = column([view.rank for view in views], pa.float64())
            passes = pc.and_(passes, pc.is_valid(parts))
        elif spec.is_score:
            scores = self.function.scores(values)
        if spec.has_denominator:
            below = column([view.counts for view in views], pa.bool_())
            denominators = pc.cast(_number(below, self.denominator.of_values(values)), pa.int64())
        if scores is not None:
            states = _states_of(scores, counts, denominators)
        columns = [piece.filter(passes) for piece in (entities, points["time"].combine_chunks(), values)]
        return make(
            self.name,
            self.function,
            *columns,
            states=None if states is None else {name: piece.filter(passes) for name, piece in states.items()},
            records=None if records is None else records.filter(passes),
            parts=None if parts is None else parts.filter(passes),
        )

    @property
    def _takes_all(self) -> bool:
        """Whether there is nothing to look at in a point: the common case."""
        return self.function.spec.takes_values and self.entity is None and self.filter == EVERYTHING

    def _views(self, entities: list[str]) -> list["_View"]:
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        for text in entities:
            if text not in self._seen:
                self._seen[text] = self._view(text)
        return [self._seen[text] for text in entities]

    def _view(self, text: str) -> "_View":
        labels: dict[str, str] = json.loads(text)
        others = {name: value for name, value in labels.items() if name not in self.of}
        chosen = others if self.entity is None else {name: labels.get(name, "") for name in self.entity}
        rest = {name: value for name, value in labels.items() if name not in chosen}
        kept = rest if self.record is None else {name: labels.get(name, "") for name in self.record}
        return _View(
            self.filter.accepts(labels),
            entity_of(chosen),
            entity_of(kept),
            self.match.accepts(labels),
            self.denominator.accepts(labels),
            *self._counted(labels),
        )

    def _counted(self, labels: Mapping[str, str]) -> tuple[int | None, int]:
        """Register and rank of what a distinct count counts. One label counts as its text, several as their JSON."""
        if not self.of:
            return None, 0
        found = {name: labels.get(name, "") for name in self.of}
        text = found[self.of[0]] if len(self.of) == 1 else entity_of(found)
        return register_of(text, int(self.function.parameters[0])) or (None, 0)


@dataclass(frozen=True, slots=True)
class _View:
    """An entity as a definition sees it."""

    passes: bool
    entity: str
    record: str
    matches: bool
    counts: bool
    register: int | None
    rank: int


def _states_of(scores: Any, counts: Any | None, denominators: Any | None) -> dict[str, Any]:
    """The states of scored points: `counts` is how many values each stands for, `denominators` whether they count."""
    ones = pa.repeat(pa.scalar(1, pa.int64()), len(scores)) if counts is None else counts
    weights = ones if denominators is None else pc.multiply(ones, denominators)
    total = scores if counts is None else pc.multiply(scores, pc.cast(counts, pa.float64(), safe=False))
    return {"count": weights, "sum": total, "min": scores, "max": scores}


def _all(first: Any, second: Any | None) -> Any:
    return first if second is None else pc.and_(first, second)


def _number(first: Any, second: Any | None) -> Any:
    return pc.cast(_all(first, second), pa.float64())


@dataclass(frozen=True, slots=True)
class Definitions:
    """All definitions of a pipeline. With none, every metric is kept by its own labels."""

    metrics: tuple[Definition, ...] = ()
    undefined: Literal["keep", "drop"] = "keep"

    _by_source: dict[str, tuple[Definition, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for metric in self.metrics:
            self._by_source[metric.source] = (*self._by_source.get(metric.source, ()), metric)

    def with_source(self, source: str) -> tuple[Definition, ...]:
        """The definitions that have that source; none where it is `undefined`."""
        return self._by_source.get(source, ())

    def of(self, source: str, kind: Kind = Kind.GAUGE) -> tuple[Definition, ...]:
        """What is made of the points of `source`: also where it is undefined and kept."""
        if self.undefined == "keep" and source not in self._by_source:
            return (Definition(name=source, source=source, function=UNDEFINED[kind]),)
        return self.with_source(source)

    def not_at(self, level: Level) -> tuple[str, ...]:
        """The metrics that `level` does without."""
        return tuple(metric.name for metric in self.metrics if level not in metric.levels)

    def ttls(self, level: Level) -> dict[str, float]:
        """Seconds to keep, of the metrics that say so."""
        return {metric.name: metric.ttl[level] for metric in self.metrics if level in metric.ttl}
