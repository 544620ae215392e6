"""OTLP into columns: the same as protobuf's own objects say, for any request."""

import random
import struct
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.decoder import Decoded
from penstock.decode.outcome import Format
from penstock.model.point import Chunk, PointKind
from penstock.protobuf import field_bytes, field_varint
from tests.decode import reference
from tests.decode.reference import Series, Total
from tests.decode.support import DELTA, decode, decoder
from tests.examples import examples
from tests.receive.support import NOW, SECOND, attribute, counter, gauge, request

names = st.sampled_from(["cpu", "memory", "größe"])
numbers = st.floats(-1e9, 1e9)
times = st.sampled_from([0, 1, NOW, NOW + SECOND])


def totals(chunks: list[Chunk]) -> dict[Series, Total]:
    found: dict[Series, Total] = defaultdict(Total)
    for chunk in chunks:
        for row in chunk.points.to_pylist():
            micros = int(row["time"].timestamp()) * 1_000_000 + row["time"].microsecond
            total = found[chunk.metric, chunk.kind, row["entity"], micros]
            total.add(row.get("count", 1), row.get("sum", row["value"]))
    return dict(found)


@st.composite
def any_values(draw: st.DrawFn, nesting: int = 2) -> AnyValue:
    plain = [
        st.builds(AnyValue, string_value=st.text(max_size=5)),
        st.builds(AnyValue, bool_value=st.booleans()),
        st.builds(AnyValue, int_value=st.integers(-(2**63), 2**63 - 1)),
        st.builds(AnyValue, double_value=st.floats(allow_nan=False, allow_infinity=False)),
        st.builds(AnyValue, bytes_value=st.binary(max_size=5)),
        st.just(AnyValue()),
    ]
    if nesting:
        inner = any_values(nesting - 1)
        pairs = st.builds(KeyValue, key=st.text(max_size=3), value=inner)
        plain += [
            st.builds(AnyValue, array_value=st.builds(ArrayValue, values=st.lists(inner, max_size=3))),
            st.builds(AnyValue, kvlist_value=st.builds(KeyValueList, values=st.lists(pairs, max_size=3))),
        ]
    return draw(st.one_of(plain))


@st.composite
def metrics(draw: st.DrawFn) -> Metric:
    metric = Metric(name=draw(names), unit=draw(st.sampled_from(["", "1", "ms"])))
    data = draw(st.sampled_from(["gauge", "sum", "histogram", "exponential_histogram", None]))
    if data is None:
        return metric
    of = getattr(metric, data)
    if data != "gauge":
        of.aggregation_temporality = DELTA
    for _ in range(draw(st.integers(0, 4))):
        point = of.data_points.add(time_unix_nano=draw(times), flags=draw(st.sampled_from([0, 0, 0, 1])))
        pairs = st.builds(KeyValue, key=st.text(max_size=4), value=any_values())
        point.attributes.extend(draw(st.lists(pairs, max_size=3)))
        if draw(st.booleans()):
            point.start_time_unix_nano = 1
        _fill(draw, data, point)
    return metric


def _fill(draw: st.DrawFn, data: str, point: Any) -> None:
    counts = st.lists(st.integers(0, 300), min_size=1, max_size=20)
    if data in ("gauge", "sum"):
        match draw(st.sampled_from(["double", "double", "int", "none"])):
            case "double":
                point.as_double = draw(numbers)
            case "int":
                point.as_int = draw(st.integers(-(2**53), 2**53))
        return
    point.sum = draw(numbers)
    if data == "histogram":
        if draw(st.booleans()):
            held = draw(counts)
            bounds = draw(st.lists(numbers, min_size=len(held) - 1, max_size=len(held) - 1, unique=True))
            point.bucket_counts.extend(held)
            point.explicit_bounds.extend(sorted(bounds))
            point.count = sum(held)
        else:
            point.count = draw(st.integers(0, 300))
    else:
        point.scale = draw(st.integers(-10, 20))
        for side in (point.positive, point.negative):
            if draw(st.booleans()):
                side.offset = draw(st.integers(-20, 20))
                side.bucket_counts.extend(draw(counts))
        point.zero_count = draw(st.integers(0, 5))
        point.count = point.zero_count + sum(point.positive.bucket_counts) + sum(point.negative.bucket_counts)


