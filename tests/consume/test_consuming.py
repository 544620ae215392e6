"""Dispatch, acknowledgement, failures and dead letters on a real broker."""

import asyncio
import json
import logging
import threading

import pytest

from penstock.amqp import ConsumerRegistry, Declarations, Message, Reject, Retry
from penstock.consume.attempts import QUEUE, REASON, TRIED
from penstock.service.logs import JsonFormatter
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.consume.conftest import SOON, Client, Consume
from tests.servers import RabbitMQ

pytestmark = pytest.mark.server


def test_each_event_type_has_its_handler_and_the_rest_the_default_one(
    client: Client, queue: str, consume: Consume
) -> None:
    seen: list[tuple[str, str]] = []
    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(queue=queue, event_type="created", handler=lambda m: seen.append(("created", m.event_type)))
    declarations.consumer(queue=queue, event_type="deleted", handler=lambda m: seen.append(("deleted", m.event_type)))
    declarations.consumer(queue=queue, handler=lambda m: seen.append(("other", m.event_type)))
    consume(declarations)

    for event_type in ("created", "deleted", "renamed", None):
        client.publish(queue, b"{}", event_type=event_type)

    wait_until(lambda: len(seen) == 4)
    assert sorted(seen) == [("created", "created"), ("deleted", "deleted"), ("other", ""), ("other", "renamed")]


def test_a_registry_runs_within_an_async_with(shared_rabbitmq: RabbitMQ, client: Client, queue: str) -> None:
    seen: list[bytes] = []
    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(queue=queue, handler=lambda message: seen.append(message.body))

    async def main() -> ConsumerRegistry:
        async with ConsumerRegistry(shared_rabbitmq.url, declarations) as registry:
            client.publish(queue, b"order")
            await asyncio.to_thread(wait_until, lambda: seen == [b"order"])
        return registry

    assert not asyncio.run(main()).health().healthy


def test_a_header_may_name_the_event_type(client: Client, queue: str, consume: Consume) -> None:
    seen: list[str] = []
    consume(event_type="created", event_type_header="ce-type", handler=lambda m: seen.append(m.event_type))

    client.publish(queue, b"{}", headers={"ce-type": "created"})

    wait_until(lambda: seen == ["created"])


def test_an_event_type_without_a_handler_is_dead_lettered_and_counted(
    client: Client, queue: str, consume: Consume
) -> None:
    registry = consume(event_type="created", handler=lambda m: None)

    client.publish(queue, b"what is this?", event_type="renamed")

    body, properties = client.dead_letter(queue)
    assert body == b"what is this?"
    assert properties.headers[REASON] == "no handler for event type 'renamed'"
    wait_until(lambda: registry.stats().consumers[queue].event_types["unknown"].dead_lettered == 1)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_poison_message_is_tried_a_bounded_number_of_times_then_dead_lettered_with_the_reason(
    client: Client, queue: str, consume: Consume, kind: str, workers: int
) -> None:
    attempts: list[int] = []
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        if message.body == b"poison":
            attempts.append(message.attempt)
            raise ValueError("cannot digest this")
        handled.append(message.body)

    registry = consume(handler=handle, workers=workers, max_attempts=3, retry=SOON, kind=kind)
    client.publish(queue, b"before", b"poison", b"after", event_type="x", message_id="m1")

    body, properties = client.dead_letter(queue)
    assert body == b"poison"
    assert (properties.type, properties.message_id) == ("x", "m1")
    assert properties.headers[REASON] == "ValueError: cannot digest this"
    assert (properties.headers[QUEUE], properties.headers[TRIED]) == (queue, 3)
    assert attempts == [1, 2, 3]
    wait_until(lambda: sorted(handled) == [b"after", b"before"])
    wait_until(lambda: registry.stats().consumers[queue].in_flight == 0)
    stats = registry.stats().consumers[queue]
    assert (stats.total("acked"), stats.total("retried"), stats.total("dead_lettered")) == (2, 2, 1)


def test_with_one_worker_nothing_overtakes_a_message_that_is_retried(
    client: Client, queue: str, consume: Consume
) -> None:
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"2" and message.attempt < 3:
            raise Retry(0.01)

    consume(handler=handle, workers=1)
    client.publish(queue, b"1", b"2", b"3", b"4")

    wait_until(lambda: len(seen) == 6)
    assert seen == [b"1", b"2", b"2", b"2", b"3", b"4"]


def test_without_a_dead_letter_exchange_of_ours_the_brokers_policy_applies(
    client: Client, queue: str, consume: Consume
) -> None:
    """Another service declares the queue, with a dead-letter exchange that ours does not know."""
    client.channel.queue_declare(f"{queue}.dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{queue}.dead"}
    client.channel.queue_declare(queue, durable=True, arguments=arguments)

    def handle(message: Message) -> None:
        raise Reject("not mine")

    declarations = Declarations()
    declarations.queue(queue, passive=True)
    declarations.consumer(queue=queue, handler=handle)
    consume(declarations)
    client.publish(queue, b"refused")

    wait_until(lambda: client.depth(f"{queue}.dead") == 1)


