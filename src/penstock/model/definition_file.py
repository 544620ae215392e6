"""Metric definitions as a YAML file; every error names the place.

    metrics:
      - name: endpoint_percentile             the metric that it makes
        source: http.server.request.duration  the metric that comes in
        filter: {service: [checkout, catalogue], status: {not: "404"}, value: {above: 0}}
        entity: [service, endpoint]           labels that make the entity; left out: all of them
        function: percentile                  see penstock.model.function
        levels: [minute, hour]                left out: all
        ttl: {minute: 3d, hour: 30d}          or one for all levels, 7d; left out: the job's
        keep_source: true                     the source is kept by its own labels, too; left out: false
    undefined: keep                           metrics that no definition has as its source: keep (by own labels) or drop
    undefined: {event: percentile}            the same by kind (gauge, event, counter, histogram; left out: keep); for
                                              gauges and events also percentile, latest, or both in a list

Beside `function` stand its parameters: percentile `relative_error` (0.01), apdex `threshold`, histogram `bounds`,
percent `match`, rate `numerator` and `denominator` (conditions like `filter`), top_n `n` and `record` (labels that
make the record; left out: all that are not in the entity), distinct `of` (the label, or a list of them, whose values
are counted) and `relative_error` (0.02). docs/reference/definitions.md has every key.
A condition names labels: a text or a list of them is what the label must be, {not: …} what it must not be,
{matches: …} a regular expression for all of it. `value` is the point's own: {above, at_least, below, at_most}.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from penstock.errors import ConfigError, MissingRequirement
from penstock.model.chunk_partials import KEPT, LATEST, PERCENTILE, Kept
from penstock.model.definition import BOUNDS, EVERYTHING, Condition, Definition, Definitions
from penstock.model.function import FUNCTIONS, Function
from penstock.model.level import Level
from penstock.model.name import is_encodable_name, metric_name_fault
from penstock.model.point import PointKind
from penstock.units import parse_duration
from penstock.yaml_bounds import load_plain

_KINDS = {"histogram" if kind is PointKind.DISTRIBUTION else kind.value: kind for kind in PointKind}
_WORDS = {PointKind.COUNTER: ("keep",), PointKind.DISTRIBUTION: ("keep", "percentile")}  # others: all
KEYS = ("name", "source", "filter", "entity", "function", "levels", "ttl", "keep_source")  # of every definition


def load_definitions(path: Path) -> Definitions:
    """The definitions of a YAML file; ConfigError names the file and the place in it."""
    try:
        document = load_plain(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    try:
        return parse_definitions(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_definitions(document: Any) -> Definitions:
    """The definitions of a parsed YAML file; ConfigError names the place."""
    if document is None:
        return Definitions()
    if not isinstance(document, dict):
        raise ConfigError(f"a mapping with the key 'metrics' is expected, got {type(document).__name__}")
    _refuse_unknown("", document, {"metrics", "undefined"})
    entries = document.get("metrics") or []
    if not isinstance(entries, list):
        raise ConfigError(f"metrics: a list is expected, got {type(entries).__name__}")
    metrics = tuple(_definition(f"metrics[{n}]", entry) for n, entry in enumerate(entries))
    names = [metric.name for metric in metrics]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise ConfigError(f"metrics[{n}].name: {name!r} is defined twice")
    _refuse_two_of_a_name(metrics)
    return Definitions(metrics, _undefined(document.get("undefined", "keep")))


def _undefined(given: Any) -> Literal["keep", "drop"] | Kept:
    """What becomes of metrics without a definition: one word for all, or some for each kind of point."""
    if given in ("keep", "drop"):
        return "keep" if given == "keep" else "drop"
    if not isinstance(given, dict):
        raise ConfigError(f"undefined: keep, drop or a mapping of {', '.join(_KINDS)} is expected, got {given!r}")
    _refuse_unknown("undefined.", given, _KINDS)
    return {_KINDS[name]: _kept(f"undefined.{name}", _KINDS[name], what) for name, what in given.items()}


def _kept(place: str, kind: PointKind, given: Any) -> tuple[Function, ...]:
    """The functions of one kind. Increments have no percentiles and no last value, distributions no last value."""
    if given == "drop":
        return ()
    words, known = _one_or_more(place, given), _WORDS.get(kind, ("keep", "percentile", "latest"))
    for word in words:
        if word not in known:
            raise ConfigError(f"{place}: one of drop, {', '.join(known)} is expected, got {word!r}")
    first = PERCENTILE if PERCENTILE.name in words else KEPT[kind][0]
    return (first, LATEST) if LATEST.name in words else (first,)


def _refuse_two_of_a_name(metrics: tuple[Definition, ...]) -> None:
    """A source that is kept has its own name in the tables, so no definition may make a metric of that name."""
    kept = {metric.source: metric.name for metric in metrics if metric.keep_source}
    for n, metric in enumerate(metrics):
        if metric.name in kept:
            raise ConfigError(
                f"metrics[{n}].name: {metric.name!r} is the source that keep_source of {kept[metric.name]!r} keeps; "
                "choose another name"
            )


def _definition(place: str, entry: Any) -> Definition:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: a mapping is expected, got {type(entry).__name__}")
    name = _text(f"{place}.name", entry.get("name"))
    if fault := metric_name_fault(name):
        raise ConfigError(f"{place}.name: {fault}")
    place = f"{place} ({name})"
    kind = _text(f"{place}.function", entry.get("function", "avg"))
    if kind not in FUNCTIONS:
        raise ConfigError(f"{place}.function: one of {', '.join(FUNCTIONS)} is expected, got {kind!r}")
    spec = FUNCTIONS[kind]
    _refuse_unknown(f"{place}.", entry, {*KEYS, *spec.keys})
    for parameter, required in spec.keys.items():
        if required and parameter not in entry:
            raise ConfigError(f"{place}.{parameter}: {kind} needs it")
    try:
        function = Function(kind, spec.read(entry))
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{place}.function: {error}") from error
    except MissingRequirement as error:
        raise MissingRequirement(f"{place}.function: {error}") from None
    return Definition(
        name=name,
        source=_text(f"{place}.source", entry.get("source")),
        function=function,
        filter=_condition(f"{place}.filter", entry.get("filter")),
        entity=_texts(f"{place}.entity", entry.get("entity")),
        match=_condition(f"{place}.match", entry.get("match", entry.get("numerator"))),
        denominator=_condition(f"{place}.denominator", entry.get("denominator")),
        record=_texts(f"{place}.record", entry.get("record")),
        of=tuple(_one_or_more(f"{place}.of", entry["of"])) if spec.counts_distinct else (),
        levels=_levels(f"{place}.levels", entry.get("levels")),
        ttl=_ttl(f"{place}.ttl", entry.get("ttl")),
        keep_source=_flag(f"{place}.keep_source", entry.get("keep_source", False)),
    )


def _condition(place: str, given: Any) -> Condition:
    if given is None:
        return EVERYTHING
    if not isinstance(given, dict):
        raise ConfigError(f"{place}: a mapping of labels is expected, got {given!r}")
    labels: list[tuple[str, bool, re.Pattern[str] | frozenset[str]]] = []
    bounds: list[tuple[str, float]] = []
    for label, wanted in given.items():
        here = f"{place}.{label}"
        if label == "value":
            bounds += _bounds(here, wanted)
        elif isinstance(wanted, dict):
            _refuse_unknown(f"{here}.", wanted, {"not", "matches"})
            if "not" in wanted:
                labels.append((label, False, frozenset(_one_or_more(f"{here}.not", wanted["not"]))))
            if "matches" in wanted:
                labels.append((label, True, _pattern(f"{here}.matches", wanted["matches"])))
        else:
            labels.append((label, True, frozenset(_one_or_more(here, wanted))))
    return Condition(tuple(labels), tuple(bounds))


def _bounds(place: str, given: Any) -> list[tuple[str, float]]:
    if not isinstance(given, dict):
        raise ConfigError(f"{place}: a mapping with {', '.join(BOUNDS)} is expected, got {given!r}")
    _refuse_unknown(f"{place}.", given, BOUNDS.keys())
    try:
        return [(name, float(bound)) for name, bound in given.items()]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: numbers are expected, got {given!r}") from error


def _pattern(place: str, given: Any) -> re.Pattern[str]:
    try:
        return re.compile(str(given))
    except re.error as error:
        raise ConfigError(f"{place}: not a regular expression: {error}") from error


def _one_or_more(place: str, given: Any) -> list[str]:
    if isinstance(given, dict) or given is None:
        raise ConfigError(f"{place}: a text or a list of texts is expected, got {given!r}")
    return [_as_label(one) for one in given] if isinstance(given, list) else [_as_label(given)]


def _as_label(given: Any) -> str:
    """A value as text. Labels hold an OTLP boolean as JSON writes it."""
    return str(given).lower() if isinstance(given, bool) else str(given)


def _text(place: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{place}: a text is expected, got {given!r}")
    return _whole(place, given)


def _texts(place: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"{place}: a list of labels is expected, got {given!r}")
    return tuple(_whole(place, one) for one in given)


def _whole(place: str, text: str) -> str:
    if not is_encodable_name(text):  # no table can hold it
        raise ConfigError(f"{place}: half a character in {text!r}")
    return text


def _flag(place: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"{place}: true or false is expected, got {given!r}")
    return given


def _levels(place: str, given: Any) -> tuple[Level, ...]:
    if given is None:
        return tuple(Level)
    names = [level.value for level in Level]
    if not isinstance(given, list) or not given or not set(given) <= set(names):
        raise ConfigError(f"{place}: a list of {', '.join(names)} is expected, got {given!r}")
    return tuple(level for level in Level if level.value in given)


def _ttl(place: str, given: Any) -> dict[Level, float]:
    if given is None:
        return {}
    names = [level.value for level in Level]
    by_level = given if isinstance(given, dict) else dict.fromkeys(names, given)
    _refuse_unknown(f"{place}.", by_level, names)
    try:
        return {Level(name): parse_duration(text, place) for name, text in by_level.items()}
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{place}: durations like 7d are expected, got {given!r}") from error


def _refuse_unknown(place: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{place}{key}: unknown; known are {', '.join(sorted(known))}")