@st.composite
def requests(draw: st.DrawFn) -> ExportMetricsServiceRequest:
    made = ExportMetricsServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        of_resource = made.resource_metrics.add()
        for name in draw(st.lists(st.sampled_from(["service.name", "host.name", "other"]), unique=True)):
            of_resource.resource.attributes.append(KeyValue(key=name, value=draw(any_values())))
        for _ in range(draw(st.integers(0, 2))):
            of_scope = of_resource.scope_metrics.add(schema_url=draw(st.sampled_from(["", "https://example.org"])))
            of_scope.scope.name = draw(st.sampled_from(["", "a", "b"]))
            of_scope.metrics.extend(draw(st.lists(metrics(), max_size=3)))
    return made


@settings(max_examples=examples(40))
@given(st.lists(requests(), max_size=3))
def test_the_columns_are_what_protobufs_own_objects_say(made: list[ExportMetricsServiceRequest]) -> None:
    decoded = decode(*made)
    found, expected = totals(decoded.chunks), reference.read(made)

    assert not decoded.outcomes.errors
    assert {series: total.count for series, total in found.items()} == {
        series: total.count for series, total in expected.items()
    }
    for series, total in expected.items():
        if series[1] is not PointKind.DISTRIBUTION:
            assert sorted(found[series].values) == pytest.approx(sorted(total.values))
        else:
            assert found[series].sum == pytest.approx(total.sum, rel=1e-6, abs=1e-3)


@settings(max_examples=examples(40))
@given(requests(), st.randoms(use_true_random=False))
def test_a_damaged_request_is_refused_alone_or_read(made: ExportMetricsServiceRequest, rng: random.Random) -> None:
    whole = request(gauge("good", 1.0)).SerializeToString()
    damaged = bytearray(made.SerializeToString())
    for _ in range(min(3, len(damaged))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)

    decoded = decoder().decode(Format.OTLP, [whole, bytes(damaged), whole])

    assert {0, 2}.isdisjoint(decoded.outcomes.errors)
    assert sum(len(chunk) for chunk in decoded.chunks if chunk.metric == "good" and chunk.kind is PointKind.GAUGE) >= 2


def body_of(point: bytes, field: int = 5, more: bytes = b"") -> bytes:
    """A request with one metric `m` that has this point; `field` is that of its data, 5 a gauge."""
    metric = field_bytes(1, b"m") + field_bytes(field, field_bytes(1, point) + more)
    return field_bytes(1, field_bytes(2, field_bytes(2, metric)))


def rows(decoded: Decoded) -> list[dict[str, Any]]:
    assert not decoded.outcomes.errors
    return [row for chunk in decoded.chunks for row in chunk.points.to_pylist()]


def test_attributes_in_two_places_are_read_all_the_same() -> None:
    first, second = (field_bytes(7, attribute(name, "1").SerializeToString()) for name in ("a", "b"))
    time, value = b"\x19" + struct.pack("<Q", NOW), b"\x21" + struct.pack("<d", 2.5)

    (row,) = rows(decoder().decode(Format.OTLP, [body_of(first + time + second + value)]))

    assert (row["entity"], row["value"]) == ('{"a":"1","b":"1"}', 2.5)


def test_counts_that_are_not_packed_are_read_all_the_same() -> None:
    counts = b"".join(b"\x31" + struct.pack("<Q", count) for count in (1, 2))
    point = b"\x19" + struct.pack("<Q", NOW) + counts + b"\x39" + struct.pack("<d", 10.0)
    exponential = b"\x19" + struct.pack("<Q", NOW) + field_bytes(8, field_varint(2, 3) + field_varint(2, 4))

    explicit = rows(decoder().decode(Format.OTLP, [body_of(point, 9, field_varint(2, 1))]))
    counted = rows(decoder().decode(Format.OTLP, [body_of(exponential, 10, field_varint(2, 1))]))

    assert [row["count"] for row in explicit] == [1, 2]
    assert [row["count"] for row in counted] == [3, 4]


