"""Broker, network, channel and queue are lost under load: nothing else may be."""

import threading
import time
from collections import Counter

import pytest

from penstock.amqp import BackoffPolicy, ConsumerRegistry, Declarations, Message
from penstock.testing import wait_until
from tests.consume.conftest import AT_ONCE, Client, Consume
from tests.consume.proxy import Proxy
from tests.servers import RabbitMQ

pytestmark = pytest.mark.server


class Tally:
    """A handler that notes what it was given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.times: Counter[bytes] = Counter()

    def handle(self, message: Message) -> None:
        with self._lock:
            self.times[message.body] += 1

    @property
    def repeated(self) -> int:
        return sum(times - 1 for times in self.times.values())


def _settled(registry: ConsumerRegistry, client: Client, queue: str) -> bool:
    """Nothing waits and nothing is in hand: also what was handled, but its ack lost with a connection, came again.

    It does so when the broker has noticed that the connection is lost, and with it the consumer that it had.
    """

    def is_idle() -> bool:
        return client.depth(queue) == 0 and registry.stats().consumers[queue].in_flight == 0

    return client.consumers(queue) == 1 and is_idle() and is_idle()  # twice: it may have been on its way to us


def test_a_broker_killed_under_load_loses_nothing_and_its_topology_is_declared_anew(
    shared_rabbitmq: RabbitMQ, queue: str
) -> None:
    """The shared broker: it comes back with its port and its data, and no other test is running."""
    tally = Tally()
    fleeting = f"{queue}.fleeting"
    declarations = Declarations()
    declarations.exchange(f"{queue}.events", durable=False)
    declarations.queue(queue)
    declarations.queue(fleeting, durable=False)  # gone with the broker: only we can bring it back
    declarations.bind(fleeting, f"{queue}.events", "#")
    declarations.consumer(queue=queue, handler=tally, workers=8)
    declarations.consumer(queue=fleeting, handler=tally, workers=2)
    client = Client(shared_rabbitmq.url)
    client.channel.queue_declare(queue, durable=True)
    bodies = [str(number).encode() for number in range(3000)]
    client.publish_unconfirmed(queue, bodies[:-1])
    client.publish(queue, bodies[-1])  # confirmed, and with it everything before
    registry = ConsumerRegistry(shared_rabbitmq.url, declarations, reconnect=AT_ONCE)
    registry.start()
    wait_until(lambda: sum(tally.times.values()) > 300)

    shared_rabbitmq.kill()
    wait_until(lambda: not registry.health().healthy)
    assert "refused" in registry.health().reason or "lost" in registry.health().reason.lower()
    shared_rabbitmq.start()

    wait_until(lambda: len(tally.times) == 3000, timeout=30)
    wait_until(lambda: registry.health().healthy)
    client = Client(shared_rabbitmq.url)
    client.publish("any.key", b"fleeting", exchange=f"{queue}.events")
    wait_until(lambda: tally.times[b"fleeting"] == 1)
    assert registry.stats().reconnects == 1
    wait_until(lambda: _settled(registry, client, queue))
    assert registry.stop(5) == []
    assert client.depth(queue) == 0


def test_a_cut_connection_repeats_only_what_was_unacknowledged(
    network: Proxy, client: Client, queue: str, consume: Consume
) -> None:
    tally = Tally()
    prefetch = 40
    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(queue=queue, handler=tally, workers=4, prefetch=prefetch)
    client.channel.queue_declare(queue, durable=True)
    client.publish_unconfirmed(queue, [str(number).encode() for number in range(5000)])
    registry = consume(declarations, url=network.url)
    cuts = 0
    for share in (500, 1500, 3000):
        wait_until(lambda share=share: len(tally.times) >= share)  # type: ignore[misc]
        network.cut()
        cuts += 1
        wait_until(lambda cuts=cuts: registry.stats().reconnects == cuts)  # type: ignore[misc]
    wait_until(lambda: len(tally.times) == 5000, timeout=30)
    wait_until(lambda: _settled(registry, client, queue))
    stats = registry.stats().consumers[queue]
    assert registry.stop(5) == []
    assert tally.repeated <= cuts * prefetch
    assert tally.repeated <= stats.total("redelivered")
    assert client.depth(queue) == 0


def test_handlers_that_outlive_their_channel_are_counted_and_acknowledge_nothing(
    network: Proxy, client: Client, queue: str, consume: Consume
) -> None:
    """An ack on a channel that never saw the tag would close that channel, too."""
    inside, leave = threading.Event(), threading.Event()
    declarations = Declarations()
    declarations.queue(queue)

    def handle(message: Message) -> None:
        if not message.redelivered:
            inside.set()
            leave.wait(10)

    declarations.consumer(queue=queue, handler=handle, workers=2)
    registry = consume(declarations, url=network.url)
    client.publish(queue, b"long")
    assert inside.wait(10)
    network.cut()
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    leave.set()
    wait_until(lambda: registry.stats().consumers[queue].total("stale") == 1)
    client.publish(queue, b"next")
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 2)
    assert registry.stats().consumers[queue].restores == 0


def test_a_stream_goes_on_after_the_last_acknowledged_message(
    network: Proxy, client: Client, queue: str, consume: Consume
) -> None:
    tally = Tally()
    declarations = Declarations()
    declarations.queue(queue, "stream")
    declarations.consumer(queue=queue, handler=tally, workers=2, args={"x-stream-offset": "first"})
    client.channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "stream"})
    client.publish(queue, *[str(number).encode() for number in range(50)])
    registry = consume(declarations, url=network.url)
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 50)
    network.cut()
    wait_until(lambda: registry.stats().reconnects == 1)
    client.publish(queue, b"50")
    wait_until(lambda: len(tally.times) == 51)
    wait_until(lambda: registry.stats().consumers[queue].in_flight == 0)
    assert registry.stop(5) == []
    assert registry.stats().consumers[queue].total("nacked") == 0  # the broker would close the connection
    assert tally.repeated == 0


def test_a_consumer_cancelled_by_the_broker_is_restored_with_its_queue(
    client: Client, queue: str, consume: Consume
) -> None:
    tally = Tally()
    registry = consume(handler=tally, workers=2)

    client.channel.queue_delete(queue)  # the broker cancels the consumer and keeps the channel

    wait_until(lambda: registry.stats().consumers[queue].restores == 1)
    client.publish(queue, b"again")
    wait_until(lambda: tally.times[b"again"] == 1)
    assert registry.stats().reconnects == 0


def test_a_channel_that_the_broker_closes_takes_no_other_consumer_with_it(
    client: Client, queue: str, consume: Consume
) -> None:
    tally = Tally()
    declarations = Declarations()
    declarations.queue(queue)
    declarations.queue(f"{queue}.other")
    declarations.consumer(queue=queue, handler=tally, workers=2)
    declarations.consumer(queue=f"{queue}.other", handler=tally, workers=2)
    registry = consume(declarations)

    victim = next(one for one in registry._connection.subscriptions if one.name == queue)
    channel = victim.acks.channel
    assert channel is not None
    registry._connection.call(lambda: channel.basic_ack(999))  # what the broker never sent: 406

    wait_until(lambda: registry.stats().consumers[queue].restores == 1)
    client.publish(queue, b"1")
    client.publish(f"{queue}.other", b"2")
    wait_until(lambda: len(tally.times) == 2)
    stats = registry.stats()
    assert stats.reconnects == 0
    assert stats.consumers[f"{queue}.other"].restores == 0


def test_retries_in_wait_survive_a_cut_connection(network: Proxy, client: Client, queue: str, consume: Consume) -> None:
    handled = threading.Event()
    failed = threading.Event()

    def handle(message: Message) -> None:
        if not message.redelivered:
            failed.set()
            raise ValueError("try again much later")
        handled.set()

    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(
        queue=queue, handler=handle, workers=2, retry=BackoffPolicy(first=60.0, limit=60.0, jitter=0.0)
    )
    registry = consume(declarations, url=network.url)
    client.publish(queue, b"")
    assert failed.wait(10)
    wait_until(lambda: registry.stats().consumers[queue].total("retried") == 1)
    network.cut()
    assert handled.wait(10)


def test_a_defect_on_the_io_thread_costs_a_connection_and_nothing_else(
    client: Client, queue: str, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    tally = Tally()
    registry = consume(handler=tally, workers=4, reconnect=AT_ONCE)
    client.publish_unconfirmed(queue, [str(number).encode() for number in range(1000)])

    def defect() -> None:
        raise ZeroDivisionError("a defect")

    registry._connection.call(defect)

    wait_until(lambda: registry.stats().reconnects == 1)
    wait_until(lambda: len(tally.times) == 1000)
    wait_until(lambda: _settled(registry, client, queue))
    assert "a defect" in caplog.text
    assert registry.stop(5) == []
    assert client.depth(queue) == 0


def test_a_failed_retry_in_flight_when_the_broker_goes_away_is_no_defect(
    network: Proxy, client: Client, queue: str, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher's channel closes first, while the consumer's still thinks that it is open."""

    def handle(message: Message) -> None:
        raise ValueError("always")

    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(
        queue=queue, handler=handle, workers=8, max_attempts=1000, retry=BackoffPolicy(first=0.001, limit=0.001)
    )
    registry = consume(declarations, url=network.url)
    client.publish_unconfirmed(queue, [b""] * 50)
    for cuts in (1, 2, 3):
        wait_until(lambda: registry.stats().consumers[queue].total("retried") > 300)
        network.cut()
        wait_until(lambda cuts=cuts: registry.stats().reconnects == cuts)  # type: ignore[misc]
    assert registry.stop(5) == []
    assert "begins anew" not in caplog.text
    wait_until(lambda: client.depth(queue) >= 50)  # the broker gives back what a lost connection had when it notices


