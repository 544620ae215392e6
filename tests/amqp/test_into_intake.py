"""Events and OTLP bodies from RabbitMQ: acknowledged only when their points are safe."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pika import BasicProperties

from penstock.amqp import ConsumerRegistry, Message, Reject, Retry
from penstock.errors import BrokerError, ConfigError
from penstock.receive.amqp import into_intake as module
from penstock.receive.amqp.into_intake import batches_into_intake, into_intake
from penstock.receive.intake import Intake
from penstock.receive.rabbitmq import RabbitReceiver
from penstock.receive.rabbitmq_config import BrokerTlsConfig, RabbitReceiverConfig
from penstock.testing import wait_until
from tests.amqp.conftest import Client
from tests.amqp.test_consuming import with_dead_letters
from tests.receive.support import KeepingSink, gauge, request

EVENT = json.dumps({"metric": "orders", "value": 2}).encode()
OTLP = request(gauge("cpu", 0.5)).SerializeToString()


@pytest.fixture
def sink() -> KeepingSink:
    return KeepingSink()


@pytest.fixture
def intake(sink: KeepingSink) -> Iterator[Intake]:
    intake = Intake(sink).start()
    yield intake
    sink.release()
    assert intake.close(10.0)


def test_the_content_type_says_what_a_body_is(intake: Intake, sink: KeepingSink) -> None:
    handle = into_intake(intake)

    handle(Message(EVENT))
    handle(Message(EVENT, properties=BasicProperties(content_type="application/json; charset=utf-8")))
    handle(Message(OTLP, properties=BasicProperties(content_type="application/x-protobuf")))

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
    with pytest.raises(Reject):
        into_intake(intake)(message)
    answers = batches_into_intake(intake)([Message(EVENT), message, Message(EVENT)])
    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["NoneType", "Reject", "NoneType"]
    assert sink.values("orders") == [2.0, 2.0]


def test_a_message_of_which_no_event_is_taken_is_rejected_with_the_reason(intake: Intake, sink: KeepingSink) -> None:
    odd, long = {"metric": "a\0b", "value": 1}, {"metric": "a" * 100_000, "value": 1}
    bodies = [[odd], [odd, long], [long, {"metric": "orders", "value": 3}], []]
    messages = [Message(json.dumps(events).encode()) for events in bodies]

    answers = batches_into_intake(intake)([*messages, Message(EVENT)])

    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["Reject", "Reject", "NoneType", "NoneType", "NoneType"]
    assert "a metric's name must be printable" in str(answers[0])
    assert sink.values("orders") == [3.0, 2.0]


def test_no_room_is_not_the_messages_fault(intake: Intake, sink: KeepingSink) -> None:
    sink.refuses = True

    with pytest.raises(Retry) as retry:
        into_intake(intake)(Message(EVENT))
    assert not retry.value.counted


def test_messages_that_are_taken_in_part_fill_no_log(
    intake: Intake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("penstock.receive.amqp.into_intake.time.monotonic", lambda: now)
    body = request(gauge("cpu", 0.5), gauge("", 1.0), gauge("", 2.0)).SerializeToString()
    message = Message(body, properties=BasicProperties(content_type="application/x-protobuf"))
    handle = batches_into_intake(intake)
    for _ in range(5):
        assert handle([message, message]) == [None, None]
    now = 61.0
    handle([message])
    said = [record.getMessage() for record in caplog.records if "in part" in record.getMessage()]
    assert [text.partition(" reason=")[0] for text in said] == [
        "Messages were taken in part. messages=2 rejected=4",
        "Messages were taken in part. messages=9 rejected=18",
    ]


@pytest.mark.server
def test_nothing_is_acknowledged_before_its_points_are_safe(
    client: Client,
    queue: str,
    consume: Callable[..., ConsumerRegistry],
    intake: Intake,
    sink: KeepingSink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AGAIN", 0.01)
    sink.hold()
    declarations = with_dead_letters(queue)
    handler = batches_into_intake(intake)
    declarations.consumer(queue=queue, handler=handler, workers=2, max_attempts=1, batch_size=5, batch_timeout=0.05)
    registry = consume(declarations)
    client.publish(queue, *[EVENT] * 20, b"nonsense")
    wait_until(lambda: sink.held)

    assert registry.stats().consumers[queue].total("acked") == 0

    sink.release()
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 20)
    assert sum(sink.values("orders")) == 40
    wait_until(lambda: client.take_all(f"{queue}.dead") == [b"nonsense"])


@pytest.mark.server
def test_a_broker_over_tls_is_consumed_with_the_certificates_that_the_configuration_names(
    client: Client, queue: str, tls_port: int, certificates: Path, intake: Intake, sink: KeepingSink
) -> None:
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    url = f"amqps://localhost:{tls_port}/"
    with pytest.raises(BrokerError, match="CERTIFICATE_VERIFY_FAILED"):
        RabbitReceiver(RabbitReceiverConfig(url=url, queue=queue), intake).start()

    tls = BrokerTlsConfig(ca_file=cert, cert_file=cert, key_file=key)
    receiver = RabbitReceiver(RabbitReceiverConfig(url=url, queue=queue, declare=True, tls=tls), intake).start()
    client.publish(queue, EVENT, content_type="application/json")

    wait_until(lambda: sink.values("orders") == [2.0])
    receiver.close(10.0)
    assert client.depth(queue) == 0


def test_a_certificate_that_is_not_there_is_named_with_its_key(tmp_path: Path, intake: Intake) -> None:
    config = RabbitReceiverConfig(url="amqps://localhost/", tls=BrokerTlsConfig(ca_file=tmp_path / "absent.pem"))

    with pytest.raises(ConfigError, match=r"receivers.amqp.tls.ca_file must be a file that we can read, got '.*absent"):
        RabbitReceiver(config, intake)
