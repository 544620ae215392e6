"""Requests for the ingest benchmark: 1 000 points each, of every kind, over a given number of series.

A request is made once, with marks in place of its times and counts, and filled in again and again: so time goes on and
counters grow, and making the load costs next to nothing.
"""

import random
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import cramjam
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from penstock.decode.otlp.walk import OtlpFieldBudget, otlp_data_of_metric, walk_otlp_metrics
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.protobuf import fields

POINTS = 1000
METRICS = 20
SERVICES = 5
SENDERS = 40
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
BOUNDS = [5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0]
# What an instrumented service sends: mostly numbers, a few histograms, and something old.
KINDS = ["gauge"] * 7 + ["counter"] * 5 + ["delta"] * 2 + ["level"] + ["histogram"] * 3 + ["exponential", "summary"]

_TIME, _START = 0x5151515151510000, 0x5252525252520000  # of the nth point of a series in one request: + n
_COUNTS = {factor: 0x5353535353530000 + factor for factor in (1, 2, 4, 9)}  # so many times the count
_SUM = -1.2345678901234567e200
_MILLIS = 0x15151515151  # as many bytes as a real one, as a varint
_POINT = 0x0A  # the tag of a point in every kind of data
_STEP = 1_000_000  # nanoseconds between two points of a series in one request


