"""Events and OTLP bodies from RabbitMQ: acknowledged only when their points are safe."""

import json
import math
from pathlib import Path

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from pika import BasicProperties

from penstock.amqp import Message, Reject, Retry
from penstock.consume.consumer_options import WORKERS_PER_CPU, cpus_for_consumers
from penstock.decode.outcome import Format
from penstock.errors import BrokerError, ConfigError
from penstock.protobuf import field_bytes, field_double, field_varint
from penstock.receive import rabbitmq_receiver as module
from penstock.receive.config import BrokerTlsConfig, RabbitReceiverConfig
from penstock.receive.intake import Intake
from penstock.receive.rabbitmq_receiver import RabbitReceiver, intake_handler
from penstock.testing import wait_until
from tests.consume.conftest import Client, Consume, with_dead_letters
from tests.decode.support import exponential, histogram
from tests.receive.support import NOW, KeepingSink, counter, gauge, request

EVENT = json.dumps({"metric": "orders", "value": 2}).encode()
OTLP = request(gauge("cpu", 0.5)).SerializeToString()


def test_the_content_type_says_what_a_body_is(intake: Intake, sink: KeepingSink) -> None:
    messages = [
        Message(EVENT),
        Message(EVENT, properties=BasicProperties(content_type="application/json; charset=utf-8")),
        Message(OTLP, properties=BasicProperties(content_type="application/x-protobuf")),
    ]

    assert [intake_handler(intake)([message]) for message in messages] == [[None]] * 3

    assert sink.values("orders") == [2.0, 2.0]
    assert sink.values("cpu") == [0.5]


@pytest.mark.parametrize(
    "message",
    [
        Message(b"nonsense"),
        Message(b"nonsense", properties=BasicProperties(content_type="application/x-protobuf")),
        Message(EVENT, properties=BasicProperties(content_type="text/html")),
        Message(EVENT, properties=BasicProperties(content_encoding="rot13")),
    ],
)
def test_what_can_never_be_read_is_rejected_alone(intake: Intake, sink: KeepingSink, message: Message) -> None:
    answers = intake_handler(intake)([Message(EVENT), message, Message(EVENT)])
    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["NoneType", "Reject", "NoneType"]
    assert sink.values("orders") == [2.0, 2.0]


def test_a_message_of_which_no_event_is_taken_is_rejected_with_the_reason(intake: Intake, sink: KeepingSink) -> None:
    unprintable, long = {"metric": "a\0b", "value": 1}, {"metric": "a" * 100_000, "value": 1}
    bodies = [[unprintable], [unprintable, long], [long, {"metric": "orders", "value": 3}], []]
    messages = [Message(json.dumps(events).encode()) for events in bodies]

    answers = intake_handler(intake)([*messages, Message(EVENT)])

    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["Reject", "Reject", "NoneType", "NoneType", "NoneType"]
    assert "a metric's name must be printable" in str(answers[0])
    assert sink.values("orders") == [3.0, 2.0]


def refused_otlp() -> dict[str, tuple[Metric, str]]:
    """Metrics of which no point is taken, and why."""
    late, long = histogram(0, [1, 2, 3], 9.0), histogram(NOW, [1, 2], 9.0)
    vast, unscaled = histogram(NOW, [1 << 41, 0, 0], 9.0), exponential(NOW, [1], 1.0, scale=99)
    vast.histogram.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
    empty, summary = Metric(name="g"), Metric(name="s")
    empty.gauge.data_points.add(time_unix_nano=NOW)
    summary.summary.data_points.add(count=1, sum=2.0)
    return {
        "name": (gauge("", 1.0, 2.0), "a metric's name must have"),
        "time": (gauge("late", 1.0, time=0), "a point without a time"),
        "value": (empty, "a point without a value"),
        "cumulative": (counter("c", (NOW, math.nan)), "a cumulative value that is not a number"),
        "histogram": (late, "a point without a time"),
        "bounds": (long, "counts do not match its bounds"),
        "buckets": (vast, "counts more in a bucket"),
        "exponential": (unscaled, "unknown scale"),
        "summary": (summary, "a point without a time"),
    }


def otlp(*metrics: Metric) -> Message:
    body = request(*metrics).SerializeToString()
    return Message(body, properties=BasicProperties(content_type="application/x-protobuf"))


@pytest.mark.parametrize(("metric", "reason"), refused_otlp().values(), ids=list(refused_otlp()))
def test_a_message_of_which_no_point_is_taken_is_rejected_with_the_reason(
    intake: Intake, sink: KeepingSink, metric: Metric, reason: str
) -> None:
    good = gauge("cpu", 0.5)

    answers = intake_handler(intake)([otlp(good), otlp(metric), otlp(metric, good), otlp()])

    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["NoneType", "Reject", "NoneType", "NoneType"]
    assert reason in str(answers[1])
    assert sink.values("cpu") == [0.5, 0.5]


@pytest.mark.parametrize(
    "known", [counter("c", (NOW, 1.0)), histogram(NOW, [1, 2, 3], 9.0), exponential(NOW, [1], 1.0)]
)
def test_a_message_with_points_that_add_nothing_is_taken(intake: Intake, known: Metric) -> None:
    """They say from where their streams are measured, or have been counted."""
    handle = intake_handler(intake)

    assert handle([otlp(known, gauge("late", 1.0, time=0))] * 2) == [None, None]


