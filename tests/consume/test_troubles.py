"""Unexpected messages, handlers and queues: they harm no other message and no other consumer."""

import struct
import threading

import pika.data
import pytest

from penstock.amqp import ConsumerRegistry, Declarations, Message, Reject, Retry
from penstock.consume import subscription
from penstock.consume.attempts import ATTEMPTS, DELIVERY_COUNT, EXCHANGE, REASON, ROUTING_KEY
from penstock.consume.unreadable_headers import RAW
from penstock.errors import BrokerError
from penstock.testing import wait_until
from tests.consume.conftest import SOON, Client, Consume, with_dead_letters
from tests.consume.proxy import Proxy
from tests.servers import RabbitMQ

pytestmark = pytest.mark.server


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class HalfRetry(Retry):
    """A subclass that forgot its parent."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize("error", [Reject, ValueError])
def test_a_reason_with_half_a_character_keeps_no_message_from_the_dead_letters(
    client: Client, queue: str, consume: Consume, error: type[Exception]
) -> None:
    def refuse(message: Message) -> None:
        raise error(f"no such shop: {message.json()}")

    consume(handler=refuse, max_attempts=1)
    client.publish(queue, rb'"\ud800"')

    body, properties = client.dead_letter(queue)
    assert body == rb'"\ud800"'
    assert properties.headers[REASON].endswith(r"no such shop: \ud800")


@pytest.mark.parametrize("error", [Unspeakable, HalfRetry, SystemExit])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_outlives_whatever_its_handler_raises(
    client: Client, queue: str, consume: Consume, error: type[BaseException], workers: int
) -> None:
    def handle(message: Message) -> None:
        if message.body == b"bad":
            raise error

    registry = consume(handler=handle, workers=workers, max_attempts=2, retry=SOON)
    client.publish(queue, *[b"bad"] * workers, b"good")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    wait_until(lambda: client.depth(f"{queue}.dead") == workers)
    assert error.__name__ in client.dead_letter(queue)[1].headers[REASON]


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_coroutine_that_is_never_awaited_is_no_handled_message(
    client: Client, queue: str, consume: Consume, batch_size: int | None
) -> None:
    async def later(message: object) -> None: ...

    registry = consume(handler=lambda message: later(message), workers=2, max_attempts=1, batch_size=batch_size)
    client.publish(queue, b"1")

    assert "declare it with `async def`" in client.dead_letter(queue)[1].headers[REASON]
    assert registry.stats().consumers[queue].total("acked") == 0


def test_headers_of_any_kind_disturb_no_other_message(client: Client, queue: str, consume: Consume) -> None:
    registry = consume(event_type="a", event_type_header="type", handler=lambda message: None)
    strange = {"type": ["a"], EXCHANGE: 5, ROUTING_KEY: {"a": 1}, ATTEMPTS: "many", DELIVERY_COUNT: "more"}
    client.publish(queue, b"strange", headers=strange)
    client.publish(queue, b"good", headers={"type": "a"})

    assert client.dead_letter(queue)[0] == b"strange"
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    assert registry.stats().reconnects == 0


def test_headers_that_cannot_be_read_are_dead_lettered_with_their_message(
    client: Client, queue: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time in milliseconds where seconds belong: pika would drop the connection, at each delivery."""
    encode = pika.data.encode_value

    def encode_time(pieces: list[bytes], value: object) -> int:
        if value != "a time":
            return int(encode(pieces, value))
        pieces.append(struct.pack(">cQ", b"T", 1_700_000_000_000))
        return 9

    registry = consume(handler=lambda message: None, workers=2)
    with monkeypatch.context() as patched:
        patched.setattr(pika.data, "encode_value", encode_time)
        client.publish(queue, b"when?", event_type="x", content_type="text/plain", headers={"sent": "a time"})
    client.publish(queue, b"good")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    body, properties = client.dead_letter(queue)
    assert (body, properties.type, properties.content_type) == (b"when?", "x", "text/plain")
    assert "its headers cannot be read: ValueError: year" in properties.headers[REASON]
    assert properties.headers[RAW] == b"\x04sentT" + struct.pack(">Q", 1_700_000_000_000)
    assert registry.stats().reconnects == 0


