"""Questions to the tables, answered at once: pyarrow reads them, no JVM starts.

Partials merge in any grouping, so the same rows answer for every label that is asked for: entities are cut down to
those labels, merged again, and only then turned into final values.
"""

import difflib
import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import PenstockError
from penstock.model.finals import rank_name, with_finals
from penstock.model.function import Function, functions_in, is_function
from penstock.model.level import Level
from penstock.model.point import entity_of
from penstock.model.resolution import Range, percentile_ranges_of_partials
from penstock.tables.port import SCHEMAS, Tables
from penstock.tables.table_rows import records_kept, top_records

ALL = "*"  # by every label: each series by itself
# The finest level whose rows are few enough to be looked at, by how far back the question goes.
_FIRST = datetime.fromtimestamp(0, UTC)  # nothing is older
_LEVELS = ((timedelta(hours=6), Level.MINUTE), (timedelta(days=7), Level.HOUR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of one metric."""

    metric: str
    since: timedelta
    by: tuple[str, ...] = ()
    level: Level | None = None
    ranks: tuple[float, ...] = ()
    top: int | None = None

    def level_read(self) -> Level:
        if self.level is not None:
            return self.level
        return next((level for reach, level in _LEVELS if self.since <= reach), Level.DAY)


@dataclass(frozen=True, slots=True)
class QueryRow:
    """One bucket of one group (with `top`: the whole time of one group)."""

    time: datetime
    group: dict[str, str]
    function: str
    points: int
    value: float | None
    min: float
    max: float
    ranks: dict[str, float | None] = field(default_factory=dict)
    last: float | None = None  # where it is kept, of groups of one series
    ranges: dict[str, Range | None] = field(default_factory=dict)  # of ranks that the sender's buckets do not resolve

    def flat(self) -> dict[str, Any]:
        """For JSON and CSV; a label that is named like a column of ours is told apart by `label_`."""
        own = {
            "time": self.time.isoformat().replace("+00:00", "Z"),
            "function": self.function,
            "points": self.points,
            "value": self.value,
            "min": self.min,
            "max": self.max,
            "last": self.last,
            **self.ranks,
        }
        for name, range_ in self.ranges.items():
            own[f"{name}_low"], own[f"{name}_high"] = range_ or (None, None)
        return {**{f"label_{name}" if name in own else name: text for name, text in self.group.items()}, **own}


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One line of the list of all metrics."""

    metric: str
    function: str
    points: int
    series: int
    newest: datetime


def answer_from_tables(tables: Tables, question: Question, now: datetime | None = None) -> list[QueryRow]:
    """The rows that answer, by group and time. PenstockError says what is not there and what to do."""
    now = now or datetime.now(UTC)
    level = question.level_read()
    width = timedelta(minutes=level.minutes)
    since = _bucket_of(max(now - min(question.since, now - _FIRST), _FIRST), width)
    partials = tables.partials(level, since, None, question.metric)
    if not partials.num_rows:
        partials = _top_records(tables, question, since)
        if not partials.num_rows:
            raise PenstockError(_why_nothing(tables, question, level))
    if question.ranks:
        partials = _with_percentiles(partials, question.metric)
    _check_labels(partials, question)
    partials, newest = _with_newest_apart(partials, question.by)
    partials = grouped_for_query(partials, question.by)
    if question.top is not None:
        partials, newest = _one_bucket(partials, since), _one_bucket(newest, since)
        minutes = max(1, int((now - since).total_seconds() // 60))
        rows = _with_last(_rows(partials, question, level, minutes / level.minutes), newest, level)
        return sorted(rows, key=_by_value)[: question.top]
    return _with_last(_rows(partials, question, level), newest, level)


def _with_newest_apart(partials: pa.Table, by: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """The last values that are kept beside another function, by group; of several series together there is none."""
    is_newest = is_function(partials["function"], lambda spec: spec.keeps_newest)
    others, newest = partials.filter(pc.invert(is_newest)), partials.filter(is_newest)
    if not others.num_rows:
        return partials, newest.slice(0, 0)
    cut = grouped_for_query(newest, by)
    series = Counter(entity for _, entity in set(zip(newest["entity"].to_pylist(), cut["entity"].to_pylist())))
    alone = pa.array([entity for entity, count in series.items() if count == 1], pa.string())
    return others, cut.filter(pc.is_in(cut["entity"], alone))


def _with_last(rows: list[QueryRow], newest: pa.Table, level: Level) -> list[QueryRow]:
    found = (
        {(row["bucket"], row["entity"]): row["value"] for row in with_finals(newest, level, ()).to_pylist()}
        if newest.num_rows
        else {}
    )
    return [replace(row, last=found.get((row.time, entity_of(row.group)))) for row in rows]


def metrics_in_tables(tables: Tables, now: datetime | None = None) -> list[MetricSummary]:
    """Every metric that the tables hold; of those that days do without, the ones of the last week or hours."""
    now = now or datetime.now(UTC)
    newest = {level: tables.describe(level.value).newest for level in (Level.MINUTE, Level.DAY)}
    last = newest[Level.MINUTE] or newest[Level.DAY] or _FIRST
    found: dict[tuple[str, str], MetricSummary] = {}
    for rows in (tables.partials(Level.DAY), *(tables.partials(level, now - reach) for reach, level in _LEVELS[::-1])):
        grouped = rows.group_by(["metric", "function"], use_threads=False).aggregate(
            [("count", "sum"), ("entity", "count_distinct")]
        )
        for row in grouped.to_pylist():
            one = MetricSummary(row["metric"], row["function"], row["count_sum"], row["entity_count_distinct"], last)
            found.setdefault((one.metric, one.function), one)
    others = {metric for metric, function in found if not Function.parse(function).spec.keeps_newest}
    for metric, function in list(found):
        if metric in others and Function.parse(function).spec.keeps_newest:  # the last value of that metric
            del found[metric, function]
    return sorted(found.values(), key=lambda one: (one.metric, one.function))


def _bucket_of(moment: datetime, width: timedelta) -> datetime:
    return _FIRST + (moment - _FIRST) // width * width


def grouped_for_query(partials: pa.Table, by: Sequence[str]) -> pa.Table:
    """With entities cut down to the labels that were asked for."""
    if ALL in by:
        return partials
    encoded = partials["entity"].combine_chunks().dictionary_encode()
    texts = pa.array([_cut(entity, by) for entity in encoded.dictionary.to_pylist()], pa.string())
    place = partials.schema.get_field_index("entity")
    return partials.set_column(place, "entity", texts.take(encoded.indices))


def _cut(entity: str, by: Sequence[str]) -> str:
    labels = json.loads(entity)
    return entity_of({label: labels.get(label, "") for label in by})


def _check_labels(partials: pa.Table, question: Question) -> None:
    """A label that no series has is misspelt: all would be one group without a name."""
    known = {label for entity in pc.unique(partials["entity"]).to_pylist() for label in json.loads(entity)}
    for label in question.by:
        if label != ALL and label not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise PenstockError(f"{question.metric} has no label {label!r} in that time; {there}")


def _one_bucket(partials: pa.Table, moment: datetime) -> pa.Table:
    """All buckets as one, which begins at `moment`."""
    place = partials.schema.get_field_index("bucket")
    times = pa.repeat(pa.scalar(moment, partials.schema.field("bucket").type), partials.num_rows)
    return partials.set_column(place, "bucket", times)


def _with_percentiles(partials: pa.Table, metric: str) -> pa.Table:
    functions = dict(functions_in(partials["function"]))
    splitting = [text for text, function in functions.items() if function.spec.has_percentiles]
    if not splitting and all(function.name == "sum" for function in functions.values()):
        raise PenstockError(
            f"{metric} is kept as sum: it counts, and a counter has no percentiles. A histogram has them"
        )
    if not splitting:
        raise PenstockError(
            f"{metric} is kept as {', '.join(sorted(functions))}, which has no percentiles: give it a definition with "
            "`function: percentile` (docs/how-to/define-metrics.md), from then on there are"
        )
    return partials.filter(pc.is_in(partials["function"], pa.array(splitting)))


def _rows(partials: pa.Table, question: Question, level: Level, buckets: float = 1.0) -> list[QueryRow]:
    names = [rank_name(rank) for rank in question.ranks]
    finals = with_finals(partials, level, question.ranks).to_pylist()
    ranges = percentile_ranges_of_partials(partials, question.ranks) if names else [[]] * len(finals)
    rows = []
    for row, of_ranks in zip(finals, ranges):
        per_minute = Function.parse(row["function"]).spec.is_per_minute
        value = row["value"] / buckets if per_minute and row["value"] is not None else row["value"]
        ranks = {name: row[name] for name in names}
        labels = json.loads(row["entity"])
        rows.append(
            QueryRow(
                row["bucket"],
                labels,
                row["function"],
                row["count"],
                value,
                row["min"],
                row["max"],
                ranks,
                ranges=dict(zip(names, of_ranks)),
            )
        )
    return rows


def _by_value(row: QueryRow) -> tuple[bool, float, list[tuple[str, str]]]:
    """Greatest first: by the percentile that was asked for, else by value; what has none comes last."""
    value = next(iter(row.ranks.values()), row.value)
    return value is None, -(value or 0.0), sorted(row.group.items())


def _top_records(tables: Tables, question: Question, since: datetime) -> pa.Table:
    """A metric whose function is top_n has its records in a table of their own: each record is a group by itself."""
    kept = question.top or 10
    rows = tables.records(question.level_read(), since, question.metric)
    rows = top_records(rows, lambda function: min(kept, records_kept(function)))
    entities = [
        entity_of({**json.loads(entity), **json.loads(record)})
        for entity, record in zip(rows["entity"].to_pylist(), rows["record"].to_pylist())
    ]
    count = rows.num_rows
    columns = {
        "metric": rows["metric"],
        "function": pa.array(["max"] * count, pa.string()),
        "entity": pa.array(entities, pa.string()),
        "bucket": rows["bucket"],
        "part": pa.array([0] * count, pa.int64()),
        "record": pa.nulls(count, pa.string()),
        "count": pa.array([1] * count, pa.int64()),
        "sum": rows["max"],
        "min": rows["max"],
        "max": rows["max"],
    }
    return pa.table(columns)


def _why_nothing(tables: Tables, question: Question, level: Level) -> str:
    known = {one.metric for one in metrics_in_tables(tables)} | {
        metric for level in Level for metric in pc.unique(tables.records(level)["metric"]).to_pylist()
    }
    if not known:
        return no_tables_yet(tables)
    if question.metric not in known:
        close = difflib.get_close_matches(question.metric, known, n=3, cutoff=0.5)
        meant = f"did you mean {', '.join(close)}?" if close else "`penstock query` alone lists what there is"
        return f"no metric is called {question.metric!r}; {meant}"
    newest = pc.max(tables.partials(level, metric=question.metric)["bucket"]).as_py()
    if newest is None:
        return f"{question.metric} is not kept at level {level.value}: ask with another --level"
    last = f"{newest:%Y-%m-%d %H:%M} UTC"
    return f"{question.metric} has nothing that recent: its newest {level.value} is {last}, ask with a longer --since"


def no_tables_yet(tables: Tables) -> str:
    """What to do where there are no tables. OSError for folders that may not be read: to a store they do not exist."""
    folder = tables.location.removeprefix("parquet:")
    for place in (folder, *(os.path.join(folder, name) for name in SCHEMAS)):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(place)
    return (
        f"there are no tables at {tables.location} yet: `penstock run` makes them of what it receives (the first rows "
        "come some seconds after it has said `Spark works`), `penstock spark run` of segments, `penstock demo` of "
        "generated points; or name others with --tables"
    )


def has_tables(tables: Tables) -> bool:
    return any(tables.describe(name).rows for name in SCHEMAS)
