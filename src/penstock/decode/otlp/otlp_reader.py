"""OTLP metric requests into columns.

    request ─ resource ─ scope ─ metric ─ gauge, sum, … ─ points ─ value, time, attributes
    └──────── walked, one by one ───────────────────┘     └── scanned, all of a group at once

Thousands of points share a few hundred metrics, so walking down to them costs little; the points themselves are only
located, and then read as columns. A point's attributes stay serialised: they are the key of its series, decoded once.
A metric that comes again and only brings new numbers is not even scanned: see `shapes`.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.decode.column_scan import PADDING, Bytes, Ints, MessageLayout, Scanned, scan_body_columns
from penstock.decode.config import IntakeConfig
from penstock.decode.decode_context import DecodeContext, DecodeOutcomes
from penstock.decode.message_spans import ChildMessages, child_messages_in_bodies
from penstock.decode.metric_news import MetricNews
from penstock.decode.otlp.attributes import otlp_attributes
from penstock.decode.otlp.scanned_points import ScannedOtlpPoints
from penstock.decode.otlp.shapes import (
    OtlpPointColumns,
    OtlpShapeCache,
    ShapeHit,
    join_otlp_points,
    otlp_points_of_shapes,
)
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
    OtlpFamily,
    OtlpFieldBudget,
    OtlpMetricData,
    otlp_data_of_metric,
    walk_otlp_metrics,
)
from penstock.decode.outcome import PointRefusal, RefusedStreams
from penstock.decode.series import NO_STREAM, SeriesNamespace
from penstock.decode.series_description import SeriesDescription
from penstock.decode.stream_owners import otlp_request_of_parts
from penstock.model.point import PointKind

_ATTRIBUTES = 0x0A  # of a resource
_SHAPES_BYTES = 64 << 20  # those of some 200 000 streams
_NO_FAMILY = -1  # of a metric that another process owns

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
    varints={0x08: "offset"},
    spans={0x12: "counts"},
    noncanonical=frozenset({0x10}),  # counts that are not packed
)
_SUMMARY = MessageLayout(
    fixed={0x11: "start", 0x19: "time", 0x21: "count", 0x29: "sum"},
    repeated={0x3A: "attributes", 0x32: "quantiles"},
    varints={0x40: "flags"},
)
LAYOUTS = {SUM: _NUMBER, HISTOGRAM: _HISTOGRAM, EXPONENTIAL: _EXPONENTIAL, SUMMARY: _SUMMARY}


class _ReadMetrics(NamedTuple):
    """The points of metrics that were read field by field."""

    families: list[OtlpFamily]
    namespaces: list[SeriesNamespace]
    by_layout: dict[int, OtlpPointColumns]
    noncanonical: set[int]  # requests


class OtlpReader:
    """Finds the points of groups of requests, and remembers their families and shapes.

    Threads: one at a time.
    """

    def __init__(self, config: IntakeConfig, news: MetricNews | None = None) -> None:
        self._config = config
        self._news = news or MetricNews()
        self.namespaces: dict[OtlpFamily, SeriesNamespace] = {}
        self._fresh: list[OtlpFamily] = []
        self.shapes = OtlpShapeCache(_SHAPES_BYTES)

    def read(self, bodies: list[bytes], context: DecodeContext) -> list[tuple[int, ScannedOtlpPoints]]:
        """Returns the points of all readable bodies by layout: HISTOGRAM, EXPONENTIAL, SUMMARY, or SUM for numbers.

        What other processes own is not among them but in `context.parts`.
        """
        bodies = list(bodies)
        points, noncanonical = self._read(bodies, context)
        if noncanonical:
            for request in noncanonical:
                bodies[request] = _rewritten(bodies[request], request, context.outcomes)
            if context.parts is not None:
                context.parts.clear()
            points, noncanonical = self._read(bodies, context)
            for request in noncanonical:
                context.outcomes.fail(request, "a request that even protobuf does not write canonically")
            points = self._without(points, set(noncanonical))
        return points

    def _read(
        self, bodies: list[bytes], context: DecodeContext
    ) -> tuple[list[tuple[int, ScannedOtlpPoints]], list[int]]:
        """Returns points by layout, and the requests that protobuf has to rewrite first."""
        hits: list[ShapeHit] = []
        metrics: list[OtlpMetricData] = []
        base = 0
        for request, body in enumerate(bodies):
            before = len(hits), len(metrics)
            try:
                self._find(body, base, request, hits, metrics)
            except (ValueError, IndexError):
                context.outcomes.fail(request, "not an ExportMetricsServiceRequest")
                del hits[before[0] :], metrics[before[1] :]
            base += len(body)
        blob = b"".join([*bodies, PADDING])
        data = np.frombuffer(blob, np.uint8)
        read = self._scan(blob, data, metrics, context) if metrics else _ReadMetrics([], [], {}, set())
        by_number = {metric.number: metric for metric in metrics}
        hits_by_layout: dict[int, list[ShapeHit]] = {}
        for hit in hits:
            hits_by_layout.setdefault(hit.shape.layout, []).append(hit)
        found = []
        for layout in sorted({*hits_by_layout, *read.by_layout}):
            columns = read.by_layout.get(layout)
            if layout in hits_by_layout:
                known = otlp_points_of_shapes(hits_by_layout[layout], layout)
                columns = known if columns is None else join_otlp_points(known, columns, layout)
            assert columns is not None
            learn = partial(self.shapes.learn, layout, by_number)
            points = ScannedOtlpPoints(data, *columns[:4], read.families, read.namespaces, columns.family, learn)
            found.append((layout, points))
        failed = set(context.outcomes.errors)
        return self._without(found, failed), sorted(read.noncanonical - failed)

    def _find(self, body: bytes, base: int, request: int, hits: list[ShapeHit], metrics: list[OtlpMetricData]) -> None:
        """Sorts the metrics of one request into those of a known shape and the others."""
        data = np.frombuffer(body, np.uint8)
        budget = OtlpFieldBudget()
        for head, start, end in walk_otlp_metrics(body, budget):
            number = len(hits) + len(metrics)
            shape = self.shapes.find(head, body, data, start, end)
            if shape is not None:
                hits.append(ShapeHit(shape, base + start, request, number))
                continue
            name, kind, first, after = otlp_data_of_metric(body, start, end, budget, self._news)
            if kind:
                whole = base + start, base + end
                metrics.append(OtlpMetricData(head, name, kind, base + first, base + after, request, number, whole))

    def _scan(self, blob: bytes, data: Bytes, metrics: list[OtlpMetricData], context: DecodeContext) -> _ReadMetrics:
        """Reads the points of metrics that have no known shape."""
        request_of, layout_of, number_of = np.array([(m.request, m.layout, m.number) for m in metrics], np.int64).T
        children = child_messages_in_bodies(blob, ((metric.start, metric.end) for metric in metrics))
        for number in children.malformed:
            context.outcomes.fail(metrics[number].request, "points that are not messages")
        families, family_of = self._families(blob, metrics, children, context)
        by_layout: dict[int, OtlpPointColumns] = {}
        noncanonical: set[int] = set()
        is_ours = (family_of != _NO_FAMILY)[children.parent]
        layouts = layout_of[children.parent]
        for layout in np.unique(layouts[is_ours]).tolist():
            some = np.flatnonzero(is_ours & (layouts == layout))
            scanned = scan_body_columns(data, children.starts[some], children.ends[some], LAYOUTS[layout])
            if layout == EXPONENTIAL:
                _scan_buckets(data, scanned)
            metric = children.parent[some]
            requests = request_of[metric]
            for request in np.unique(requests[scanned.is_malformed]).tolist():
                context.outcomes.fail(request, "a data point that is not a message")
            noncanonical.update(np.unique(requests[scanned.is_noncanonical]).tolist())
            streams = np.full(len(some), NO_STREAM)
            by_layout[layout] = OtlpPointColumns(
                scanned.columns, requests, number_of[metric], streams, family_of[metric]
            )
        return _ReadMetrics(families, [self.namespace(family) for family in families], by_layout, noncanonical)

    def _families(
        self, blob: bytes, metrics: list[OtlpMetricData], children: ChildMessages, context: DecodeContext
    ) -> tuple[list[OtlpFamily], Ints]:
        """Returns the families of these metrics and the index of each metric's; puts aside what others own."""
        attributes_of = {(number, tag): value for number, tag, value in children.others}
        families: dict[OtlpFamily, int] = {}
        family_of = np.full(len(metrics), _NO_FAMILY)
        parts = context.parts
        points = None if parts is None else np.bincount(children.parent, minlength=len(metrics))
        for number, metric in enumerate(metrics):
            temporality = attributes_of.get((number, TEMPORALITY), 0)
            family = metric.family(temporality, attributes_of.get((number, IS_MONOTONIC), 0))
            if parts is not None and points is not None:
                owner = parts.owners.of_family(family)
                if context.is_foreign(owner, metric.request):
                    whole = blob[metric.whole[0] : metric.whole[1]]
                    parts.add_metric(owner, metric.request, family, whole, int(points[number]))
                    continue
            family_of[number] = families.setdefault(family, len(families))
        return list(families), family_of

    @staticmethod
    def _without(found: list[tuple[int, ScannedOtlpPoints]], failed: set[int]) -> list[tuple[int, ScannedOtlpPoints]]:
        if not failed:
            return found
        some = np.array(sorted(failed))
        return [(layout, points.take(~np.isin(points.requests, some))) for layout, points in found]

    def forget(self, streams: Ints, capacity: int) -> None:
        """Forgets the shapes of these streams, and those that have not come for a while."""
        gone = np.zeros(capacity, bool)
        gone[streams] = True
        self.shapes.sweep(gone)

    def namespace(self, family: OtlpFamily) -> SeriesNamespace:
        """Returns the keys of that family's points."""
        known = self.namespaces.get(family)
        if known is None:
            known = self.namespaces[family] = SeriesNamespace(_FamilyDescriber(family, self._config), family)
            self._fresh.append(family)
        return known

    def forget_unused(self) -> None:
        """Forgets the last group's new families of which nothing was taken: there may be any number of them."""
        for family in self._fresh:
            if not self.namespaces[family].keys:
                del self.namespaces[family]
        self._fresh = []


