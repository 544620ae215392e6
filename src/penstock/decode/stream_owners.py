"""Which process keeps a cumulative stream, where several receive: only its owner can say what its next value adds.

    a request ──► what this process owns, and whatever adds up by itself (gauges, deltas)    decoded here
              └─► what another process owns: the same messages, not yet read                 a body for each owner

The owner of a stream follows from its identity, so every process finds the same one, in every run. OTLP goes by whole
metrics of a resource and scope: their bytes are handed over as they came, and only their owner reads them. Remote
writes go by series.
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
    OtlpFamily,
)
from penstock.protobuf import bytes_head, field_bytes

SERIES = 0x0A  # of a remote write
_PART = re.compile(rb"_(?:count|sum)\Z")  # of a summary or histogram: one process keeps all of it
_GOLDEN = 0x9E3779B1  # spreads a difference of a few bits over all bits

HandoverBodies = dict[int, dict[int, bytes]]  # by process, then by the number of the request in its group


@dataclass(frozen=True, slots=True)
class StreamOwners:
    """Says which of `count` processes owns a stream; this one is number `own`."""

    own: int
    count: int
    unreachable: set[int] = field(default_factory=set)
    """Processes to which nothing can be handed over now. Written by the connections to them."""

    def of(self, *identity: bytes) -> int:
        """Returns the same process for the same texts in every run; changes only with `stream_memory.FORMAT`."""
        mixed = 0
        for text in identity:
            mixed = crc32(text, mixed)
        return (mixed * _GOLDEN & 0xFFFFFFFF) * self.count >> 32

    def of_family(self, family: OtlpFamily) -> int:
        """Returns the owner of all streams of one sender's metric; this process if they may be counted anywhere."""
        name = family.name
        if family.data == SUM:
            if family.temporality != CUMULATIVE or not family.is_monotonic:
                return self.own
            name = _PART.sub(b"", name)
        elif family.data == GAUGE or (family.data != SUMMARY and family.temporality != CUMULATIVE):
            return self.own
        return self.of(family.resource, family.scope, name)

    def of_series(self, metric: str, entity: str) -> int:
        """Returns the owner of one counter or histogram of a remote write."""
        return self.of(_PART.sub(b"", metric.encode()), entity.encode())


class StreamHandoverParts:
    """The parts of a group of requests that other processes own.

    `handed_over` are the requests that came from another process: they have no such parts.
    """

    def __init__(self, owners: StreamOwners, handed_over: Container[int] = ()) -> None:
        self.owners = owners
        self.handed_over = handed_over
        self._metrics: dict[tuple[int, int], list[tuple[bytes, bytes, bytes]]] = {}
        self._fields: dict[tuple[int, int], list[bytes]] = {}
        self._points: Counter[tuple[int, int]] = Counter()

    def is_foreign(self, owner: int, request: int) -> bool:
        return owner != self.owners.own and request not in self.handed_over

    def clear(self) -> None:
        self._metrics.clear()
        self._fields.clear()
        self._points.clear()

    def add_metric(self, owner: int, request: int, family: OtlpFamily, metric: bytes, points: int) -> None:
        """Adds a metric of an OTLP request."""
        self._metrics.setdefault((owner, request), []).append((family.resource, family.scope, metric))
        self._points[owner, request] += points

    def add_field(self, owner: int, request: int, tag: int, content: bytes) -> None:
        """Adds a field of a remote write: a series, or metadata."""
        fields = self._fields.setdefault((owner, request), [])
        fields += (bytes_head(tag >> 3, len(content)), content)
        self._points[owner, request] += tag == SERIES

    def bodies(self, failed: Container[int]) -> HandoverBodies:
        """Returns a request for each owner and each request, without the requests that failed."""
        found: HandoverBodies = {}
        for (owner, request), metrics in self._metrics.items():
            if request not in failed:
                found.setdefault(owner, {})[request] = otlp_request_of_parts(metrics)
        for (owner, request), fields in self._fields.items():
            if request not in failed:
                found.setdefault(owner, {})[request] = b"".join(fields)
        return found

    def points(self, failed: Container[int]) -> Counter[int]:
        """Returns how many points those are, or series of remote writes, by process."""
        found: Counter[int] = Counter()
        for (owner, request), points in self._points.items():
            found[owner] += points if request not in failed else 0
        return found


def otlp_request_of_parts(metrics: Iterable[tuple[bytes, bytes, bytes]]) -> bytes:
    """Writes metrics with their resources and scopes as one request; neighbours share them."""
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
