"""The connection: one I/O thread that owns it, declares the topology, opens the channels and restores what is lost."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from pika import BasicProperties, SelectConnection
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.connection import Connection
from pika.frame import Method

from penstock.broker import Broker, abandon, reason_of
from penstock.consume.backoff_policy import BackoffPolicy, RetryDelay
from penstock.consume.declarations import Declarations
from penstock.consume.delivery import Generation
from penstock.consume.publisher import ConsumerPublisher, Done
from penstock.consume.subscription import Subscription
from penstock.consume.topology import Steps, Topology, advance_amqp_topology
from penstock.consume.unreadable_headers import ForgivingConnection
from penstock.errors import BrokerError

log = logging.getLogger(__name__)


class ConsumerConnection:
    """The connection of a registry, for as long as it runs: lost ones are replaced. Everything but `start`, `call`,
    `close` and the plain fields belongs to the I/O thread."""

    def __init__(self, broker: Broker, declarations: Declarations, reconnect: BackoffPolicy) -> None:
        self._publisher = ConsumerPublisher(broker)
        self.subscriptions: list[Subscription] = []
        self.connected = False  # the connection is up and its topology declared
        self.reconnects = 0
        self.failure = ""  # why it is not up
        self._broker = broker
        self.topology = Topology(declarations)
        self._backoff = RetryDelay(reconnect)
        self._loop = IOLoop()
        self._connection: SelectConnection | None = None
        self._started = False
        self._settled = threading.Event()  # the first set-up has succeeded or failed
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="penstock-amqp-io", daemon=True)

    # From any thread -----------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Connect and begin to consume; BrokerError with the reason if that fails."""
        self._thread.start()
        self.call(self._connect)
        if not self._settled.wait(timeout):
            self.failure = self.failure or "no answer"
            self._started = False
        if not self._started:
            reason = self.failure
            self.close(1.0)
            raise BrokerError(f"{self._broker}: {reason}")

    def call(self, callback: Callable[[], None]) -> None:
        """Call back soon on the I/O thread. Once that has ended, nothing is called."""
        while not self._ended:
            loop = self._loop
            try:
                loop.add_callback_threadsafe(callback)
            except (OSError, AttributeError):  # that loop is closed: it has ended, or begun anew
                continue
            if loop is self._loop:
                return

    def close(self, timeout: float) -> bool:
        """Close the connection and end the thread; False if it did not end in time."""
        self.call(self._close)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.call(self._loop.stop)  # the broker does not answer
            self._thread.join(0.5)
            return False
        return True

    # The I/O thread ------------------------------------------------------------------------------------------------

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        return self._loop.call_later(delay, callback)

    def cancel(self, timer: object) -> None:
        self._loop.remove_timeout(timer)

    def publish(self, exchange: str, key: str, body: bytes, properties: BasicProperties, done: Done) -> None:
        self._publisher.publish(self._loop, exchange, key, body, properties, done)

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._loop.start()
                except Exception:
                    # A defect, of pika or ours. Whatever the connection's state is, a new one is sound.
                    log.exception("The I/O thread failed and begins anew. broker=%s", self._broker)
                    self._begin_anew()
        finally:
            self._ended = True
            self._loop.close()

    def _begin_anew(self) -> None:
        broken, self._loop = self._loop, IOLoop()
        broken.close()
        abandon(self._connection)
        self._connection = None
        for subscription in self.subscriptions:
            subscription.lose()
            self._loop.add_callback(subscription.drain)  # the broken loop was to call it
        self._publisher.close(abruptly=True)
        self._failed("the I/O thread failed")

    def _connect(self) -> None:
        if self._closing:
            return
        try:
            parameters = self._broker.parameters()
        except (OSError, ValueError) as error:  # a secret's file that is not there yet
            self._failed(f"{type(error).__name__}: {error}")
            return
        self._connection = ForgivingConnection(
            parameters,
            on_open_callback=lambda connection: advance_amqp_topology(self._set_up(connection)),
            on_open_error_callback=lambda _, error: self._failed(reason_of(error)),
            on_close_callback=self._on_closed,
            custom_ioloop=self._loop,
        )

    def _set_up(self, connection: Connection) -> Steps:
        """Everything that a new connection needs."""
        yield from self.topology.declare(connection)
        if self.topology.refused and not self._started:
            self._give_up_start("; ".join(f"{name}: {reason}" for name, reason in self.topology.refused.items()))
            return
        for subscription in self.subscriptions:
            if subscription.stopping:
                continue
            if self._started:  # each by itself: one that is refused now must not hold up the others
                advance_amqp_topology(self._subscribe(connection, subscription))
            else:
                yield from self._subscribe(connection, subscription)
        if self._started:
            self.reconnects += 1
            log.info("Reconnected. broker=%s consumers=%d", self._broker, len(self.subscriptions))
        self._backoff.succeeded()
        self._started = self.connected = True
        self.failure = ""
        self._settled.set()

    def _subscribe(self, connection: Connection, subscription: Subscription) -> Steps:
        """Begin to consume, over the channel that the subscription has or over a new one."""
        channel = subscription.acks.channel
        if channel is None or not channel.is_open:
            channel = yield lambda opened: connection.channel(on_open_callback=opened).add_on_close_callback(
                partial(self._on_channel_closed, subscription)
            )
            subscription.acks.channel = channel
            channel.add_on_cancel_callback(lambda frame: self._on_cancelled(subscription, frame))
            yield lambda done: channel.basic_qos(prefetch_count=subscription.size.prefetch, callback=done)
        yield lambda done: channel.basic_consume(
            subscription.consumer.queue.name,
            subscription.on_delivery,
            exclusive=subscription.consumer.pool.exclusive,
            consumer_tag=subscription.name,
            arguments=subscription.arguments(),
            callback=done,
        )
        subscription.on_consuming()

    # What may happen to them ---------------------------------------------------------------------------------------

    def _failed(self, reason: str) -> None:
        """A connection could not be had: say so at the start, try again later."""
        self.connected = False
        self.failure = reason
        if not self._started:
            self._settled.set()
            return
        if self._closing:
            return
        delay = self._backoff.failed()
        if self._backoff.failures == 1:
            log.warning("Connection lost, will reconnect. broker=%s reason=%s", self._broker, reason)
        self._loop.call_later(delay, self._connect)

    def _on_closed(self, connection: Connection, error: BaseException) -> None:
        for subscription in self.subscriptions:
            subscription.lose()
        self._connection = None
        if self._closing:
            self._loop.stop()
        else:
            self._failed(self.failure if self.failure and not self.connected else reason_of(error))

    def _open_connection(self) -> SelectConnection | None:
        return self._connection if self._connection is not None and self._connection.is_open else None

    def _give_up_start(self, reason: str) -> None:
        self.failure = reason
        assert self._connection is not None
        self._connection.close()

    def _on_channel_closed(self, subscription: Subscription, channel: Channel, error: Exception) -> None:
        if subscription.acks.channel is not channel or self._open_connection() is None:
            return
        subscription.lose()
        if self._closing:
            return
        reason = reason_of(error)
        if not self._started:
            self._give_up_start(f"consumer {subscription.name!r}: {reason}")
            return
        self._restore_later(subscription, reason)

    def _on_cancelled(self, subscription: Subscription, frame: Method[Any]) -> None:
        """The broker ended the consumer: its queue was deleted or moved. Acks of what is in hand are still good."""
        subscription.consuming = False
        if not self._closing:
            self._restore_later(subscription, "cancelled by the broker")

    def _restore_later(self, subscription: Subscription, reason: str) -> None:
        if subscription.stopping:
            return
        delay = subscription.backoff.failed()
        if subscription.backoff.failures == 1:
            log.warning("Consumer lost, will be restored. consumer=%s reason=%s", subscription.name, reason)
        self._loop.call_later(delay, partial(self._restore, subscription, subscription.acks.generation))

    def _restore(self, subscription: Subscription, lost: Generation) -> None:
        # A consumer lost again since, with its channel or connection, is restored by that later loss.
        connection = self._open_connection()
        unchanged = subscription.acks.generation is lost and not subscription.consuming
        if unchanged and connection is not None and not subscription.stopping:
            advance_amqp_topology(self._restoration(connection, subscription))

    def _restoration(self, connection: Connection, subscription: Subscription) -> Steps:
        yield from self.topology.declare(connection)
        yield from self._subscribe(connection, subscription)
        subscription.restores += 1
        log.info("Consumer restored. consumer=%s", subscription.name)

    def _close(self) -> None:
        """Channels are closed by the broker after it has read every ack that we sent before."""
        if self._closing:
            return
        self._closing = True
        self.connected = False
        self.failure = self.failure or "stopped"
        self._publisher.close()
        connection = self._open_connection()
        if connection is not None:
            connection.close()
        else:
            self._loop.stop()