class _FamilyDescriber:
    """Says what the keys of one family mean."""

    def __init__(self, family: OtlpFamily, config: IntakeConfig) -> None:
        self._family = family
        self._nesting = config.max_nesting
        self._kept = config.resource_attributes
        self._longest = config.longest_labels
        self._resource: dict[str, str] | None = None

    def __call__(self, key: bytes) -> SeriesDescription:
        family = self._family
        if self._resource is None:
            if (size := len(family.resource) + len(family.scope)) > self._longest:
                raise RefusedStreams(
                    PointRefusal.LABELS, f"a resource of {size} bytes, at most {self._longest} are taken"
                )
            found = otlp_attributes(family.resource, self._nesting, tag=_ATTRIBUTES)
            self._resource = {name: found[name] for name in self._kept if name in found}
        kind, is_cumulative = _kind(family)
        try:
            name = family.name.decode()
        except UnicodeDecodeError as error:
            raise RefusedStreams(PointRefusal.MALFORMED, f"a metric's name that is no text: {error}") from None
        return SeriesDescription(name, kind, is_cumulative, {**self._resource, **otlp_attributes(key, self._nesting)})


def _kind(family: OtlpFamily) -> tuple[PointKind, bool]:
    if family.data == GAUGE:
        return PointKind.GAUGE, False
    if family.temporality not in (DELTA, CUMULATIVE):
        raise RefusedStreams(
            PointRefusal.MALFORMED,
            f"metric {family.name[:100].decode(errors='replace')!r} does not say whether it is delta or cumulative",
        )
    is_cumulative = family.temporality == CUMULATIVE
    if family.data != SUM:
        return PointKind.DISTRIBUTION, is_cumulative
    if is_cumulative and not family.is_monotonic:
        return PointKind.GAUGE, False  # an amount that is there now, not one that was added
    return PointKind.COUNTER, is_cumulative


