"""To a real RabbitMQ, killed and restarted in the middle: every confirmed message arrives."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from penstock.errors import ConfigError, ErrorClass, MissingRequirement, PayloadTooLarge, TransientExportError
from penstock.export import BreakerConfig, SendQueue
from penstock.export.classify import of_exception
from penstock.export.exporters import amqp_exporter as amqp
from penstock.export.exporters.amqp_exporter import AmqpConfig, AmqpExporter
from penstock.export.http_client import TlsConfig
from penstock.spool import FastQueue
from penstock.testing import wait_until
from tests.conftest import missing
from tests.export.quick import dead_letters, numbered, push_all, quick
from tests.servers import RabbitMQ

pytestmark = pytest.mark.server


def declare(broker: RabbitMQ, queue: str, **arguments: object) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        connection.channel().queue_declare(queue, durable=True, arguments=arguments)


def received(broker: RabbitMQ, queue: str) -> list[tuple[bytes, pika.BasicProperties]]:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        found = []
        while (message := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found.append((message[2], message[1]))
        return found


def exporter(broker: RabbitMQ, queue: str) -> AmqpExporter:
    return AmqpExporter(AmqpConfig(url=broker.url, routing_key=queue, message_type="otlp.metrics"))


def test_batches_arrive_persistent_and_with_their_type(shared_rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    declare(shared_rabbitmq, "sent")
    with (
        FastQueue(tmp_path / "queue") as queue,
        SendQueue(queue, exporter(shared_rabbitmq, "sent"), quick(workers=3)) as sender,
    ):
        push_all(sender, numbered(200))
        wait_until(lambda: not len(sender))
    found = received(shared_rabbitmq, "sent")
    assert sorted(body for body, _ in found) == numbered(200)
    assert {(p.type, p.delivery_mode, p.content_type) for _, p in found} == {
        ("otlp.metrics", 2, "application/x-protobuf")
    }


def test_a_message_that_no_queue_takes_is_a_failure_until_one_does(shared_rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    client = exporter(shared_rabbitmq, "unrouted")
    with pytest.raises(TransientExportError, match="no queue takes") as caught:
        client.send(client.prepare(b"x"))
    assert caught.value.error_class is ErrorClass.CLIENT_ERROR
    declare(shared_rabbitmq, "unrouted")
    assert client.send(client.prepare(b"x")) is None
    client.close()


def test_a_queue_that_refuses_nacks_and_that_is_a_server_error(shared_rabbitmq: RabbitMQ) -> None:
    declare(shared_rabbitmq, "small", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    client = exporter(shared_rabbitmq, "small")
    client.send(client.prepare(b"1"))
    with pytest.raises(TransientExportError, match="could not keep") as caught:
        client.send(client.prepare(b"2"))
    assert caught.value.error_class is ErrorClass.SERVER_ERROR
    client.close()


def test_a_wrong_password_and_an_unknown_exchange_say_so(shared_rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong\n")
    config = AmqpConfig(url=shared_rabbitmq.url, routing_key="sent", password_file=tmp_path / "password")
    client = AmqpExporter(config)
    with pytest.raises(TransientExportError) as caught:
        client.send(client.prepare(b"x"))
    assert caught.value.error_class is ErrorClass.AUTH
    lost = AmqpExporter(AmqpConfig(url=shared_rabbitmq.url, exchange="no such", routing_key="x"))
    with pytest.raises(TransientExportError, match="404") as caught:
        lost.send(lost.prepare(b"x"))
    assert caught.value.error_class is ErrorClass.CLIENT_ERROR


def test_a_broker_that_is_not_there_is_a_network_error() -> None:
    client = AmqpExporter(AmqpConfig(url="amqp://127.0.0.1:1/", routing_key="x"))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the send queue classifies what it is
        client.send(client.prepare(b"x"))
    assert of_exception(caught.value).error_class is ErrorClass.NETWORK


def test_a_broker_that_does_not_answer_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://127.0.0.1:{silent.getsockname()[1]}/?stack_timeout=0.2"
        client = AmqpExporter(AmqpConfig(url=url, routing_key="x"))
        with pytest.raises(TransientExportError, match="did not answer") as caught:
            client.send(client.prepare(b"x"))
    assert caught.value.error_class is ErrorClass.TIMEOUT


def test_a_closed_exporter_sends_nothing(shared_rabbitmq: RabbitMQ) -> None:
    client = exporter(shared_rabbitmq, "sent")
    client.close()
    with pytest.raises(ConnectionAbortedError):
        client.send(client.prepare(b"x"))


class Forwarder:
    """A way to the broker on which, from `hang` on, no answer comes back; it can hang up on clients."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._hangs = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"amqp://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hang(self) -> None:
        self._hangs.set()

    def hang_up(self) -> None:
        """Say nothing more to the clients of now. What they still send reaches the broker, as if it had been first."""
        for client in self._clients:
            client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            self._clients.append(client)
            broker = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._copy, args=(client, broker, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(broker, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, can_hang: bool) -> None:
        with source:
            try:
                while part := source.recv(65536):
                    if not (can_hang and self._hangs.is_set()):
                        target.sendall(part)
            except OSError:
                pass


def test_a_send_that_hangs_is_cut_off_by_close(shared_rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    declare(shared_rabbitmq, "hangs")
    forwarder = Forwarder(pika.URLParameters(shared_rabbitmq.url).port)
    client = AmqpExporter(AmqpConfig(url=forwarder.url, routing_key="hangs"))
    with FastQueue(tmp_path / "queue") as queue:
        sender = SendQueue(queue, client, quick(workers=1)).start()
        sender.push(b"first")
        assert sender.flush(10)
        forwarder.hang()
        sender.push(b"second")
        wait_until(lambda: sender.stats().sends_inflight == 1)
        assert sender.close(1.0) == []
        assert len(queue) == 1
    forwarder.close()


def everything_arrives(broker: RabbitMQ, folder: Path, restart: Callable[[], object]) -> None:
    """Send while the broker is restarted in the middle: every message is there afterwards."""
    declare(broker, "survives")
    config = quick(workers=3, circuit_breaker=BreakerConfig(reset_timeout=0.3), retry_interval=0.1, max_retry_delay=0.3)
    sent = numbered(100)
    with (
        FastQueue(folder / "queue") as queue,
        SendQueue(queue, exporter(broker, "survives"), config) as sender,
    ):
        for batch in sent:
            sender.push(batch)
        wait_until(lambda: sender.stats().exported_batches > 50)
        restarting = threading.Thread(target=restart)
        restarting.start()
        while restarting.is_alive():
            restarting.join(0.05)
            sent.append(b"batch %06d" % len(sent))
            sender.push(sent[-1])
        assert sender.flush(60)
        stats = sender.stats()
    arrived = [body for body, _ in received(broker, "survives")]
    assert set(arrived) == set(sent)
    assert len(arrived) - len(sent) <= 3  # those that were under way when it went down
    assert stats.errors["network"] + stats.errors["timeout"] > 0
    assert stats.queue.dead_lettered == 0


def test_every_message_arrives_although_the_broker_restarts_in_the_middle(
    shared_rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    everything_arrives(
        shared_rabbitmq,
        tmp_path,
        lambda: shared_rabbitmq.ctl("eval", "rabbit:stop(), timer:sleep(500), rabbit:start()."),
    )


@pytest.mark.soak
def test_every_message_arrives_although_the_broker_is_killed_in_the_middle(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    def kill_and_start() -> None:
        rabbitmq.kill()
        rabbitmq.start()

    everything_arrives(rabbitmq, tmp_path, kill_and_start)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://x", "routing_key": "q"}, "url must look like"),
        ({"url": "amqp://x", "routing_key": "q", "tls": TlsConfig()}, "tls is set"),
        ({"url": "amqp://x"}, "routing_key must name a queue"),
        ({"url": "amqp://x:port", "routing_key": "q"}, "url must look like"),
        ({"url": "amqp://user:12#den@host/", "routing_key": "q"}, "%23"),
        ({"url": "amqp://x", "routing_key": "q", "password_file": "no/such"}, "password_file must name a file"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AmqpConfig(**settings)  # type: ignore[arg-type]


def test_the_configuration_shows_no_password() -> None:
    assert "hidden" not in repr(AmqpConfig(url="amqp://user:hidden@host/", routing_key="x"))


def test_an_error_about_the_url_shows_no_part_of_a_password() -> None:
    with pytest.raises(ConfigError) as caught:
        AmqpConfig(url="amqp://user:hid#den@host/", routing_key="x")
    assert "hid" not in str(caught.value)
    assert "den" not in str(caught.value)


def test_the_user_may_come_from_the_url_and_the_password_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret/#@\n")
    config = AmqpConfig(url="amqp://m%40x@host:5673/v", routing_key="q", password_file=tmp_path / "password")
    parameters = config.parameters()
    assert (parameters.credentials.username, parameters.credentials.password) == ("m@x", "s3cret/#@")
    assert (parameters.host, parameters.port, parameters.virtual_host) == ("host", 5673, "v")


@pytest.fixture
def small_rabbitmq(tmp_path: Path) -> Iterator[RabbitMQ]:
    """One that takes no message of more than 1000 bytes."""
    try:
        broker = RabbitMQ(tmp_path / "rabbitmq")
    except MissingRequirement as error:
        missing(error)
    with open(broker.folder / "rabbitmq.conf", "a") as settings:
        settings.write("max_message_size = 1000\n")
    with broker:
        yield broker


def test_a_message_above_the_brokers_limit_is_a_dead_letter_and_the_others_arrive(
    small_rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    declare(small_rabbitmq, "fits")
    with (
        FastQueue(tmp_path / "queue") as queue,
        SendQueue(queue, exporter(small_rabbitmq, "fits"), quick(workers=1)) as sender,
    ):
        for size in (999, 1001, 1000):
            sender.push(bytes(size))
        assert sender.flush(30)
    assert [len(body) for body, _ in received(small_rabbitmq, "fits")] == [999, 1000]
    ((letter, reason),) = dead_letters(tmp_path)
    assert len(letter) == 1001
    assert reason.startswith("406 PRECONDITION_FAILED")


def refusing(code: int) -> Callable[..., None]:
    """A publish to which the broker answers by closing the channel."""

    def publish(*_: Any, **__: Any) -> None:
        raise ChannelClosedByBroker(code, "no")

    return publish


def test_content_too_large_is_too_large(shared_rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockingChannel, "basic_publish", refusing(311))  # RabbitMQ says 406, others go by the book
    client = exporter(shared_rabbitmq, "sent")
    with pytest.raises(PayloadTooLarge, match="311 no"):
        client.send(client.prepare(b"x"))
    client.close()


def test_a_user_who_may_not_publish_and_a_vhost_that_is_not_there_are_matters_of_authorisation(
    shared_rabbitmq: RabbitMQ,
) -> None:
    shared_rabbitmq.ctl("add_user", "reader", "secret")
    shared_rabbitmq.ctl("set_permissions", "reader", "", "", ".*")  # to configure, to write, to read
    reader = shared_rabbitmq.url.replace("guest:guest@", "reader:secret@")
    for url, message in ((reader, "403 ACCESS_REFUSED"), (f"{shared_rabbitmq.url}no-such", "AccessDenied")):
        client = AmqpExporter(AmqpConfig(url=url, exchange="amq.topic", routing_key="x"))
        with pytest.raises(TransientExportError, match=message) as caught:
            client.send(client.prepare(b"x"))
        assert caught.value.error_class is ErrorClass.AUTH
        client.close()


def test_a_broker_short_of_memory_is_waited_for_and_then_a_server_error(
    shared_rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp, "_BLOCKED", 0.1)
    declare(shared_rabbitmq, "short")
    client = exporter(shared_rabbitmq, "short")
    shared_rabbitmq.ctl("set_vm_memory_high_watermark", "0")
    try:
        with pytest.raises(TransientExportError, match="short of memory or disk") as caught:
            client.send(client.prepare(b"x"))
    finally:
        shared_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
    assert caught.value.error_class is ErrorClass.SERVER_ERROR
    assert client.send(client.prepare(b"x")) is None
    client.close()


def test_a_connection_that_was_ended_while_idle_is_replaced_before_anything_is_sent_on_it(
    shared_rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp, "_IDLE", -1.0)  # whatever the time since it was used
    declare(shared_rabbitmq, "idle")
    forwarder = Forwarder(shared_rabbitmq.port)
    client = AmqpExporter(AmqpConfig(url=forwarder.url, routing_key="idle"))
    client.send(client.prepare(b"first"))
    forwarder.hang_up()
    assert client.send(client.prepare(b"second")) is None
    assert [body for body, _ in received(shared_rabbitmq, "idle")] == [b"first", b"second"]
    client.close()
    forwarder.close()


def test_a_dead_broker_and_one_short_of_memory_are_noticed_whatever_the_url_says() -> None:
    parameters = AmqpConfig(url="amqp://host/?heartbeat=0&blocked_connection_timeout=999", routing_key="q").parameters()
    assert (parameters.heartbeat, parameters.blocked_connection_timeout) == (30, 30.0)


def test_certificates_of_the_configuration_are_those_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ssl.create_default_context()
    monkeypatch.setattr(TlsConfig, "context", lambda _: made)
    parameters = AmqpConfig(url="amqps://broker.example/", routing_key="q", tls=TlsConfig()).parameters()
    assert parameters.ssl_options is not None
    assert parameters.ssl_options.context is made
    assert parameters.ssl_options.server_hostname == "broker.example"
