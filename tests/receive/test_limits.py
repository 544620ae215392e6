"""What one sender can make us hold, whatever it sends."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoder
from penstock.decode.outcome import Format, PointRefusal
from penstock.decode.series import OVERFLOW
from penstock.errors import ConfigError
from penstock.receive.config import AuthConfig, HttpLimits, HttpReceiverConfig
from penstock.testing import FakeClock
from tests.decode.support import CUMULATIVE, DELTA, decode, decoder, exponential, histogram, sample
from tests.receive.support import NOW, SECOND, counter, gauge, request


def entities(using: Decoder, *labels: str) -> list[str]:
    decoded = decode(request(*(gauge("m", 1.0, a=label) for label in labels), resource={}), using=using)
    return [entity for chunk in decoded.chunks for entity in chunk.points["entity"].to_pylist()]


def test_series_beyond_the_limit_are_added_up_in_one_and_counted() -> None:
    using = decoder(max_series_per_metric=2)

    found = entities(using, "1", "2", "3", "4", "1")

    assert found == ['{"a":"1"}', '{"a":"2"}', OVERFLOW, OVERFLOW, '{"a":"1"}']
    assert sample(using, "penstock_receive_overflowed_total") == 2
    assert sample(using, "penstock_receive_series") == 3


def test_counters_in_the_overflow_are_still_counted_each_for_itself() -> None:
    using = decoder(max_series_per_metric=1)
    for step, values in enumerate([(1, 10, 100), (2, 11, 101)], 1):
        metrics = [
            counter("c", (NOW + step * SECOND, float(value)), start=NOW, a=str(place))
            for place, value in enumerate(values)
        ]
        (chunk,) = decode(request(*metrics, resource={}), using=using).chunks
    assert chunk.points["value"].to_pylist() == [1.0, 1.0, 1.0]
    assert chunk.points["entity"].to_pylist() == ['{"a":"0"}', OVERFLOW, OVERFLOW]


@pytest.mark.parametrize(
    ("config", "metrics", "reason"),
    [
        ({"max_labels": 2}, [gauge("m", 1.0, a="1", b="2", c="3")], PointRefusal.LABELS),
        ({"max_label_name": 5}, [gauge("m", 1.0, longer="1")], PointRefusal.LABELS),
        ({"max_label_value": 5}, [gauge("m", 1.0, a="longer")], PointRefusal.LABELS),
        ({"max_label_name": 5}, [gauge("longer", 1.0)], PointRefusal.LABELS),
        ({}, [gauge("", 1.0)], PointRefusal.LABELS),
        ({}, [gauge("with\0zero", 1.0)], PointRefusal.LABELS),
        ({"max_metrics": 1}, [gauge("other", 1.0)], PointRefusal.METRICS),
        ({"max_streams": 1}, [gauge("m", 1.0, a="1")], PointRefusal.STREAMS),
        ({"max_future": 10}, [gauge("m", 1.0, time=NOW + 11 * SECOND)], PointRefusal.TIME),
    ],
)
def test_points_beyond_a_limit_are_refused_with_the_reason(
    config: dict[str, int], metrics: list[Metric], reason: PointRefusal
) -> None:
    using = decoder(**config)
    decode(request(gauge("m", 1.0), resource={}), using=using)

    decoded = decode(request(*metrics, gauge("m", 2.0), resource={}), using=using)

    assert decoded.outcomes.reasons == {reason: 1}
    assert decoded.outcomes.rejected.tolist() == [1]
    assert [chunk.points["value"].to_pylist() for chunk in decoded.chunks] == [[2.0]]


def one_bound(time: int, counts: list[int], **options: Any) -> Metric:
    return histogram(time, counts, bounds=(0.0,), **options)


@pytest.mark.parametrize("kind", [one_bound, exponential])
@pytest.mark.parametrize("count", [2**40, 2**62, 2**63, 2**64 - 1])
def test_a_histogram_that_counts_more_than_can_be_added_up_is_refused(kind: Callable[..., Metric], count: int) -> None:
    for temporality in (DELTA, CUMULATIVE):
        using = decoder()
        decoded = decode(
            request(kind(NOW + SECOND, [1, count], temporality=temporality), gauge("m", 2.0), resource={}), using=using
        )
        assert decoded.outcomes.reasons == {PointRefusal.MALFORMED: 1}
        assert decoded.outcomes.rejected.tolist() == [1]
        assert [chunk.points["value"].to_pylist() for chunk in decoded.chunks] == [[2.0]]


@pytest.mark.parametrize("kind", [one_bound, exponential])
def test_a_cumulative_histogram_may_have_counted_for_ages(kind: Callable[..., Metric]) -> None:
    using = decoder(initial_value="drop")
    decode(request(kind(NOW + SECOND, [1, 2**50]), resource={}), using=using)
    decoded = decode(request(kind(NOW + 2 * SECOND, [3, 2**50 + 5]), resource={}), using=using)
    assert decoded.outcomes.reasons == {}
    assert [sum(chunk.points["count"].to_pylist()) for chunk in decoded.chunks] == [7]


def test_a_series_that_was_silent_for_long_is_forgotten_and_its_place_is_free() -> None:
    clock = FakeClock(NOW / SECOND)
    using = Decoder(IntakeConfig(expiry=60, max_streams=2), clock)

    def send(name: str, value: float, time: int) -> list[float]:
        body = request(counter("c", (time, value), start=1, a=name)).SerializeToString()
        return [v for chunk in using.decode(Format.OTLP, [body]).chunks for v in chunk.points["value"].to_pylist()]

    send("old", 1.0, NOW)
    send("kept", 1.0, NOW)
    clock.advance(50)
    assert send("kept", 2.0, NOW + SECOND) == [1.0]
    clock.advance(50)

    assert using.expire() == 1
    assert send("new", 1.0, NOW + 2 * SECOND) == []
    assert send("new", 5.0, NOW + 3 * SECOND) == [4.0]
    assert send("kept", 5.0, NOW + 3 * SECOND) == [3.0]
    assert sample(using, "penstock_receive_streams") == 2


def test_metrics_whose_series_have_expired_make_room_for_others() -> None:
    clock = FakeClock(NOW / SECOND)
    using = Decoder(IntakeConfig(expiry=60, max_metrics=2), clock)
    decode(request(gauge("old", 1.0), gauge("older", 1.0)), using=using)
    assert decode(request(gauge("new", 1.0)), using=using).outcomes.reasons == {PointRefusal.METRICS: 1}
    clock.advance(100)
    using.expire()
    assert sample(using, "penstock_receive_metrics") == 0

    decoded = decode(request(gauge("new", 2.0), gauge("old", 3.0)), using=using)

    assert {chunk.metric: chunk.points["value"].to_pylist() for chunk in decoded.chunks} == {"new": [2.0], "old": [3.0]}
    assert sample(using, "penstock_receive_metrics") == 2


def test_one_series_in_a_thousand_spellings_is_remembered_in_a_few() -> None:
    using = decoder()
    for place in range(1000):
        labels: Any = {f"l{number}": "1" for number in random.Random(place).sample(range(20), 20)}
        decode(request(gauge("m", 1.0, **labels)), using=using)
    (namespace,) = using._otlp.namespaces.values()
    assert len(namespace.keys) <= 8
    assert sample(using, "penstock_receive_streams") == 1


def test_labels_that_are_long_because_of_what_nobody_reads_are_refused() -> None:
    using = decoder(max_labels=2, max_label_name=10, max_label_value=10)
    many: Any = {f"l{place}": "1" for place in range(10)}
    for made in (gauge("m", 1.0, a="1", b="x" * 100), gauge("m", 1.0, **many)):
        assert decode(request(made, resource={}), using=using).outcomes.reasons == {PointRefusal.LABELS: 1}
    resource = {f"r{place}": "1" for place in range(10)}
    decoded = decode(request(gauge("m", 1.0), resource=resource), using=using)
    assert decoded.outcomes.reasons == {PointRefusal.LABELS: 1}
    assert not using._otlp.namespaces


def test_a_metrics_name_fits_into_every_table_however_long_a_labels_may_be() -> None:
    using = decoder(max_label_name=100_000)
    decoded = decode(request(gauge("m" * 512, 1.0), gauge("m" * 513, 2.0), resource={}), using=using)
    assert decoded.outcomes.reasons == {PointRefusal.LABELS: 1}
    assert [chunk.metric for chunk in decoded.chunks] == ["m" * 512]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HttpLimits(max_body=10), "limits.max_body must be >= 1024 bytes, got 10"),
        (lambda: HttpLimits(read_timeout=0), "limits.read_timeout must be > 0, got 0"),
        (lambda: HttpLimits(max_connections=0), "limits.max_connections must be a whole number >= 1, got 0"),
        (lambda: IntakeConfig(max_streams=-1), "intake.max_streams must be a whole number >= 1, got -1"),
        (lambda: IntakeConfig(expiry="5s"), "intake.expiry must be >= 60 s, got 5"),
        (lambda: IntakeConfig(initial_value=cast(Any, "maybe")), "initial_value must be one of auto, keep, drop, got"),
        (lambda: HttpReceiverConfig(port=70000), "port must be within 0 and 65535, got 70000"),
        (lambda: HttpReceiverConfig(host="0.0.0.0"), "listen '0.0.0.0:4318' is open to the network: set tls"),
        (lambda: HttpReceiverConfig(otlp_path="v1"), "otlp_path must start with /"),
        (lambda: AuthConfig(), "auth must have token_file or token_env"),
        (lambda: AuthConfig(token_env="NO_SUCH_TOKEN").tokens(), "auth has no token in \\$NO_SUCH_TOKEN"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
