"""Outages of the broker and of the store: make soak PART=outages ARGS="--seed 7 --seconds 600".

The broker is both a way in (`receivers.amqp`) and a destination (`exporter`); the tables are in PostgreSQL.
"""

import threading
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
from pika.exceptions import AMQPError

from penstock.testing import wait_until
from tests.campaigns.campaign import Campaign, Fault
from tests.campaigns.ledger import Ledger
from tests.campaigns.senders import Request, Sender
from tests.consume.conftest import Client
from tests.servers import PostgreSQL, RabbitMQ, Server
from tests.service.running import Running
from tests.service.test_end_to_end import ONE_CORE

pytestmark = pytest.mark.server

IN, OUT = "campaign.in", "campaign.out"
DOWN = 3.0  # seconds that a server stays away at most, beside its start


class Publisher(Sender):
    """A sender whose requests are messages. What the broker confirms is acknowledged."""

    formats = ("deltas", "events")  # those that a message says by its content type

    def __init__(self, url: str, ledger: Ledger, seed: int) -> None:
        super().__init__(0, "publisher", ledger, seed)
        self._url = url
        self._client: Client | None = None

    def _post(self, sent: Request) -> tuple[int, bytes]:
        try:
            self._client = self._client or Client(self._url)
            self._client.publish(IN, sent.body, content_type=sent.headers["Content-Type"], app_id="publisher")
        except (AMQPError, OSError):
            self._client = None
            return 0, b""
        return 200, b""


def outage(server: Server) -> Fault:
    def strike(rng: Random) -> None:
        server.kill()
        threading.Event().wait(rng.uniform(0.0, DOWN))
        server.start()

    return strike


def config(broker: RabbitMQ, tables: str | None) -> str:
    return (
        (f"{ONE_CORE}tables: {{location: '{tables}'}}\n" if tables else "spark: {enabled: false}\n")
        + f"receivers: {{amqp: {{enabled: true, url: '{broker.url}', queue: {IN}}}}}\n"
        + f"exporter: {{type: amqp, url: '{broker.url}', routing_key: {OUT}, queue: {{retry_interval: 200ms, "
        + "max_retry_delay: 2s, circuit_breaker: {reset_timeout: 1s}}}\n"
    )


def run(folder: Path, seed: int, seconds: float, broker: RabbitMQ, store: PostgreSQL | None) -> str:
    client = Client(broker.url)
    for queue in (IN, OUT):
        client.channel.queue_declare(queue, durable=True)
    tables = store.url if store else None
    service = Running(folder, config(broker, tables))
    with Campaign(service, seed, senders={"a": 0.0, "b": 0.0}, tables=tables) as campaign:
        campaign.add(Publisher(broker.url, campaign.ledger, seed))
        faults = {"broker": outage(broker)} | ({"store": outage(store)} if store else {})
        campaign.strike(faults, seconds)
        campaign.stop_senders()
        relayed: list[bytes] = []
        wanted = campaign.ledger.relayable

        def has_all() -> bool:
            relayed.extend(sha256(body).digest() for body in Client(broker.url).take_all(OUT))
            return wanted <= set(relayed)

        wait_until(has_all, 120.0)
        campaign.settle()
        again = len(relayed) - len(set(relayed))
        return f"{campaign.report('outages')}\n{len(wanted)} bodies relayed, {again} of them sent again"


@pytest.mark.timeout(300)
def test_a_broker_that_dies_once_costs_no_point(tmp_path: Path, seed: int, rabbitmq: RabbitMQ) -> None:
    run(tmp_path, seed, 0.0, rabbitmq, None)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(0)
def test_a_broker_and_a_store_that_die_cost_no_point(
    tmp_path: Path, seed: int, seconds: float, rabbitmq: RabbitMQ, postgres: PostgreSQL
) -> None:
    print(run(tmp_path, seed, seconds, rabbitmq, postgres))  # noqa: T201 - the campaign's report