def _scan_buckets(data: Bytes, scanned: Scanned) -> None:
    """Adds the fields of a point's positive and negative buckets to its own."""
    columns = scanned.columns
    is_fine = ~scanned.is_malformed & ~scanned.is_noncanonical
    for sign in ("positive", "negative"):
        starts, ends = (np.where(is_fine, columns[name], 0) for name in (sign, f"{sign}_end"))
        inner = scan_body_columns(data, starts, ends, _BUCKETS)
        columns.update({f"{sign}_{name}": column for name, column in inner.columns.items()})
        np.logical_or(scanned.is_malformed, inner.is_malformed, out=scanned.is_malformed)
        np.logical_or(scanned.is_noncanonical, inner.is_noncanonical, out=scanned.is_noncanonical)


def _rewritten(body: bytes, request: int, outcomes: DecodeOutcomes) -> bytes:
    """Returns the request with its metrics as protobuf writes them; empty if protobuf cannot read one.

    Resources and scopes stay as they came: they identify streams and their owners.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

    try:
        return otlp_request_of_parts(
            (resource, scope, Metric.FromString(body[start:end]).SerializeToString())
            for (resource, scope, _), start, end in walk_otlp_metrics(body)
        )
    except DecodeError as error:
        outcomes.fail(request, f"not an ExportMetricsServiceRequest: {error}")
        return b""
