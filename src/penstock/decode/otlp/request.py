"""OTLP metric requests into columns.

    request ─ resource ─ scope ─ metric ─ gauge, sum, … ─ points ─ value, time, attributes
    └──────── walked, one by one ───────────────────┘     └── scanned, all of a group at once

Thousands of points share a few hundred metrics, so walking down to them costs little; the points themselves are only
located, and then read as columns. A point's attributes stay serialised: they are the key of its series, decoded once.
A metric that comes again and only brings new numbers is not even read: see `shapes`.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.decode.column_scan import PADDING, Bytes, Ints, MessageLayout, Scanned, scan
from penstock.decode.config import IntakeConfig
from penstock.decode.group import Account, Group
from penstock.decode.message_spans import ChildMessages, child_messages
from penstock.decode.otlp.attributes import attributes
from penstock.decode.otlp.metric_shapes import Columns, Hit, learn, points_of, together
from penstock.decode.otlp.walk import (
    CUMULATIVE,
    DELTA,
    EXPONENTIAL,
    GAUGE,
    HISTOGRAM,
    IS_MONOTONIC,
    SUM,
    SUMMARY,
    TEMPORALITY,
    Data,
    Family,
    data_of,
    walk,
)
from penstock.decode.outcome import Refusal
from penstock.decode.scanned_points import Found
from penstock.decode.series import Described, Namespace, Refused
from penstock.decode.shapes import Shapes
from penstock.decode.stream_homes import Homes, as_request
from penstock.model.point import Kind

_ATTRIBUTES = 0x0A  # of a resource
_SHAPES = 64 << 20  # bytes of shapes: those of some 200 000 streams
NO_VALUE = 1  # the flag of a point that only says that its stream has ended

_NUMBER = MessageLayout(
    fixed={0x11: "start", 0x19: "time", 0x21: "double", 0x31: "int"},
    repeated={0x3A: "attributes"},
    varints={0x40: "flags"},
)
_HISTOGRAM = MessageLayout(
    fixed={0x11: "start", 0x19: "time", 0x21: "count", 0x29: "sum", 0x59: "min", 0x61: "max"},
    spans={0x32: "counts", 0x3A: "bounds"},
    repeated={0x4A: "attributes"},
    varints={0x50: "flags"},
    noncanonical=frozenset({0x31, 0x39}),  # counts and bounds that are not packed
)
_EXPONENTIAL = MessageLayout(
    fixed={0x11: "start", 0x19: "time", 0x21: "count", 0x29: "sum", 0x39: "zeros", 0x61: "min", 0x69: "max"},
    spans={0x42: "positive", 0x4A: "negative"},
    repeated={0x0A: "attributes"},
    varints={0x30: "scale", 0x50: "flags"},
)
_BUCKETS = MessageLayout(
    varints={0x08: "offset"}, spans={0x12: "counts"}, noncanonical=frozenset({0x10})
)  # 0x10: not packed
_SUMMARY = MessageLayout(
    fixed={0x11: "start", 0x19: "time", 0x21: "count", 0x29: "sum"},
    repeated={0x3A: "attributes", 0x32: "quantiles"},
    varints={0x40: "flags"},
)
LAYOUTS = {SUM: _NUMBER, HISTOGRAM: _HISTOGRAM, EXPONENTIAL: _EXPONENTIAL, SUMMARY: _SUMMARY}


class _Read(NamedTuple):
    """What was read field by field."""

    families: list[Family]
    namespaces: list[Namespace]
    by_layout: dict[int, Columns]


class OtlpReader:
    """Finds the points of groups of requests, and remembers whose they are.

    Threads: one at a time.
    """

    def __init__(self, config: IntakeConfig, homes: Homes | None = None) -> None:
        self._config = config
        self._homes = homes
        self.namespaces: dict[Family, Namespace] = {}
        self._fresh: list[Family] = []
        self.shapes = Shapes(_SHAPES)

    def read(self, bodies: list[bytes], group: Group) -> list[tuple[int, Found]]:
        """The points of all bodies that can be read, by layout: HISTOGRAM, EXPONENTIAL, SUMMARY, or SUM for numbers.

        What other processes keep is not among them but in the group's `elsewhere`.
        """
        bodies, account = list(bodies), group.account
        found, odd = self._read(bodies, group)
        if odd:
            for request in odd:
                bodies[request] = _normalised(bodies[request], request, account)
            group.elsewhere.clear()
            found, odd = self._read(bodies, group)
            for request in odd:
                account.fail(request, "a request that even protobuf writes in an odd way")
            found = self._without(found, set(odd))
        return found

    def _read(self, bodies: list[bytes], group: Group) -> tuple[list[tuple[int, Found]], list[int]]:
        account = group.account
        hits: list[Hit] = []
        metrics: list[Data] = []
        base = 0
        for request, body in enumerate(bodies):
            before = len(hits), len(metrics)
            try:
                self._find(body, base, request, hits, metrics)
            except (ValueError, IndexError):
                account.fail(request, "not an ExportMetricsServiceRequest")
                del hits[before[0] :], metrics[before[1] :]
            base += len(body)
        blob = b"".join([*bodies, PADDING])
        data = np.frombuffer(blob, np.uint8)
        columns, odd = self._scan(blob, data, metrics, group)
        families, namespaces, read = columns.families, columns.namespaces, {metric.number: metric for metric in metrics}
        by_layout: dict[int, list[Hit]] = {}
        for hit in hits:
            by_layout.setdefault(hit.shape.layout, []).append(hit)
        found = []
        for layout in sorted({*by_layout, *columns.by_layout}):
            points = columns.by_layout.get(layout)
            if layout in by_layout:
                known = points_of(by_layout[layout], layout)
                points = known if points is None else together(known, points, layout)
            assert points is not None
            teach = partial(learn, self.shapes, layout, read)
            found.append((layout, Found(data, *points[:4], families, namespaces, points.which, teach)))
        return self._without(found, set(account.errors)), sorted(odd - set(account.errors))

    def _find(self, body: bytes, base: int, request: int, hits: list[Hit], metrics: list[Data]) -> None:
        """The metrics of one request: those of a known shape, and the others."""
        data = np.frombuffer(body, np.uint8)
        last = None
        for place in walk(body):
            number = len(hits) + len(metrics)
            last = self.shapes.find(place, body, data, last)
            if last is not None:
                hits.append(Hit(last, base + place.start, request, number))
                continue
            name, kind, first, after = data_of(body, place.start, place.end)
            if kind:
                whole = base + place.start, base + place.end
                owner = place.owner(body)
                metrics.append(Data(owner, name, kind, base + first, base + after, request, number, whole))

    def _scan(self, blob: bytes, data: Bytes, metrics: list[Data], group: Group) -> tuple[_Read, set[int]]:
        """Read the points of metrics that have no known shape; and which requests are written oddly."""
        places = np.array([(m.start, m.end, m.request, m.layout, m.number) for m in metrics], np.int64).reshape(-1, 5)
        chained = child_messages(blob, data, places[:, 0], places[:, 1])
        for number in chained.bad:
            group.account.fail(metrics[number].request, "points that are not messages")
        families, which = self._families(blob, metrics, chained, group)
        columns = {}
        odd: set[int] = set()
        layouts = np.where(which < 0, 0, places[:, 3])[chained.owner]
        for layout in np.unique(layouts[layouts > 0]).tolist():
            some = np.flatnonzero(layouts == layout)
            scanned = scan(data, chained.starts[some], chained.ends[some], LAYOUTS[layout])
            if layout == EXPONENTIAL:
                _scan_buckets(data, scanned)
            owner = chained.owner[some]
            requests = places[:, 2][owner]
            for request in np.unique(requests[scanned.is_malformed]).tolist():
                group.account.fail(request, "a data point that is not a message")
            odd.update(np.unique(requests[scanned.is_noncanonical]).tolist())
            unknown = np.full(len(some), -1)
            columns[layout] = Columns(scanned.columns, requests, places[:, 4][owner], unknown, which[owner])
        return _Read(families, [self.namespace(family) for family in families], columns), odd

    def _families(
        self, blob: bytes, metrics: list[Data], chained: ChildMessages, group: Group
    ) -> tuple[list[Family], Ints]:
        """The families of these metrics, and which one each is of; -1 for a metric that another process keeps."""
        told = {(number, tag): value for number, tag, value in chained.others}
        families: dict[Family, int] = {}
        which = np.full(len(metrics), -1)
        homes = self._homes
        points = None if homes is None else np.bincount(chained.owner, minlength=len(metrics))
        for number, metric in enumerate(metrics):
            family = metric.family(told.get((number, TEMPORALITY), 0), told.get((number, IS_MONOTONIC), 0))
            if homes is not None and points is not None:
                home = homes.of_family(family)
                if group.goes_to(home, metric.request, homes):
                    whole = blob[metric.whole[0] : metric.whole[1]]
                    group.elsewhere.add_metric(home, metric.request, family, whole, int(points[number]))
                    continue
            which[number] = families.setdefault(family, len(families))
        return list(families), which

    @staticmethod
    def _without(found: list[tuple[int, Found]], failed: set[int]) -> list[tuple[int, Found]]:
        if not failed:
            return found
        some = np.array(sorted(failed))
        return [(kind, points.take(~np.isin(points.requests, some))) for kind, points in found]

    def forget(self, streams: Ints, capacity: int) -> None:
        """Without the shapes of these streams, and without those that have not come for a while."""
        gone = np.zeros(capacity, bool)
        gone[streams] = True
        self.shapes.sweep(gone)

    def namespace(self, family: Family) -> Namespace:
        """Where the keys of that family's points are known."""
        known = self.namespaces.get(family)
        if known is None:
            known = self.namespaces[family] = Namespace(_Describer(family, self._config), family)
            self._fresh.append(family)
        return known

    def forget_unused(self) -> None:
        """Without the last group's new families of which nothing was taken: there may be any number of them."""
        for family in self._fresh:
            if not self.namespaces[family].keys:
                del self.namespaces[family]
        self._fresh = []


