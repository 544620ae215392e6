"""Whose a cumulative stream is where several processes receive: one of them alone can say what its next value adds.

    a request ──► what is ours, and whatever adds up by itself (gauges, deltas)    decoded here
              └─► what another process keeps: the same messages, not yet read      a body for each of them

A stream's home follows from what tells it apart, so every process finds the same one, in every run. OTLP goes by whole
metrics of a resource and scope: their bytes are handed on as they came, and only their home reads them. Remote writes
go by series.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from zlib import crc32

from penstock.decode.otlp.walk import (
    CUMULATIVE,
    GAUGE,
    METRICS,
    RESOURCE,
    RESOURCE_METRICS,
    SCOPE,
    SCOPE_METRICS,
    SUM,
    SUMMARY,
    Family,
)
from penstock.protobuf import bytes_head, field_bytes

SERIES = 0x0A  # of a remote write
_PART = re.compile(rb"_(?:count|sum)\Z")  # what a summary becomes: streams that a sum of that name shares with it
_GOLDEN = 0x9E3779B1  # spreads what differs in a few bits over all of them

Bodies = dict[int, dict[int, bytes]]  # by process, then by the number of the request in its group


@dataclass(frozen=True, slots=True)
class Homes:
    """Which of `count` processes keeps a stream; we are number `own`."""

    own: int
    count: int
    down: set[int] = field(default_factory=set)
    """Processes to which nothing can be handed now. Others write it."""

    def of(self, *texts: bytes) -> int:
        """The same for the same texts, whichever process and run asks; changes with `remembered.FORMAT` only."""
        mixed = 0
        for text in texts:
            mixed = crc32(text, mixed)
        return (mixed * _GOLDEN & 0xFFFFFFFF) * self.count >> 32

    def of_family(self, family: Family) -> int:
        """Of all streams of one sender's metric; our own number if they may be counted anywhere."""
        name = family.name
        if family.data == SUM:
            if family.temporality != CUMULATIVE or not family.is_monotonic:
                return self.own
            name = _PART.sub(b"", name)
        elif family.data == GAUGE or (family.data != SUMMARY and family.temporality != CUMULATIVE):
            return self.own
        return self.of(family.resource, family.scope, name)

    def of_series(self, metric: str, entity: str) -> int:
        """Of one counter of a remote write."""
        return self.of(metric.encode(), entity.encode())


class Elsewhere:
    """The parts of a group of requests that other processes keep."""

    def __init__(self) -> None:
        self._metrics: dict[tuple[int, int], list[tuple[bytes, bytes, bytes]]] = {}
        self._fields: dict[tuple[int, int], list[bytes]] = {}
        self._points: Counter[tuple[int, int]] = Counter()

    def clear(self) -> None:
        self._metrics.clear()
        self._fields.clear()
        self._points.clear()

    def add_metric(self, home: int, request: int, family: Family, metric: bytes, points: int) -> None:
        """A metric of an OTLP request."""
        self._metrics.setdefault((home, request), []).append((family.resource, family.scope, metric))
        self._points[home, request] += points

    def add_field(self, home: int, request: int, tag: int, content: bytes) -> None:
        """A field of a remote write: a series, or metadata."""
        fields = self._fields.setdefault((home, request), [])
        fields += (bytes_head(tag >> 3, len(content)), content)
        self._points[home, request] += tag == SERIES

    def bodies(self, without: Container[int]) -> Bodies:
        """A request for each process of each request, but for those that failed."""
        found: Bodies = {}
        for (home, request), metrics in self._metrics.items():
            if request not in without:
                found.setdefault(home, {})[request] = as_request(metrics)
        for (home, request), fields in self._fields.items():
            if request not in without:
                found.setdefault(home, {})[request] = b"".join(fields)
        return found

    def points(self, without: Container[int]) -> Counter[int]:
        """How many points those are, or series of remote writes, by process."""
        found: Counter[int] = Counter()
        for (home, request), points in self._points.items():
            found[home] += points if request not in without else 0
        return found


def as_request(metrics: Iterable[tuple[bytes, bytes, bytes]]) -> bytes:
    """Metrics with their resources and scopes as one request; side by side, they share them."""
    found = []
    for resource, of_resource in groupby(metrics, lambda metric: metric[0]):
        inner = [field_bytes(RESOURCE >> 3, resource)]
        for scope, of_scope in groupby(of_resource, lambda metric: metric[1]):
            pieces = [field_bytes(SCOPE >> 3, scope)]
            for _, _, metric in of_scope:
                pieces += (bytes_head(METRICS >> 3, len(metric)), metric)
            inner.append(field_bytes(SCOPE_METRICS >> 3, b"".join(pieces)))
        found.append(field_bytes(RESOURCE_METRICS >> 3, b"".join(inner)))
    return b"".join(found)
