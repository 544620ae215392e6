"""Addresses, credentials, TLS, and a start that fails with the reason."""

import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.amqp import ConsumerRegistry, Declarations, Message, Tls
from penstock.broker import Broker
from penstock.errors import BrokerError, ConfigError
from penstock.testing import wait_until
from tests.consume.conftest import Client, Consume
from tests.servers import RabbitMQ, free_port


def handle(message: Message) -> None: ...


def consuming(queue: str, **settings: Any) -> Declarations:
    declarations = Declarations()
    declarations.queue(queue, **settings)
    declarations.consumer(queue=queue, handler=handle, workers=2)
    return declarations


@pytest.mark.parametrize(
    ("url", "mistake"),
    [
        *((url, "url must look like") for url in ("http://host/", "host:5672", "amqp://", "")),
        *((f"amqp://me:12{sign}34@host/", "as %2F %3F %23 and %40") for sign in "#/?"),
        *((url, "url") for url in ("amqp://me:s3cret#@host", "amqp://[me:s3cret@host", "amqp://me:s3cret@host:port/")),
        ("amqp://me:s3cret@host/?heartbeat=soon", r"url amqp://host/: an option after \? makes no sense"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_its_password_not_quoted(url: str, mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake) as error:
        Broker(url)

    for secret in ("s3cret", "12"):
        assert secret not in str(error.value)
        assert error.value.__suppress_context__ or secret not in repr(error.value.__context__)


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tls.ca_file .*absent.pem"):
        Tls(ca_file=str(tmp_path / "absent.pem")).context()
    with pytest.raises(OSError, match=r"tls.cert_file .*absent.pem"):
        Tls(cert_file=str(tmp_path / "absent.pem")).context()


def test_an_empty_secret_is_not_replaced_by_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("\n")

    with pytest.raises(ConfigError, match="password is empty"):
        Broker("amqp://host/", password_file=str(tmp_path / "password")).parameters()


def test_the_brokers_own_tools_show_the_connected_process() -> None:
    named = Broker("amqp://host/").parameters("retries").client_properties or {}

    assert named["connection_name"].startswith("penstock retries ")


def test_certificates_need_an_address_with_tls() -> None:
    with pytest.raises(ConfigError, match="the url says amqp://"):
        Broker("amqp://host/", tls=Tls())


def test_the_text_of_an_address_holds_no_secret() -> None:
    broker = Broker("amqp://me:s3cret@host:5671/vhost?heartbeat=5")

    assert str(broker) == "amqp://host:5671/vhost"
    assert "s3cret" not in repr(broker)


def test_credentials_are_read_from_files_at_each_connect(tmp_path: Path) -> None:
    (tmp_path / "user").write_text("me\n")
    (tmp_path / "password").write_text("first\n")
    broker = Broker("amqp://host/", str(tmp_path / "user"), str(tmp_path / "password"))

    assert (broker.parameters().credentials.username, broker.parameters().credentials.password) == ("me", "first")
    (tmp_path / "password").write_text("rotated\n")
    assert broker.parameters().credentials.password == "rotated"
    of_both = Broker("amqp://m%40e:p%2Fw@host/", password_file=str(tmp_path / "password")).parameters().credentials
    assert (of_both.username, of_both.password) == ("m@e", "rotated")
    assert Broker("amqp://m%40e:p%2Fw@host/").parameters().credentials.password == "p/w"


def test_without_the_client_library_the_import_says_how_to_get_it() -> None:
    program = (
        "import importlib.util as u; found = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'pika' else found(name, *rest); import penstock.amqp"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "MissingRequirement: RabbitMQ needs the client library pika: pip install '.[amqp]'" in ran.stderr


def test_a_port_without_a_listener_fails_the_start(queue: str) -> None:
    registry = ConsumerRegistry(f"amqp://127.0.0.1:{free_port()}/", consuming(queue))

    with pytest.raises(BrokerError, match=r"amqp://127.0.0.1:\d+/: ConnectionRefusedError"):
        registry.start(10)


def test_a_listener_that_does_not_answer_fails_the_start(queue: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        registry = ConsumerRegistry(f"amqp://127.0.0.1:{deaf.getsockname()[1]}/", consuming(queue))

        with pytest.raises(BrokerError, match="no answer"):
            registry.start(0.3)


@pytest.mark.server
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("amqp://guest:wr0ng@127.0.0.1:{port}/", "the broker refuses the user or password"),
        ("amqp://guest:guest@127.0.0.1:{port}/absent", "refuses access to the virtual host|not found|not_allowed"),
    ],
)
def test_a_start_that_the_broker_refuses_says_why(
    shared_rabbitmq: RabbitMQ, queue: str, address: str, reason: str
) -> None:
    registry = ConsumerRegistry(address.format(port=shared_rabbitmq.port), consuming(queue))

    with pytest.raises(BrokerError, match=reason) as error:
        registry.start(10)

    assert "wr0ng" not in str(error.value)
    assert not registry.health().healthy


@pytest.mark.server
def test_a_queue_that_another_consumer_has_for_itself_fails_the_start(
    shared_rabbitmq: RabbitMQ, client: Client, queue: str
) -> None:
    client.channel.queue_declare(queue, durable=True)
    client.channel.basic_consume(queue, lambda *_: None, exclusive=True)

    with pytest.raises(BrokerError, match=f"consumer '{queue}': 403 ACCESS_REFUSED"):
        ConsumerRegistry(shared_rabbitmq.url, consuming(queue)).start(10)


@pytest.mark.server
def test_a_registry_starts_once(queue: str, consume: Consume) -> None:
    registry = consume(consuming(queue))

    with pytest.raises(RuntimeError, match="starts once"):
        registry.start()
    assert registry.stop(5) == []
    assert registry.stop(5) == []
    assert registry.health().reason == "stopped"


@pytest.mark.server
def test_no_log_line_holds_the_password(
    shared_rabbitmq: RabbitMQ, queue: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "pika")
    (tmp_path / "password").write_text("gu3st-fr0m-file")
    for url, password_file in (
        (f"amqp://guest:gu3st-fr0m-url@127.0.0.1:{shared_rabbitmq.port}/", None),
        (f"amqp://guest@127.0.0.1:{shared_rabbitmq.port}/", str(tmp_path / "password")),
    ):
        with pytest.raises(BrokerError, match="refuses the user or password"):
            ConsumerRegistry(url, consuming(queue), password_file=password_file).start(10)

    assert "127.0.0.1" in caplog.text
    assert "gu3st" not in caplog.text


@pytest.mark.server
def test_tls_with_certificates_on_both_sides(client: Client, queue: str, tls_port: int, certificates: Path) -> None:
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    tls = Tls(ca_file=cert, cert_file=cert, key_file=key, server_name="localhost")
    registry = ConsumerRegistry(f"amqps://127.0.0.1:{tls_port}/", consuming(queue), tls=tls)
    registry.start()
    client.publish(queue, b"secret")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    assert registry.stop(5) == []


@pytest.mark.server
@pytest.mark.parametrize("name", ["localhost", "elsewhere"])
def test_a_broker_that_cannot_be_trusted_fails_the_start(
    queue: str, tls_port: int, certificates: Path, name: str
) -> None:
    """Its certificate is of an unknown authority, or of a known one for another host."""
    ca_file = str(certificates / "cert.pem") if name == "elsewhere" else None
    tls = Tls(ca_file=ca_file, server_name=name)

    with pytest.raises(BrokerError, match="CERTIFICATE_VERIFY_FAILED"):
        ConsumerRegistry(f"amqps://127.0.0.1:{tls_port}/", consuming(queue), tls=tls).start(10)