def test_auto_ack_acknowledges_before_the_handler_has_finished(client: Client, queue: str, consume: Consume) -> None:
    leave = threading.Event()
    registry = consume(handler=lambda m: leave.wait(10), workers=1, prefetch=1, auto_ack=True)
    client.publish(queue, b"1", b"2", b"3", b"4", b"5")

    def delivered_and_unacknowledged() -> tuple[int, int]:
        stats = registry.stats().consumers[queue]
        return stats.total("delivered"), stats.in_flight

    wait_until(lambda: delivered_and_unacknowledged() == (4, 1))  # one with the worker, two behind it
    assert client.depth(queue) == 1
    leave.set()


def test_a_slow_message_does_not_stop_the_others_when_the_window_is_full(
    client: Client, queue: str, consume: Consume
) -> None:
    """Its ack holds back the prefix; the rest must be acknowledged around it, or the broker sends no more."""
    leave = threading.Event()
    registry = consume(handler=lambda m: leave.wait(20) if m.body == b"slow" else None, workers=2, prefetch=8)
    client.publish(queue, b"slow")
    client.publish_unconfirmed(queue, [b"fast"] * 300)

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 300)
    leave.set()


def test_the_start_and_each_failure_are_logged_with_workers_and_worker(
    client: Client, queue: str, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def handle(message: Message) -> None:
        raise ValueError("boom")

    consume(handler=handle, workers=300, prefetch_count=2000, max_attempts=1)
    client.publish(queue, b"")
    wait_until(lambda: client.depth(f"{queue}.dead") == 1)

    assert f"queue={queue} workers=200 prefetch=1000" in caplog.text
    assert "workers 300 -> 200" in caplog.text
    assert "prefetch 2000 -> 1000" in caplog.text
    assert "attempt=1 verdict=retry reason=ValueError: boom" in caplog.text
    assert "worker=" in caplog.text
    assert 'raise ValueError("boom")' in caplog.text  # the traceback
    (failed,) = [record for record in caplog.records if record.getMessage().startswith("Handler failed")]
    line = json.loads(JsonFormatter().format(failed))
    assert (line["event"], line["attempt"], line["reason"]) == ("Handler failed", 1, "ValueError: boom")
    assert 'raise ValueError("boom")' in line["exception"]


def test_a_retry_that_the_handler_asks_for_is_no_warning(
    client: Client, queue: str, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: Message) -> None:
        if message.attempt == 1:
            raise Retry(0.0, "not yet")

    registry = consume(handler=handle)
    client.publish(queue, b"")
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)

    assert registry.stats().consumers[queue].total("retried") == 1
    assert [record.getMessage() for record in caplog.records if "not yet" in record.getMessage()] == []


def test_every_count_moves(client: Client, queue: str, consume: Consume) -> None:
    """Each message stands for one thing that can happen to a message."""
    telemetry = Telemetry()

    def handle(message: Message) -> None:
        if message.body == b"retried" and message.attempt == 1:
            raise Retry(0.0)
        if message.body == b"refused":
            raise Reject("and there is no dead-letter exchange")

    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(queue=queue, event_type="good", handler=handle, workers=2, prefetch=7)
    client.channel.queue_declare(queue, durable=True)
    client.publish(queue, b"redelivered", event_type="good")
    method, _, _ = client.channel.basic_get(queue)
    client.channel.basic_nack(method.delivery_tag, requeue=True)
    registry = consume(declarations, telemetry=telemetry)
    client.publish(queue, b"retried", b"refused", event_type="good")
    client.publish(queue, b"without a handler", event_type="bad")
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 2)
    wait_until(lambda: registry.stats().consumers[queue].total("nacked") == 2)
    client.channel.queue_delete(queue)
    wait_until(lambda: registry.stats().consumers[queue].restores == 1)

    good, by_queue = f'{{event_type="good",queue="{queue}"}}', f'{{queue="{queue}"}}'
    for line in (
        f"penstock_amqp_deliveries_total{good} 4.0",
        f"penstock_amqp_redeliveries_total{good} 1.0",
        f"penstock_amqp_acks_total{good} 2.0",
        f"penstock_amqp_nacks_total{good} 1.0",
        f"penstock_amqp_retries_total{good} 1.0",
        f"penstock_amqp_dead_letters_total{good} 1.0",
        f'penstock_amqp_dead_letters_total{{event_type="unknown",queue="{queue}"}} 1.0',
        f"penstock_amqp_handler_seconds_count{good} 4.0",
        f'penstock_amqp_handler_seconds_bucket{{event_type="good",le="+Inf",queue="{queue}"}} 4.0',
        f"penstock_amqp_settle_seconds_count{good} 2.0",
        f"penstock_amqp_restores_total{by_queue} 1.0",
        f"penstock_amqp_workers{by_queue} 2.0",
        f"penstock_amqp_prefetch{by_queue} 7.0",
        f"penstock_amqp_utilisation{by_queue} 0.0",
        f"penstock_amqp_in_flight{by_queue} 0.0",
        "penstock_amqp_connected 1.0",
        "penstock_amqp_reconnects_total 0.0",
    ):  # the thread that counts goes on while we look
        wait_until(lambda line=line: line in telemetry.render().decode())  # type: ignore[misc]
    assert f"penstock_amqp_ack_frames_total{by_queue} 0.0" not in telemetry.render().decode()
