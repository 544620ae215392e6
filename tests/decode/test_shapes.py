"""Shapes: a metric that is known by its bytes is read as if it were not."""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.otlp import otlp_reader as otlp
from penstock.decode.outcome import Format
from penstock.testing import FakeClock
from tests.decode.support import CUMULATIVE, decoder, sample
from tests.decode.test_otlp import requests
from tests.examples import examples
from tests.receive.support import NOW, SECOND, attribute, counter, gauge, request


def forgetful(**config: Any) -> Decoder:
    """One that knows no shapes."""
    with patch.object(otlp, "_SHAPES_BYTES", 0):
        return decoder(**config)


def shapes_of(using: Decoder) -> int:
    return int(sample(using, "penstock_receive_shapes"))


def everything_of(decoded: Decoded) -> tuple[Any, ...]:
    """Returns all that a decoder finds in a group."""
    rows = [
        (chunk.metric, chunk.kind.value, *(repr(value) for value in row.values()))
        for chunk in decoded.chunks
        for row in chunk.points.to_pylist()
    ]
    outcomes = decoded.outcomes
    messages = {request: sorted(texts) for request, texts in outcomes.messages.items()}
    return sorted(rows), outcomes.errors, outcomes.rejected.tolist(), messages


def everything(step: int, rng: random.Random, routes: Sequence[str] = ("a", "b", "cc")) -> ExportMetricsServiceRequest:
    """A request with a metric of every kind, at that many seconds."""
    time, metrics = NOW + step * SECOND, []
    for kind in ("gauge", "counter", "level", "histogram", "delta", "exponential", "summary"):
        metric = Metric(name=kind)
        for route in routes:
            point = _point(metric, kind, step, rng)
            point.time_unix_nano, point.start_time_unix_nano = time, NOW
            point.attributes.append(attribute("route", route))
        metrics.append(metric)
    return request(*metrics)


def _point(metric: Metric, kind: str, step: int, rng: random.Random) -> Any:
    match kind:
        case "gauge":
            return metric.gauge.data_points.add(as_double=rng.random())
        case "counter" | "level":
            metric.sum.aggregation_temporality, metric.sum.is_monotonic = CUMULATIVE, kind == "counter"
            return metric.sum.data_points.add(as_int=rng.choice([step * 10, 1, -5 if kind == "level" else 0]))
        case "histogram" | "delta":
            metric.histogram.aggregation_temporality = CUMULATIVE if kind == "histogram" else 1  # type: ignore[assignment]
            counts = [step * rng.randrange(3) for _ in range(3)]
            point = metric.histogram.data_points.add(count=sum(counts), sum=rng.random(), min=0.0, max=9.0)
            point.bucket_counts.extend(counts)
            point.explicit_bounds.extend([1.0, 5.0])
            return point
        case "exponential":
            metric.exponential_histogram.aggregation_temporality = 1  # type: ignore[assignment]
            histogram = metric.exponential_histogram.data_points.add(sum=rng.random(), scale=rng.choice([3, 3, 4]))
            histogram.positive.bucket_counts.extend(rng.choice([0, 1, 100, 200]) for _ in range(3))
            return histogram
    summary = metric.summary.data_points.add(count=step * rng.choice([1, 1, 1 << 55]), sum=step * rng.choice([0, 2.0]))
    for quantile in (0.5, 0.99):
        summary.quantile_values.add(quantile=quantile, value=rng.choice([0.0, 1.0, 2.0]))
    return summary


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_come_again_with_new_numbers_say_the_same_as_if_they_were_new(seed: int) -> None:
    rng = random.Random(seed)
    knowing, other = decoder(), forgetful()
    for step in range(1, 12):
        routes = ["a", "b", "cc"] if rng.random() < 0.7 else rng.sample(["a", "b", "cc", "d"], 3)
        bodies = [everything(2 * step + half, rng, routes).SerializeToString() for half in (0, 1)]
        assert everything_of(knowing.decode(Format.OTLP, bodies)) == everything_of(other.decode(Format.OTLP, bodies))
    assert shapes_of(knowing) > 7
    assert shapes_of(other) == 0


@settings(max_examples=examples(40))
@given(requests(), st.randoms(use_true_random=False))
def test_whichever_bytes_change_a_known_metric_is_read_as_if_it_were_not(
    made: ExportMetricsServiceRequest, rng: random.Random
) -> None:
    made.MergeFrom(everything(1, rng))
    body = made.SerializeToString()
    knowing, other = decoder(), forgetful()
    for using in (knowing, other):
        using.decode(Format.OTLP, [body])
    for _ in range(3):
        changed = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        bodies = [bytes(changed), body, bytes(changed)]
        assert everything_of(knowing.decode(Format.OTLP, bodies)) == everything_of(other.decode(Format.OTLP, bodies))


def test_the_same_metric_of_another_sender_is_not_taken_for_the_first_ones() -> None:
    using = decoder()
    for _ in range(2):
        for service in ("shop", "mail"):
            body = request(gauge("cpu", 1.0), resource={"service.name": service}).SerializeToString()
            (chunk,) = using.decode(Format.OTLP, [body]).chunks
            assert chunk.points["entity"].to_pylist() == [f'{{"service.name":"{service}"}}']


@pytest.mark.parametrize(
    "change",
    [
        lambda metric: setattr(metric, "unit", "2"),
        lambda metric: metric.gauge.data_points[1].attributes[0].value.__setattr__("string_value", "y"),
        lambda metric: setattr(metric.gauge.data_points[0], "flags", 2),
    ],
)
def test_a_metric_of_the_same_length_that_means_something_else_is_another(change: Callable[[Metric], object]) -> None:
    using, other = decoder(), forgetful()
    metric = gauge("cpu", 1.0, unit="x")
    metric.unit = "1"
    metric.gauge.data_points.add(time_unix_nano=NOW, as_double=2.0).attributes.append(attribute("unit", "x"))
    for _ in range(2):
        using.decode(Format.OTLP, [request(metric).SerializeToString()])
    change(metric)
    body = request(metric).SerializeToString()

    assert everything_of(using.decode(Format.OTLP, [body])) == everything_of(other.decode(Format.OTLP, [body]))