def test_a_remote_write_of_which_no_sample_is_taken_is_rejected(intake: Intake, sink: KeepingSink) -> None:
    labels = field_bytes(1, field_bytes(1, b"__name__") + field_bytes(2, b"up"))
    native = field_bytes(1, labels + field_bytes(4, b""))
    good = field_bytes(1, labels + field_bytes(2, field_double(1, 1.0) + field_varint(2, NOW // 1_000_000)))

    answers = intake_handler(intake, Format.REMOTE_WRITE)([Message(native), Message(native + good)])

    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["Reject", "NoneType"]
    assert "native histograms are not taken" in str(answers[0])
    assert sink.values("up") == [1.0]


def test_what_the_relay_takes_is_not_rejected(sink: KeepingSink, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = KeepingSink()
    intake = Intake(sink, relay).start()
    refused = otlp(gauge("late", 1.0, time=0))

    assert intake_handler(intake)([refused]) == [None]
    assert relay.raw == [(Format.OTLP, refused.body)]
    monkeypatch.setattr(relay, "takes", lambda kind: False)
    (answer,) = intake_handler(intake)([refused]) or ()
    assert isinstance(answer, Reject)
    assert "without a time" in str(answer)
    assert len(relay.raw) == 1
    assert intake.close(10.0)


def test_no_room_is_not_the_messages_fault(intake: Intake, sink: KeepingSink) -> None:
    sink.refuses = True

    (answer,) = intake_handler(intake)([Message(EVENT)]) or ()

    assert isinstance(answer, Retry)
    assert not answer.counted


def test_messages_that_are_taken_in_part_fill_no_log(
    intake: Intake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("penstock.receive.rabbitmq_receiver.time.monotonic", lambda: now)
    body = request(gauge("cpu", 0.5), gauge("", 1.0), gauge("", 2.0)).SerializeToString()
    message = Message(body, properties=BasicProperties(content_type="application/x-protobuf"))
    handle = intake_handler(intake)
    for _ in range(5):
        assert handle([message, message]) == [None, None]
    now = 61.0
    handle([message])
    logged = [record.getMessage() for record in caplog.records if "in part" in record.getMessage()]
    assert [text.partition(" reason=")[0] for text in logged] == [
        "Messages were taken in part. messages=2 rejected=4",
        "Messages were taken in part. messages=9 rejected=18",
    ]


@pytest.mark.server
def test_nothing_is_acknowledged_before_its_points_are_safe(
    client: Client,
    queue: str,
    consume: Consume,
    intake: Intake,
    sink: KeepingSink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_DELAY", 0.01)
    sink.hold()
    declarations = with_dead_letters(queue)
    handler = intake_handler(intake)
    declarations.consumer(queue=queue, handler=handler, workers=2, max_attempts=1, batch_size=5, batch_timeout=0.05)
    registry = consume(declarations)
    refused = request(gauge("cpu", 0.5, time=0)).SerializeToString()
    client.publish(queue, *[EVENT] * 20, b"nonsense")
    client.publish(queue, refused, content_type="application/x-protobuf")
    wait_until(lambda: sink.held)

    assert registry.stats().consumers[queue].total("acked") == 0

    sink.release()
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 20)
    assert sum(sink.values("orders")) == 40
    wait_until(lambda: client.depth(f"{queue}.dead") == 2)
    assert sorted(client.take_all(f"{queue}.dead")) == sorted([b"nonsense", refused])


@pytest.mark.server
def test_several_queues_are_consumed_each_with_the_prefetch_that_is_set(
    client: Client, queue: str, shared_rabbitmq_url: str, intake: Intake, sink: KeepingSink
) -> None:
    queues = (queue, f"{queue}.second")
    config = RabbitReceiverConfig(url=shared_rabbitmq_url, queue=queues, declare=True, prefetch_count=7, batch_size=5)
    receiver = RabbitReceiver(config, intake).start()
    for name in queues:
        client.publish(name, EVENT, content_type="application/json")
    wait_until(lambda: sink.values("orders") == [2.0, 2.0])
    consumers = receiver._registry.stats().consumers
    assert {name: (one.prefetch, one.workers) for name, one in consumers.items()} == dict.fromkeys(
        queues, (7, WORKERS_PER_CPU * cpus_for_consumers())
    )
    receiver.close(10.0)


@pytest.mark.server
def test_a_broker_over_tls_is_consumed_with_the_certificates_that_the_configuration_names(
    client: Client, queue: str, tls_port: int, certificates: Path, intake: Intake, sink: KeepingSink
) -> None:
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    url = f"amqps://localhost:{tls_port}/"
    with pytest.raises(BrokerError, match="CERTIFICATE_VERIFY_FAILED"):
        RabbitReceiver(RabbitReceiverConfig(url=url, queue=(queue,)), intake).start()

    tls = BrokerTlsConfig(ca_file=cert, cert_file=cert, key_file=key)
    receiver = RabbitReceiver(RabbitReceiverConfig(url=url, queue=(queue,), declare=True, tls=tls), intake).start()
    client.publish(queue, EVENT, content_type="application/json")

    wait_until(lambda: sink.values("orders") == [2.0])
    receiver.close(10.0)
    assert client.depth(queue) == 0


def test_a_certificate_that_is_not_there_is_named_with_its_key(tmp_path: Path, intake: Intake) -> None:
    config = RabbitReceiverConfig(url="amqps://localhost/", tls=BrokerTlsConfig(ca_file=tmp_path / "absent.pem"))

    with pytest.raises(ConfigError, match=r"tls.ca_file must be a file that we can read, got '.*absent"):
        RabbitReceiver(config, intake)
