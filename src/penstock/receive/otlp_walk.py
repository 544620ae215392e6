"""Where the metrics of an OTLP request are: a walk down to them, without reading their points."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.receive.plain import TooMany, fields

_RESOURCE_METRICS = _RESOURCE = _SCOPE = _NAME = 0x0A
_SCOPE_METRICS = _METRICS = 0x12
TEMPORALITY, IS_MONOTONIC = 0x10, 0x18  # of a sum or a histogram
GAUGE, SUM, HISTOGRAM, EXPONENTIAL, SUMMARY = 0x2A, 0x3A, 0x4A, 0x52, 0x5A  # the tags of a metric's data
_DATA = (GAUGE, SUM, HISTOGRAM, EXPONENTIAL, SUMMARY)
_MOST_METRICS = 200_000  # of one request, of all its resources: each costs microseconds and some hundred bytes


class Family(NamedTuple):
    """What tells the metrics of senders apart, as they wrote it."""

    resource: bytes
    scope: bytes
    name: bytes
    data: int
    temporality: int
    is_monotonic: int


class Data(NamedTuple):
    """A metric's points as one message: whose they are and where."""

    resource: bytes
    scope: bytes
    name: bytes
    kind: int  # GAUGE to SUMMARY
    start: int
    end: int
    request: int

    @property
    def layout(self) -> int:
        """The kind whose points have the same fields."""
        return SUM if self.kind == GAUGE else self.kind

    def family(self, temporality: int, is_monotonic: int) -> Family:
        return Family(self.resource, self.scope, self.name, self.kind, temporality, is_monotonic)


def walk(body: bytes, base: int, request: int) -> Iterator[Data]:
    """The metrics of one request, `base` added to their places; ValueError or IndexError if it is none.

    TooMany if there is no end to them.
    """
    left = _MOST_METRICS
    for outer, at, end in fields(body, 0, len(body)):
        if outer != _RESOURCE_METRICS:
            continue
        resource, scopes = b"", []
        for tag, start, stop in fields(body, at, end):
            if tag == _RESOURCE:
                resource = body[start:stop]
            elif tag == _SCOPE_METRICS:
                scopes.append((start, stop))
        for at, end in scopes:
            scope, metrics = b"", []
            for tag, start, stop in fields(body, at, end):
                if tag == _METRICS:
                    metrics.append((start, stop))
                elif tag == _SCOPE:
                    scope = body[start:stop]
            for start, stop in metrics:
                name, kind = b"", 0
                for tag, first, last in fields(body, start, stop):
                    if tag == _NAME:
                        name = body[first:last]
                    elif tag in _DATA:
                        kind, start, stop = tag, first, last
                left -= 1
                if not left:
                    raise TooMany(f"more than {_MOST_METRICS} metrics")
                if kind:
                    yield Data(resource, scope, name, kind, base + start, base + stop, request)
