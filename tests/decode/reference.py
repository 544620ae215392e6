"""A plain reading of OTLP requests through protobuf's own objects: what the columns are compared with.

It knows deltas and gauges only; what becomes of cumulative streams has tests of its own.
"""

import base64
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.model.point import PointKind, entity_of

KEPT = ("service.namespace", "service.name", "deployment.environment.name", "host.name")
Series = tuple[str, PointKind, str, int]  # metric, kind, entity, time in microseconds


@dataclass
class Total:
    """What all rows of a series and time add up to."""

    count: int = 0
    sum: float = 0.0
    values: list[float] = field(default_factory=list)

    def add(self, count: int, value: float) -> None:
        self.count += count
        self.sum += value
        self.values.append(value)


def read(requests: Iterable[ExportMetricsServiceRequest]) -> dict[Series, Total]:
    """The totals of every series and time."""
    found: dict[Series, Total] = defaultdict(Total)
    for request in requests:
        for of_resource in request.resource_metrics:
            resource = labels(of_resource.resource.attributes)
            kept = {name: resource[name] for name in KEPT if name in resource}
            for of_scope in of_resource.scope_metrics:
                for metric in of_scope.metrics:
                    for series, count, value in _points(metric, kept):
                        found[series].add(count, value)
    return {series: total for series, total in found.items() if total.count}


def _points(metric: Metric, kept: dict[str, str]) -> Iterator[tuple[Series, int, float]]:
    data = metric.WhichOneof("data")
    if data is None:
        return
    for point in getattr(metric, data).data_points:
        if not point.time_unix_nano or point.flags & 1:
            continue
        entity = entity_of({**kept, **labels(point.attributes)})
        time = point.time_unix_nano // 1000
        if data in ("gauge", "sum"):
            kind = PointKind.COUNTER if data == "sum" else PointKind.GAUGE
            which = point.WhichOneof("value")
            if which is not None and math.isfinite(value := float(getattr(point, which))):
                yield (metric.name, kind, entity, time), 1, value
        elif data == "histogram":
            held = sum(point.bucket_counts) if point.bucket_counts else point.count
            yield (metric.name, PointKind.DISTRIBUTION, entity, time), held, point.sum if held else 0.0
        elif data == "exponential_histogram":
            held = point.zero_count + sum(point.positive.bucket_counts) + sum(point.negative.bucket_counts)
            yield (metric.name, PointKind.DISTRIBUTION, entity, time), held, point.sum if held else 0.0


def labels(attributes: Iterable[KeyValue]) -> dict[str, str]:
    return {attribute.key: _text(_plain(attribute.value)) for attribute in attributes}


def _plain(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_plain(part) for part in value.array_value.values]
        case "kvlist_value":
            return {part.key: _plain(part.value) for part in value.kvlist_value.values}
        case which:
            return getattr(value, which)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None:
        return ""
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_text)
    )
