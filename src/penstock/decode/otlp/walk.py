"""Where the metrics of an OTLP request are: a walk down to them, without reading their points."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.decode.outcome import TooMany
from penstock.protobuf import fields, read_varint

RESOURCE_METRICS = RESOURCE = SCOPE = NAME = 0x0A
SCOPE_METRICS = METRICS = 0x12
TEMPORALITY, IS_MONOTONIC = 0x10, 0x18  # of a sum or a histogram
DELTA, CUMULATIVE = 1, 2  # values of the temporality
GAUGE, SUM, HISTOGRAM, EXPONENTIAL, SUMMARY = 0x2A, 0x3A, 0x4A, 0x52, 0x5A  # the tags of a metric's data
_DATA = (GAUGE, SUM, HISTOGRAM, EXPONENTIAL, SUMMARY)
_MAX_METRICS = 200_000  # of one request, of all its resources: each costs microseconds and some hundred bytes
_MAX_FIELDS = 300_000  # of one request above its points: of resources, scopes and metrics, known ones or not


class OtlpFamily(NamedTuple):
    """The identity of one sender's metric, as the sender wrote it."""

    resource: bytes
    scope: bytes
    name: bytes
    data: int
    temporality: int
    is_monotonic: int


MetricHead = tuple[bytes, bytes, bytes]
"""The resource, scope and name of a metric as its sender wrote them. One is made for every metric, so it is plain.

The name is with tag and length; it is empty if the metric does not start with its name.
"""


class OtlpMetricData(NamedTuple):
    """The points of a metric as one message, and where it is."""

    head: MetricHead
    name: bytes
    kind: int  # GAUGE to SUMMARY
    start: int
    end: int
    request: int
    number: int  # of the metric in its group
    whole: tuple[int, int]  # where the metric itself starts and ends

    @property
    def layout(self) -> int:
        """The kind whose points have the same fields."""
        return SUM if self.kind == GAUGE else self.kind

    def family(self, temporality: int, is_monotonic: int) -> OtlpFamily:
        return OtlpFamily(*self.head[:2], self.name, self.kind, temporality, is_monotonic)


class OtlpFieldBudget:
    """Bounds what the walk through one request may meet: each field takes a moment, and an empty one two bytes."""

    __slots__ = ("_left",)

    def __init__(self, most: int = _MAX_FIELDS) -> None:
        self._left = most

    def spend(self) -> None:
        """Counts a field; TooMany beyond the bound."""
        self._left -= 1
        if self._left < 0:
            raise TooMany(f"more than {_MAX_FIELDS} resources, scopes and fields of metrics")


def walk_otlp_metrics(body: bytes, budget: OtlpFieldBudget | None = None) -> Iterator[tuple[MetricHead, int, int]]:
    """Yields the metrics of one request, and where each starts and ends.

    ValueError or IndexError if it is no request, TooMany beyond a bound.
    """
    budget = budget or OtlpFieldBudget()
    left = _MAX_METRICS
    for outer, at, end in fields(body):
        budget.spend()
        if outer != RESOURCE_METRICS:
            continue
        resource, scopes = b"", []
        for tag, start, stop in fields(body, at, end):
            budget.spend()
            if tag == RESOURCE:
                resource = body[start:stop]
            elif tag == SCOPE_METRICS:
                scopes.append((start, stop))
        for at, end in scopes:
            scope, metrics = _scope(body, at, end, left, budget)
            left -= len(metrics)
            for start, stop in metrics:
                is_named = stop > start + 1 and body[start] == NAME and body[start + 1] < 128
                name = body[start : start + 2 + body[start + 1]] if is_named else b""
                yield (resource, scope, name), start, stop


def _scope(body: bytes, at: int, end: int, most: int, budget: OtlpFieldBudget) -> tuple[bytes, list[tuple[int, int]]]:
    """Returns a scope and where its metrics are. There are many metrics, so this loop makes no call for each."""
    scope, metrics = b"", []
    while at < end:
        if body[at] == METRICS:
            length = body[at + 1]
            at += 2
            if length >= 128:
                length, at = read_varint(body, at - 1)
            metrics.append((at, at + length))
            at += length
            if len(metrics) > most:
                raise TooMany(f"more than {_MAX_METRICS} metrics")
        else:
            budget.spend()
            tag, start, after = next(fields(body, at, end))
            if tag == SCOPE:
                scope = body[start:after]
            at = after
    if at != end:
        raise ValueError("a field that is longer than its message")
    return scope, metrics


def otlp_data_of_metric(body: bytes, start: int, end: int, budget: OtlpFieldBudget) -> tuple[bytes, int, int, int]:
    """Returns a metric's name, the kind of its data, and where the data is; kind 0 if it has none."""
    name, kind, first, last = b"", 0, start, start
    for tag, at, stop in fields(body, start, end):
        budget.spend()
        if tag == NAME:
            name = body[at:stop]
        elif tag in _DATA:
            kind, first, last = tag, at, stop
    return name, kind, first, last