def test_a_registry_without_a_broker_stops_at_once(shared_rabbitmq: RabbitMQ, queue: str) -> None:
    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(queue=queue, handler=Tally(), workers=2)
    with Proxy(shared_rabbitmq.port) as network:
        registry = ConsumerRegistry(f"amqp://guest:guest@127.0.0.1:{network.port}/", declarations, reconnect=AT_ONCE)
        registry.start()
    wait_until(lambda: "refused" in registry.health().reason)

    begun = time.monotonic()
    assert registry.stop(20) == []
    assert time.monotonic() - begun < 5


def test_a_consumer_that_is_refused_after_a_reconnect_does_not_hold_up_the_others(
    network: Proxy, client: Client, queue: str, consume: Consume
) -> None:
    tally = Tally()
    declarations = Declarations()
    for name in (queue, f"{queue}.other"):
        declarations.queue(name)
        declarations.consumer(queue=name, handler=tally, workers=2)
    registry = consume(declarations, url=network.url)
    with network.closed():
        network.cut()
        wait_until(lambda: client.consumers(queue) == 0)
        tag = client.channel.basic_consume(queue, lambda *_: None, exclusive=True)  # before we are back

    client.publish(f"{queue}.other", b"1")
    wait_until(lambda: tally.times[b"1"] == 1)
    assert registry.health().reason == f"not consuming: {queue}"

    client.channel.basic_cancel(tag)
    wait_until(lambda: registry.health().healthy)
    client.publish(queue, b"2")
    wait_until(lambda: tally.times[b"2"] == 1)
