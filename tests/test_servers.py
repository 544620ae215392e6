"""The servers that the tests start: private, and the same after kill -9."""

import os
from pathlib import Path

import pika
import psycopg
import pytest

from penstock.errors import MissingRequirement
from tests import servers
from tests.conftest import missing
from tests.servers import PostgreSQL, RabbitMQ

pytestmark = pytest.mark.server


def test_a_killed_broker_comes_back_on_its_port_with_its_durable_messages(rabbitmq: RabbitMQ) -> None:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("kept", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "kept", b"hello", pika.BasicProperties(delivery_mode=2))

    port = rabbitmq.port
    rabbitmq.kill()
    assert not rabbitmq.running
    rabbitmq.start()

    assert rabbitmq.port == port
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        _, _, body = connection.channel().basic_get("kept", auto_ack=True)
    assert body == b"hello"


def test_a_killed_database_comes_back_on_its_port_with_what_was_committed(postgres: PostgreSQL) -> None:
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")

    postgres.kill()
    postgres.start()

    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_server_skips_with_the_reason_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="no broker to be had"):
        missing(MissingRequirement("no broker to be had"))


def test_a_server_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 1000)

    with pytest.raises(MissingRequirement, match="no-such-server is not installed"):
        servers.provide("no-such-package", "no-such-server")