def test_known_and_unknown_requests_of_one_group_keep_their_order() -> None:
    using = decoder()
    body = [
        request(counter("c", (NOW + 1 * SECOND, 10.0), start=NOW)),
        request(counter("c", (NOW + 2 * SECOND, 15.0), start=NOW, unit="other"), counter("d")),
        request(counter("c", (NOW + 3 * SECOND, 100.0), start=NOW), scope="other"),
        request(counter("c", (NOW + 3 * SECOND, 2.0), start=NOW)),
        request(counter("c", (NOW + 2 * SECOND, 30.0), start=NOW), counter("c", (NOW + 4 * SECOND, 3.0), start=NOW)),
    ]
    using.decode(Format.OTLP, [body[0].SerializeToString()])
    decoded = using.decode(Format.OTLP, [one.SerializeToString() for one in body[1:]])

    shop = [
        row["value"] for chunk in decoded.chunks for row in chunk.points.to_pylist() if "other" not in row["entity"]
    ]
    assert sorted(shop) == [1.0, 2.0, 20.0, 100.0]  # 30 after 10, the reset to 2, 3 after 2, and the other scope's


def test_a_metric_without_points_between_others_mixes_nothing_up() -> None:
    using, other, rng = decoder(), forgetful(), random.Random(1)
    for step in range(1, 4):
        metrics = everything(step, rng).resource_metrics[0].scope_metrics[0].metrics
        empty = [Metric(name=f"empty{number}") for number in range(len(metrics))]
        bodies = [
            request(*(metric for pair in zip(empty, metrics) for metric in pair), Metric()).SerializeToString(),
            everything(step, rng, ["x"]).SerializeToString(),
        ]
        assert everything_of(using.decode(Format.OTLP, bodies)) == everything_of(other.decode(Format.OTLP, bodies))


def test_points_without_a_time_are_refused_though_their_shape_is_known() -> None:
    using = decoder()
    body = request(gauge("cpu", 1.0, 2.0)).SerializeToString()
    using.decode(Format.OTLP, [body])
    late = body.replace(struct.pack("<Q", NOW), struct.pack("<Q", NOW * 2), 1)
    decoded = using.decode(Format.OTLP, [late, body])

    assert decoded.outcomes.rejected.tolist() == [1, 0]
    assert sum(map(len, decoded.chunks)) == 3


def test_shapes_of_streams_that_are_forgotten_are_forgotten_with_them() -> None:
    clock = FakeClock(NOW / SECOND)
    using = Decoder(IntakeConfig(expiry=100.0), clock)
    old, new = (request(gauge("cpu", 1.0, host=host)).SerializeToString() for host in ("old", "new"))
    using.decode(Format.OTLP, [old])
    clock.advance(60)
    using.decode(Format.OTLP, [new])
    clock.advance(60)

    assert using.expire() == 1
    assert shapes_of(using) == 1
    for body, host in ((request(gauge("cpu", 1.0, host="third")).SerializeToString(), "third"), (old, "old")):
        (chunk,) = using.decode(Format.OTLP, [body]).chunks  # the first of them has the number that is free again
        assert chunk.points["entity"].to_pylist() == [f'{{"host":"{host}","service.name":"shop"}}']


def test_a_sender_that_shuffles_its_series_costs_few_shapes() -> None:
    using, rng = decoder(), random.Random(1)
    for _ in range(100):
        hosts = rng.sample(range(100, 200), 20)
        points = [gauge("cpu", 1.0, host=host) for host in hosts]
        for more in points[1:]:
            points[0].gauge.data_points.extend(more.gauge.data_points)
        using.decode(Format.OTLP, [request(points[0]).SerializeToString()])

    assert shapes_of(using) <= 10


def test_shapes_are_bounded_and_make_room_for_those_that_are_needed() -> None:
    with patch.object(otlp, "_SHAPES_BYTES", 20_000):
        using = decoder()
    old, new = (
        [request(gauge("cpu", 1.0, host=f"{age}{n}")).SerializeToString() for n in range(100)] for age in ("old", "new")
    )
    for bodies in (old, new, new):
        for body in bodies:
            using.decode(Format.OTLP, [body])
    before = shapes_of(using)
    for _ in range(12):  # nothing was needed in all that time
        using.expire()

    assert before < 25
    assert shapes_of(using) == 0
    using.decode(Format.OTLP, new)
    assert 0 < shapes_of(using) < 25


def test_what_a_shape_says_of_its_sender_counts_too() -> None:
    with patch.object(otlp, "_SHAPES_BYTES", 20_000):
        using = decoder()
    for number in range(5):
        resource = {"service.name": "shop", "long": str(number) * 15_000}
        using.decode(Format.OTLP, [request(gauge("cpu", 1.0), resource=resource).SerializeToString()])

    assert shapes_of(using) == 2


def test_one_metric_has_no_more_shapes_than_can_be_compared() -> None:
    using = decoder()
    bodies = [request(gauge("cpu", 1.0, host=f"{n:04}", long="z" * 300)).SerializeToString() for n in range(600)]
    for start in range(0, 600, 4):
        for _ in range(2):  # the second time each is of use
            using.decode(Format.OTLP, bodies[start : start + 4])

    assert 250 <= shapes_of(using) <= 260
