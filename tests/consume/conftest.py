"""A queue of its own for every test, filled and emptied over a plain client."""

import itertools
import os
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from penstock.amqp import BackoffPolicy, ConsumerRegistry, DeadLetters, Declarations
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.consume.proxy import Proxy
from tests.receive.fixtures import intake, sink
from tests.servers import RabbitMQ

__all__ = ["intake", "sink"]

_numbers = itertools.count(1)
_OPTIONS = "?heartbeat=0&blocked_connection_timeout=60"  # else a broker with an alarm is waited for for ever


Consume = Callable[..., ConsumerRegistry]
AT_ONCE = BackoffPolicy(first=0.05, limit=0.2)
SOON = BackoffPolicy(first=0.01, limit=0.02)


def with_dead_letters(queue: str, **settings: Any) -> Declarations:
    """A queue whose dead letters go to a queue of their own."""
    declarations = Declarations()
    declarations.queue(f"{queue}.dead")
    declarations.queue(queue, dead_letter=DeadLetters(exchange="", routing_key=f"{queue}.dead"), **settings)
    return declarations


class Client:
    """A plain blocking client: what a test knows about the broker, it knows through this."""

    def __init__(self, url: str) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(url + _OPTIONS))
        self.channel = self._connection.channel()
        self.channel.confirm_delivery()

    def publish(
        self, queue: str, *bodies: bytes, event_type: str | None = None, exchange: str = "", **properties: Any
    ) -> None:
        wanted = pika.BasicProperties(type=event_type, delivery_mode=2, **properties)
        for body in bodies:
            self.channel.basic_publish(exchange, queue, body, wanted)

    def publish_unconfirmed(self, queue: str, bodies: list[bytes]) -> None:
        """Many messages, without waiting for each: fast, on a channel of its own."""
        channel = self._connection.channel()
        for body in bodies:
            channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
        channel.close()

    def depth(self, queue: str) -> int:
        """The messages that no consumer holds."""
        count: int = self.channel.queue_declare(queue, passive=True).method.message_count
        return count

    def consumers(self, queue: str) -> int:
        count: int = self.channel.queue_declare(queue, passive=True).method.consumer_count
        return count

    def take(self, queue: str) -> tuple[bytes, pika.BasicProperties] | None:
        method, properties, body = self.channel.basic_get(queue, auto_ack=True)
        return None if method is None else (body, properties)

    def take_all(self, queue: str) -> list[bytes]:
        taken = []
        while (message := self.take(queue)) is not None:
            taken.append(message[0])
        return taken

    def dead_letter(self, queue: str) -> tuple[bytes, pika.BasicProperties]:
        """The next dead letter of the queue."""
        wait_until(lambda: self.depth(f"{queue}.dead") > 0)
        letter = self.take(f"{queue}.dead")
        assert letter is not None
        return letter

    def close(self) -> None:
        if self._connection.is_open:
            self._connection.close()


@pytest.fixture
def client(shared_rabbitmq: RabbitMQ) -> Iterator[Client]:
    client = Client(shared_rabbitmq.url)
    yield client
    client.close()


@pytest.fixture
def queue() -> str:
    """A queue's name that no other test uses."""
    return f"q{os.getpid()}.{next(_numbers)}"


@pytest.fixture
def consume(shared_rabbitmq: RabbitMQ, queue: str) -> Iterator[Consume]:
    """Start a registry with these declarations, or with a consumer of these options for the test's own queue.

    It is stopped when the test ends.
    """
    started: list[ConsumerRegistry] = []

    def start(
        declarations: Declarations | None = None,
        *,
        url: str = shared_rabbitmq.url,
        reconnect: BackoffPolicy = AT_ONCE,
        telemetry: Telemetry | None = None,
        kind: str = "classic",
        **options: Any,
    ) -> ConsumerRegistry:
        if declarations is None:
            declarations = with_dead_letters(queue, kind=kind)
            declarations.consumer(queue=queue, **options)
        registry = ConsumerRegistry(url, declarations, reconnect=reconnect, telemetry=telemetry)
        registry.start()
        started.append(registry)
        return registry

    yield start
    for registry in started:
        registry.stop(2.0)


@pytest.fixture
def network(shared_rabbitmq: RabbitMQ) -> Iterator[Proxy]:
    """A network between consumer and broker, to be named before `consume`, which then ends first."""
    with Proxy(shared_rabbitmq.port) as proxy:
        yield proxy


@pytest.fixture
def shared_rabbitmq_url(shared_rabbitmq: RabbitMQ) -> str:
    return shared_rabbitmq.url


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def tls_port(shared_rabbitmq: RabbitMQ, certificates: Path) -> Iterator[int]:
    """The broker over TLS, for clients that show a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "cert.pem"))
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with Proxy(shared_rabbitmq.port, context) as proxy:
        yield proxy.port
