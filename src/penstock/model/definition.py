"""Metric definitions: which metrics are made of which points. `definition_file` reads them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.chunk_partials import KEPT, Kept
from penstock.model.distinct import register_of
from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.model.partial import partials_of_columns
from penstock.model.point import STATED, PointKind, entity_of

BOUNDS = {"above": pc.greater, "at_least": pc.greater_equal, "below": pc.less, "at_most": pc.less_equal}


@dataclass(frozen=True, slots=True)
class Condition:
    """What holds of a point's labels and value. The flag of a label says whether it must match, or must not."""

    labels: tuple[tuple[str, bool, re.Pattern[str] | frozenset[str]], ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()

    def accepts(self, labels: Mapping[str, str]) -> bool:
        for label, must_match, wanted in self.labels:
            text = labels.get(label, "")
            matches = bool(wanted.fullmatch(text)) if isinstance(wanted, re.Pattern) else text in wanted
            if matches != must_match:
                return False
        return True

    def within_bounds(self, values: Any) -> Any | None:
        """Whether each value is within the bounds; None if there are no bounds."""
        mask = None
        for name, bound in self.bounds:
            within = BOUNDS[name](values, pa.scalar(bound, pa.float64()))
            mask = within if mask is None else pc.and_(mask, within)
        return mask


EVERYTHING = Condition()
_MOST_VIEWS = 100_000  # parsed entities that are kept: about 50 MB for each definition


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One metric: its source, the points that count, the labels of its entity, and its function."""

    name: str
    source: str
    function: Function = AVG
    filter: Condition = EVERYTHING
    entity: tuple[str, ...] | None = None
    match: Condition = EVERYTHING  # percent: the points that count as 1; rate: the numerator
    denominator: Condition = EVERYTHING
    record: tuple[str, ...] | None = None
    of: tuple[str, ...] = ()  # distinct: the labels whose values are counted
    levels: tuple[Level, ...] = tuple(Level)
    ttl: Mapping[Level, float] = field(default_factory=dict)
    keep_source: bool = False  # the source is kept by its own labels, too
    _views: dict[str, "_EntityView"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _seen: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def partials(self, points: pa.Table, kind: PointKind = PointKind.GAUGE) -> pa.Table:
        """What points of the source become: an encoded row for each that passes the filter, to be merged.

        Labels are parsed once for each entity, not for each point. Where a share is asked for, an increment of a
        counter counts as often as it says.
        """
        entities, times, values = (points[name] for name in ("entity", "time", "value"))
        states = {name: points[name] for name in STATED} if "count" in points.column_names else None
        if self._takes_all:
            return partials_of_columns(self.name, self.function, entities, times, values, states=states)
        known = entities.combine_chunks().dictionary_encode()
        views = self._views_of(known.dictionary.to_pylist())

        def column(of: list[Any], kind: Any) -> Any:
            return pa.array(of, kind).take(known.indices)

        spec, values = self.function.spec, values.combine_chunks()
        passes = _all(column([view.passes for view in views], pa.bool_()), self.filter.within_bounds(values))
        records = column([view.record for view in views], pa.string()) if spec.keeps_records else None
        scores = denominators = parts = None
        if spec.is_matched:
            scores = _number(column([view.matches for view in views], pa.bool_()), self.match.within_bounds(values))
        elif spec.counts_distinct:
            parts = column([view.register for view in views], pa.int64())
            scores = column([view.rank for view in views], pa.float64())
            passes = pc.and_(passes, pc.is_valid(parts))
        elif spec.is_score:
            scores = self.function.scores(values)
        if spec.has_denominator:
            below = column([view.counts for view in views], pa.bool_())
            denominators = pc.cast(_number(below, self.denominator.within_bounds(values)), pa.int64())
        if scores is not None:
            counts = states["count"] if states else None
            if spec.is_matched and kind is PointKind.COUNTER:
                counts = pc.cast(pc.round(values), pa.int64(), safe=False)
            states = _states_of(scores, counts, denominators)
        entities = column([view.entity for view in views], pa.string())
        rows = partials_of_columns(
            self.name, self.function, entities, times, values, states=states, records=records, parts=parts
        )
        return rows.filter(passes)

    @property
    def labels(self) -> dict[str, str]:
        """Every label that it names, each with the key that names it."""
        found: dict[str, str] = dict.fromkeys(self.record or (), "record")
        found |= dict.fromkeys(self.of, "of")
        match = "numerator" if self.function.spec.has_denominator else "match"
        for key, condition in (("denominator", self.denominator), (match, self.match), ("filter", self.filter)):
            found |= {label: key for label, _, _ in condition.labels}
        return found | dict.fromkeys(self.entity or (), "entity")

    @property
    def seen_labels(self) -> Mapping[str, bool]:
        """The labels of its entity, each with whether a point has had it."""
        return {label: label in self._seen for label in self.entity or ()}

    @property
    def _takes_all(self) -> bool:
        """Whether labels and values need no check: the common case."""
        return self.function.spec.takes_values and self.entity is None and self.filter == EVERYTHING

    def _views_of(self, entities: list[str]) -> list["_EntityView"]:
        if len(self._views) > _MOST_VIEWS:
            self._views.clear()
        for text in entities:
            if text not in self._views:
                self._views[text] = self._view(text)
        return [self._views[text] for text in entities]

    def _view(self, text: str) -> "_EntityView":
        labels: dict[str, str] = json.loads(text)
        self._seen.update(labels.keys() & set(self.entity or ()))
        others = {name: value for name, value in labels.items() if name not in self.of}
        chosen = others if self.entity is None else {name: labels.get(name, "") for name in self.entity}
        rest = {name: value for name, value in labels.items() if name not in chosen}
        kept = rest if self.record is None else {name: labels.get(name, "") for name in self.record}
        return _EntityView(
            self.filter.accepts(labels),
            entity_of(chosen),
            entity_of(kept),
            self.match.accepts(labels),
            self.denominator.accepts(labels),
            *self._counted(labels),
        )

    def _counted(self, labels: Mapping[str, str]) -> tuple[int | None, int]:
        """Register and rank in a distinct count. One label counts as its text, several as their JSON."""
        if not self.of:
            return None, 0
        found = {name: labels.get(name, "") for name in self.of}
        text = found[self.of[0]] if len(self.of) == 1 else entity_of(found)
        return register_of(text, int(self.function.parameters[0])) or (None, 0)


@dataclass(frozen=True, slots=True)
class _EntityView:
    """What a definition takes from the labels of an entity."""

    passes: bool
    entity: str
    record: str
    matches: bool
    counts: bool
    register: int | None
    rank: int


def _states_of(scores: Any, counts: Any | None, denominators: Any | None) -> dict[str, Any]:
    """The states of scored points: each stands for `counts` values, which count where `denominators` is 1."""
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
    undefined: Literal["keep", "drop"] | Kept = "keep"
    """What becomes of metrics that are no definition's source. By kind: the functions, none to drop them."""

    _by_source: dict[str, tuple[Definition, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for metric in self.metrics:
            self._by_source[metric.source] = (*self._by_source.get(metric.source, ()), metric)

    def of(self, source: str) -> tuple[Definition, ...]:
        """The definitions of `source`; none if it is undefined."""
        return self._by_source.get(source, ())

    def keeps(self, source: str, kind: PointKind = PointKind.GAUGE) -> bool:
        """Whether a metric is kept by its own labels."""
        made = self.of(source)
        return any(metric.keep_source for metric in made) if made else bool(self._undefined.get(kind, True))

    @property
    def kept(self) -> Kept:
        """The functions of metrics that are kept by their own labels."""
        return {**KEPT, **{kind: functions for kind, functions in self._undefined.items() if functions}}

    @property
    def _undefined(self) -> Kept:
        if isinstance(self.undefined, str):
            return {} if self.undefined == "keep" else dict.fromkeys(PointKind, ())
        return self.undefined

    @property
    def removed(self) -> list[str]:
        """The sources that are no longer kept by their own labels, in the order of the file."""
        return [source for source in self._by_source if not self.keeps(source)]

    def not_at(self, level: Level) -> tuple[str, ...]:
        """The metrics that have no rows at `level`."""
        return tuple(metric.name for metric in self.metrics if level not in metric.levels)

    def record_ttls(self) -> dict[str, float]:
        """Seconds to keep records of a top-n, of the metrics that say so: those of the level that is kept longest."""
        keeping = [metric for metric in self.metrics if metric.function.spec.keeps_records and metric.ttl]
        return {metric.name: max(metric.ttl.values()) for metric in keeping}

    def ttls(self, level: Level) -> dict[str, float]:
        """Seconds to keep rows at `level`, of the metrics that say so."""
        return {metric.name: metric.ttl[level] for metric in self.metrics if level in metric.ttl}