class _Describer:
    """What the keys of one family mean."""

    def __init__(self, family: Family, config: IntakeConfig) -> None:
        self._family = family
        self._nesting = config.max_nesting
        self._kept = config.resource_attributes
        self._longest = config.longest_labels
        self._resource: dict[str, str] | None = None

    def __call__(self, key: bytes) -> Described:
        family = self._family
        if self._resource is None:
            if (size := len(family.resource) + len(family.scope)) > self._longest:
                raise Refused(Refusal.LABELS, f"a resource of {size} bytes, at most {self._longest} are taken")
            found = attributes(family.resource, self._nesting, tag=_ATTRIBUTES)
            self._resource = {name: found[name] for name in self._kept if name in found}
        kind, is_cumulative = _kind(family)
        try:
            name = family.name.decode()
        except UnicodeDecodeError as error:
            raise Refused(Refusal.MALFORMED, f"a metric's name that is no text: {error}") from None
        return Described(name, kind, is_cumulative, {**self._resource, **attributes(key, self._nesting)})


def _kind(family: Family) -> tuple[Kind, bool]:
    if family.data == GAUGE:
        return Kind.GAUGE, False
    if family.temporality not in (DELTA, CUMULATIVE):
        raise Refused(
            Refusal.MALFORMED,
            f"metric {family.name[:100].decode(errors='replace')!r} does not say whether it is delta or cumulative",
        )
    is_cumulative = family.temporality == CUMULATIVE
    if family.data != SUM:
        return Kind.DISTRIBUTION, is_cumulative
    if is_cumulative and not family.is_monotonic:
        return Kind.GAUGE, False  # how much there is now, not how much was added
    return Kind.COUNTER, is_cumulative


def _scan_buckets(data: Bytes, scanned: Scanned) -> None:
    """Add the fields of a point's positive and negative buckets to its own."""
    columns = scanned.columns
    fine = ~scanned.is_malformed & ~scanned.is_noncanonical
    for sign in ("positive", "negative"):
        starts, ends = (np.where(fine, columns[name], 0) for name in (sign, f"{sign}_end"))
        inner = scan(data, starts, ends, _BUCKETS)
        columns.update({f"{sign}_{name}": column for name, column in inner.columns.items()})
        np.logical_or(scanned.is_malformed, inner.is_malformed, out=scanned.is_malformed)
        np.logical_or(scanned.is_noncanonical, inner.is_noncanonical, out=scanned.is_noncanonical)


def _normalised(body: bytes, request: int, account: Account) -> bytes:
    """The same request with its metrics as protobuf writes them; nothing if it cannot read one.

    Resources and scopes stay as they came: they tell streams apart, and say which process keeps them.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

    try:
        return as_request(
            (place.resource, place.scope, Metric.FromString(body[place.start : place.end]).SerializeToString())
            for place in walk(body)
        )
    except DecodeError as error:
        account.fail(request, f"not an ExportMetricsServiceRequest: {error}")
        return b""