def test_unknown_fields_of_any_kind_are_passed_over() -> None:
    unknown = b"\x82\x01\x03abc" + b"\x88\x01\x96\x01" + b"\x91\x01" + bytes(8) + b"\x9d\x01" + bytes(4)
    point = unknown + b"\x19" + struct.pack("<Q", NOW) + unknown + b"\x21" + struct.pack("<d", 2.5)

    assert [row["value"] for row in rows(decoder().decode(Format.OTLP, [body_of(point)]))] == [2.5]


def test_a_summary_becomes_what_prometheus_makes_of_it() -> None:
    using = decoder()
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for step, count in enumerate((10, 15), 1):
        metric = Metric(name="s")
        point = metric.summary.data_points.add(
            time_unix_nano=NOW + step * SECOND, start_time_unix_nano=NOW, count=count, sum=2.0 * count
        )
        point.quantile_values.add(quantile=0.5, value=1.0)
        point.quantile_values.add(quantile=0.99, value=3.0)
        for chunk in decode(request(gauge("other", 1.0), metric, resource={}), using=using).chunks:
            pairs = zip(chunk.points["entity"].to_pylist(), chunk.points["value"].to_pylist())
            found[f"{chunk.metric} {chunk.kind.value}"] += pairs
    quantiles = [('{"quantile":"0.5"}', 1.0), ('{"quantile":"0.99"}', 3.0)]

    assert found["s_count counter"] == [("{}", 10.0), ("{}", 5.0)]
    assert found["s_sum counter"] == [("{}", 20.0), ("{}", 10.0)]
    assert found["s gauge"] == quantiles * 2


def test_a_quantile_and_a_value_of_zero_are_zero_whatever_the_request_begins_with() -> None:
    """Protobuf leaves zeros out. What stands in for them is made of the first bytes, which here are an infinity."""
    metric = Metric(name="s")
    metric.summary.data_points.add(time_unix_nano=NOW, count=1, sum=1.0).quantile_values.add()
    begin = b"\x79" + bytes(5) + b"\xf0\x7f" + bytes(1)  # an unknown field

    decoded = decoder().decode(Format.OTLP, [begin + request(metric, resource={}).SerializeToString()])

    (gauges,) = [chunk for chunk in decoded.chunks if chunk.kind is PointKind.GAUGE]
    assert gauges.points["entity"].to_pylist() == ['{"quantile":"0.0"}']
    assert gauges.points["value"].to_pylist() == [0.0]


def test_a_sum_that_does_not_say_what_it_is_is_refused() -> None:
    decoded = decode(request(counter("c", (NOW, 1.0), temporality=0), gauge("g", 1.0)))

    assert decoded.outcomes.rejected.tolist() == [1]
    assert "delta or cumulative" in decoded.outcomes.messages[0][0]
    assert [chunk.metric for chunk in decoded.chunks] == ["g"]


def test_a_level_that_may_fall_is_a_gauge() -> None:
    (chunk,) = decode(request(counter("c", (NOW, 7.0), is_monotonic=False))).chunks

    assert (chunk.kind, chunk.points["value"].to_pylist()) == (PointKind.GAUGE, [7.0])


@pytest.mark.parametrize("points", [1, 7, 60, 200])
def test_few_and_many_metrics_are_found_alike(points: int) -> None:
    made = [request(*(gauge(f"m{number}", *map(float, range(points))) for number in range(60)))]

    using = decoder()
    for _ in range(2):  # the second time their runs are known
        decoded = decode(*made, using=using)
        assert {tuple(chunk.points["value"].to_pylist()) for chunk in decoded.chunks} == {
            tuple(map(float, range(points)))
        }
        assert len(decoded.chunks) == 60