def otlp_requests(
    series: int, *, shuffled: bool = False, kinds: Sequence[str] = KINDS, temporality: int = CUMULATIVE
) -> list[Callable[[int, int], bytes]]:
    """As many requests as it takes to touch every series; each takes the time in nanoseconds and a count.

    There are at least `SENDERS` of them: where few touch all series, several instances of a service send the same ones.
    Their counters are streams of their own, and add up in the series of the service. `shuffled` ones have the points of
    each metric in another order every time. `temporality` is that of counters and histograms.
    """
    per_metric = max(1, series // METRICS // SERVICES)
    in_one = POINTS // METRICS
    rounds = max(1, per_metric // in_one)
    instances = max(1, SENDERS // (rounds * SERVICES))
    return [
        _otlp(service, instance, first * in_one, per_metric, kinds, temporality, shuffled=shuffled)
        for instance in range(instances)
        for first in range(rounds)
        for service in range(SERVICES)
    ]


def _otlp(
    service: int, instance: int, first: int, per_metric: int, kinds: Sequence[str], temporality: int, *, shuffled: bool
) -> Callable[[int, int], bytes]:
    rng = random.Random(service)
    request = ExportMetricsServiceRequest()
    of_resource = request.resource_metrics.add()
    whose = {"service.name": f"service-{service}", "service.instance.id": str(instance), "telemetry.sdk.language": "go"}
    of_resource.resource.attributes.extend(_label(*pair) for pair in whose.items())
    of_scope = of_resource.scope_metrics.add()
    of_scope.scope.name = "bench"
    in_one = POINTS // METRICS
    for number, kind in enumerate(kinds):
        metric = of_scope.metrics.add(name=f"app.{kind}.{number}", unit="1")
        for place in range(first, first + in_one):
            point = _point(metric, kind, temporality, rng)
            point.time_unix_nano = _TIME + (place - first) // per_metric
            point.start_time_unix_nano = _START
            point.attributes.append(_label("http.route", f"/api/v1/things/{place % per_metric}"))
            point.attributes.append(_label("http.response.status_code", "200"))
    template = bytes(request.SerializeToString())
    pieces = _points_apart(template)

    def fill(now: int, count: int) -> bytes:
        body = _in_any_order(pieces, rng) if shuffled else template
        body = body.replace(struct.pack("<Q", _START), struct.pack("<Q", now - count * 1_000_000_000))
        for factor, mark in _COUNTS.items():
            body = body.replace(struct.pack("<Q", mark), struct.pack("<Q", factor * count))
        for place in range(-(-in_one // per_metric)):
            body = body.replace(struct.pack("<Q", _TIME + place), struct.pack("<Q", now + place * _STEP))
        return body.replace(struct.pack("<d", _SUM), struct.pack("<d", 60.0 * 9 * count))

    return fill


def _points_apart(body: bytes) -> list[tuple[bytes, list[bytes]]]:
    """What stands before the points of each metric, and those; in the end the rest."""
    found, done = [], 0
    for _, begin, stop in walk_otlp_metrics(body):
        _, _, first, last = otlp_data_of_metric(body, begin, stop, OtlpFieldBudget())
        ends = [end for tag, _, end in fields(body, first, last) if tag == _POINT]
        found.append((body[done:first], [body[start:end] for start, end in pairwise([first, *ends])]))
        done = ends[-1]
    return [*found, (body[done:], [])]


def _in_any_order(pieces: list[tuple[bytes, list[bytes]]], rng: random.Random) -> bytes:
    for _, points in pieces:
        rng.shuffle(points)
    return b"".join(part for before, points in pieces for part in (before, *points))


def _point(metric: Any, kind: str, temporality: int, rng: random.Random) -> Any:
    if kind == "gauge":
        return metric.gauge.data_points.add(as_double=rng.random())
    if kind in ("counter", "delta", "level"):
        metric.sum.aggregation_temporality = DELTA if kind == "delta" else temporality
        metric.sum.is_monotonic = kind != "level"
        return metric.sum.data_points.add(as_int=_COUNTS[1])
    if kind == "histogram":
        metric.histogram.aggregation_temporality = temporality
        point = metric.histogram.data_points.add(count=_COUNTS[9], sum=_SUM, min=12.0, max=800.0)
        point.bucket_counts.extend([0, 0, *(_COUNTS[factor] for factor in (1, 4, 2, 1)), 0, 0, _COUNTS[1], 0, 0])
        point.explicit_bounds.extend(BOUNDS)
        return point
    if kind == "exponential":
        metric.exponential_histogram.aggregation_temporality = DELTA
        point = metric.exponential_histogram.data_points.add(count=40, sum=2000.0, scale=4, min=20.0, max=100.0)
        point.positive.offset = 68
        point.positive.bucket_counts.extend([2] * 20)
        return point
    point = metric.summary.data_points.add(count=_COUNTS[1], sum=_SUM)
    for quantile in (0.5, 0.9, 0.99):
        point.quantile_values.add(quantile=quantile, value=rng.random())
    return point


def _label(name: str, value: str) -> KeyValue:
    return KeyValue(key=name, value=AnyValue(string_value=value))


def remote_writes(series: int) -> list[Callable[[int, int], bytes]]:
    """The same for remote writes, compressed."""
    per_metric = max(1, series // METRICS)
    in_one = POINTS // METRICS
    return [_remote_write(first * in_one, per_metric) for first in range(max(1, per_metric // in_one))]


def _remote_write(first: int, per_metric: int) -> Callable[[int, int], bytes]:
    in_one = POINTS // METRICS
    series = []
    for number in range(METRICS):
        name = f"app_requests_{number}_total" if number % 2 else f"app_level_{number}"
        for place in range(first, first + in_one):
            labels = {
                "__name__": name,
                "job": "bench",
                "instance": f"10.0.0.{place % SERVICES}:9090",
                "route": f"/api/v1/things/{place % per_metric}",
                "status": "200",
            }
            series.append((labels, [(_MILLIS + (place - first) // per_metric, _SUM)]))
    template = write_request(series)

    def fill(now: int, count: int) -> bytes:
        body = template.replace(struct.pack("<d", _SUM), struct.pack("<d", float(count)))
        for place in range(-(-in_one // per_metric)):
            body = body.replace(_varint(_MILLIS + place), _varint(now // 1_000_000 + place))
        return bytes(cramjam.snappy.compress_raw(body))

    return fill


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
