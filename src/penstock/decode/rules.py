"""Rules at the door (`intake.rules`): what becomes of a series before it has a place. Each is one line of text.

drop METRIC                      its points are not taken
drop_labels METRIC LABEL …       these labels are left out
keep_labels METRIC LABEL …       all other labels are left out
hash_labels METRIC LABEL …       their values are replaced by a digest
rename METRIC NAME               it is called so from then on

METRIC is a name, or a pattern with `*` and `?`. All rules that match are applied, one after the other.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from penstock.decode.series_description import SeriesDescription
from penstock.errors import ConfigError

_DIGEST = 16  # characters: among a billion values two of one digest are unlikely
_FIELD = "intake.rules"


def _drop_labels(labels: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name not in names}


def _keep_labels(labels: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name in names}


def _hash_labels(labels: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: _digest(value) if name in names else value for name, value in labels.items()}


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]


_OF_LABELS: Mapping[str, Callable[[Mapping[str, str], Sequence[str]], dict[str, str]]] = {
    "drop_labels": _drop_labels,
    "keep_labels": _keep_labels,
    "hash_labels": _hash_labels,
}
_EXAMPLES = {
    "drop": "drop debug.*",
    "drop_labels": "drop_labels http.* user session",
    "keep_labels": "keep_labels rpc.* service method",
    "hash_labels": "hash_labels mail.* email",
    "rename": "rename old.name new.name",
}
_ACTS = tuple(_EXAMPLES)


@dataclass(slots=True)
class Rule:
    """One rule, and how many series it was applied to."""

    text: str
    act: str
    metric: str
    names: tuple[str, ...]
    applied: int = field(default=0, compare=False)

    def apply(self, described: SeriesDescription) -> SeriesDescription | None:
        """Returns what the series is from now on; None if it is dropped."""
        if not fnmatchcase(described.metric, self.metric):
            return described
        self.applied += 1
        if self.act == "drop":
            return None
        if self.act == "rename":
            return replace(described, metric=self.names[0])
        return replace(described, labels=_OF_LABELS[self.act](described.labels, self.names))


def parse_rule(text: str) -> Rule:
    """ConfigError for a text that is no rule."""
    act, metric, *names = (*str(text).split(), "", "")[: max(2, len(str(text).split()))]
    if act not in _ACTS:
        raise ConfigError(
            f"must each begin with one of {', '.join(_ACTS)}, got {text!r}; a rule is {_EXAMPLES['drop_labels']!r}",
            field=_FIELD,
        )
    wanted = {"drop": "drop METRIC", "rename": "rename METRIC NAME"}.get(act, f"{act} METRIC LABEL …")
    is_whole = bool(metric) and (len(names) == (act == "rename") if act in ("drop", "rename") else bool(names))
    if not is_whole:
        raise ConfigError(f"must read {wanted!r}, like {_EXAMPLES[act]!r}, got {text!r}", field=_FIELD)
    return Rule(str(text), act, metric, tuple(names))


class RuleBook:
    """The rules in their order.

    Threads: one at a time.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.rules = [parse_rule(text) for text in texts]
        self.dropped = 0  # points

    def apply(self, described: SeriesDescription) -> SeriesDescription | None:
        """Returns the series as all rules make it; None if one of them drops it."""
        changed: SeriesDescription | None = described
        for rule in self.rules:
            if changed is None:
                return None
            changed = rule.apply(changed)
        return changed