def test_headers_that_a_handler_made_unfit_to_be_sent_still_bound_its_attempts(
    client: Client, queue: str, consume: Consume
) -> None:
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        message.properties.headers = {"trace": object()} if message.attempt < 3 else {}
        raise ValueError("no")

    registry = consume(handler=handle, workers=2, max_attempts=3, retry=SOON)
    client.publish(queue, b"1")

    assert client.dead_letter(queue)[1].headers[REASON] == "ValueError: no"
    assert attempts == [1, 2, 3]
    assert registry.stats().reconnects == 0


@pytest.mark.parametrize("patience", [900.0, 0.0])
def test_an_uncounted_retry_costs_a_quorum_queue_no_delivery(
    client: Client, queue: str, consume: Consume, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Its count would give up a message because a database was away for some seconds.

    Without patience, as after a quarter of an hour, the message goes to the end of its queue.
    """
    monkeypatch.setattr(subscription, "MAX_RETRY_DELAY", patience)
    tried: list[tuple[bool, int, bool]] = []

    def handle(message: Message) -> None:
        tried.append((message.redelivered, message.attempt, ATTEMPTS in message.headers))
        if len(tried) < 8:
            raise Retry(0.001, "the database is away", counted=False)

    registry = consume(handler=handle, workers=2, max_attempts=2, max_deliveries=2, kind="quorum")
    client.publish(queue, b"patience")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    assert tried == [(False, 1, False)] + [(False, 1, not patience)] * 7
    assert registry.stats().consumers[queue].total("retried") == 7
    assert client.depth(f"{queue}.dead") == 0


def test_a_dead_letter_that_came_back_too_often_is_tried_afresh_when_it_is_sent_back(
    client: Client, queue: str, consume: Consume
) -> None:
    handled = threading.Event()
    declarations = with_dead_letters(queue, kind="quorum")
    declarations.consumer(queue=queue, handler=lambda message: handled.set(), max_deliveries=1)
    client.channel.queue_declare(f"{queue}.dead", durable=True)
    client.channel.queue_declare(queue, durable=True, arguments=declarations.queues[1].arguments)
    client.publish(queue, b"again")
    for _ in range(2):
        wait_until(lambda: client.depth(queue) == 1)
        method, _, _ = client.channel.basic_get(queue)
        client.channel.basic_nack(method.delivery_tag, requeue=True)
    consume(declarations)

    body, properties = client.dead_letter(queue)
    assert not handled.is_set()
    client.publish(queue, body, headers=properties.headers)
    assert handled.wait(10)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_count_of_deliveries_that_the_publisher_sent_costs_the_message_no_attempt(
    client: Client, queue: str, consume: Consume, kind: str
) -> None:
    handled = threading.Event()
    consume(handler=lambda message: handled.set(), workers=2, max_deliveries=2, kind=kind)
    client.publish(queue, b"forged", headers={"x-delivery-count": 1000})
    assert handled.wait(10)
    assert client.depth(f"{queue}.dead") == 0


def test_a_handler_that_stops_its_own_consumers_is_told_so(client: Client, queue: str, consume: Consume) -> None:
    registry: ConsumerRegistry

    def handle(message: Message) -> None:
        registry.stop()

    registry = consume(handler=handle, workers=2, max_attempts=1)
    client.publish(queue, b"stop!")

    assert "let the main thread do so" in client.dead_letter(queue)[1].headers[REASON]
    assert registry.health().healthy


def test_a_foreign_queue_that_goes_away_takes_no_other_consumer_with_it(
    client: Client, queue: str, consume: Consume
) -> None:
    foreign = f"{queue}.foreign"
    client.channel.queue_declare(foreign, durable=True)
    declarations = Declarations()
    declarations.queue(foreign, passive=True)
    declarations.queue(queue)
    for name in (foreign, queue):
        declarations.consumer(queue=name, handler=lambda message: None, workers=2)
    registry = consume(declarations)

    client.channel.queue_delete(foreign)
    wait_until(lambda: "404" in registry.health().reason)
    assert f"not consuming: {foreign}; queue '{foreign}': 404 NOT_FOUND" in registry.health().reason
    client.publish(queue, b"1")
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)

    client.channel.queue_declare(foreign, durable=True)
    wait_until(lambda: registry.health().healthy)
    client.publish(foreign, b"2")
    wait_until(lambda: registry.stats().consumers[foreign].total("acked") == 1)
    assert registry.stats().reconnects == 0


def test_a_start_names_everything_that_the_broker_refuses(
    shared_rabbitmq: RabbitMQ, client: Client, queue: str
) -> None:
    client.channel.queue_declare(queue, durable=False)
    declarations = Declarations()
    declarations.exchange(f"{queue}.absent", passive=True)
    declarations.queue(queue)

    with pytest.raises(BrokerError, match=rf"exchange '{queue}.absent': 404 .*; queue '{queue}': 406 "):
        ConsumerRegistry(shared_rabbitmq.url, declarations).start(10)


def test_a_connection_lost_while_stopping_is_not_consumed_from_again(
    network: Proxy, client: Client, queue: str, consume: Consume
) -> None:
    """Each message would be delivered and returned, as fast as it goes, and a quorum queue counts to 20."""
    inside, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        inside.set()
        leave.wait(10)

    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(queue=queue, handler=handle, workers=1)
    registry = consume(declarations, url=network.url)
    client.publish(queue, b"1", b"2", b"3")
    assert inside.wait(10)
    stopping = threading.Thread(target=registry.stop, args=(20.0,))
    stopping.start()
    wait_until(lambda: client.depth(queue) == 2)
    network.cut()
    wait_until(lambda: registry.stats().reconnects == 1)
    assert client.consumers(queue) == 0
    leave.set()
    stopping.join(20.0)
    assert not stopping.is_alive()
    wait_until(lambda: client.depth(queue) == 3)  # the broker gives back what a lost connection had when it notices
    assert sorted(client.take_all(queue)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_dead_letters_that_no_exchange_or_queue_takes_wait_until_one_does_and_delay_no_other_message(
    client: Client, queue: str, consume: Consume, is_gone: bool
) -> None:
    exchange = f"{queue}.x"
    declarations = Declarations()
    declarations.exchange(exchange, "fanout")
    declarations.queue(queue, dead_letter=exchange)
    declarations.consumer(queue=queue, event_type="good", handler=lambda message: None, workers=2)
    registry = consume(declarations)
    if is_gone:
        client.channel.exchange_delete(exchange)
    client.publish(queue, b"bad", event_type="bad")
    client.publish(queue, b"good", event_type="good")
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    wait_until(lambda: registry.stats().consumers[queue].in_flight == 1)

    client.channel.exchange_declare(exchange, "fanout", durable=True)
    client.channel.queue_declare(f"{queue}.dead")
    client.channel.queue_bind(f"{queue}.dead", exchange)
    assert client.dead_letter(queue)[0] == b"bad"
    wait_until(lambda: registry.stats().consumers[queue].in_flight == 0)
    assert registry.stats().reconnects == 0


@pytest.mark.timeout(300)  # rabbitmqctl starts in a second, or in a minute on a machine that does much else
def test_consumers_go_on_while_an_alarm_of_the_broker_holds_up_publishers(
    shared_rabbitmq: RabbitMQ, client: Client, queue: str, consume: Consume
) -> None:
    """Only consumers can empty what caused it. What fails during the alarm waits for its end."""
    failed = threading.Event()

    def handle(message: Message) -> None:
        if message.body == b"bad":
            failed.set()
            raise ValueError("once") if message.attempt == 1 else Retry(0.0)

    declarations = with_dead_letters(queue)
    declarations.consumer(queue=queue, handler=handle, workers=2, prefetch=10, max_attempts=2, retry=SOON)
    client.channel.queue_declare(f"{queue}.dead", durable=True)
    client.channel.queue_declare(queue, durable=True, arguments=declarations.queues[1].arguments)
    client.publish(queue, b"bad")
    client.publish_unconfirmed(queue, [b"good"] * 100)
    wait_until(lambda: client.depth(queue) == 101)
    shared_rabbitmq.ctl("set_disk_free_limit", "mem_relative", "1000")
    try:
        registry = consume(declarations)
        assert failed.wait(10)
        wait_until(lambda: registry.stats().consumers[queue].total("acked") == 100)
        wait_until(lambda: registry.stats().consumers[queue].in_flight == 1)
    finally:
        try:
            shared_rabbitmq.ctl("set_disk_free_limit", "50MB")
        except BaseException:  # else all tests that publish after us would wait for the end of it
            shared_rabbitmq.kill()
            shared_rabbitmq.start()
            raise
    assert client.dead_letter(queue)[0] == b"bad"
