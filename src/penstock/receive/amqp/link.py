"""The connection: one I/O thread that owns it, declares the topology, opens the channels and restores what is lost."""

import logging
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from pika import SelectConnection
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.connection import Connection
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)
from pika.frame import Method

from penstock.errors import BrokerError
from penstock.receive.amqp.backoff import Backoff, BackoffPolicy
from penstock.receive.amqp.broker import Broker
from penstock.receive.amqp.declarations import Declarations
from penstock.receive.amqp.delivery import Generation
from penstock.receive.amqp.publisher import Publisher
from penstock.receive.amqp.subscription import Subscription

log = logging.getLogger(__name__)
# pika reports one lost connection in a dozen lines with tracebacks, at each try again; we say it once. Who wants to
# hear pika sets a level for it, before or after.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)

# A step of a set-up: is given what to call when the broker has answered.
Step = Callable[[Callable[[Any], None]], object]
Steps = Generator[Step, Any, Any]


class Link:
    """The connection of a registry, for as long as it runs: lost ones are replaced. Everything but `start`, `call`,
    `close` and the plain fields belongs to the I/O thread."""

    def __init__(self, broker: Broker, declarations: Declarations, reconnect: BackoffPolicy) -> None:
        self.publisher = Publisher()
        self.subscriptions: list[Subscription] = []
        self.connected = False  # the connection is up and its topology declared
        self.reconnects = 0
        self.failure = ""  # why it is not up
        self._broker = broker
        self._declarations = declarations
        self._backoff = Backoff(reconnect)
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
        # pika closes a socket only from its loop. Unless this one is closed, the broker waits for our acks.
        socket = getattr(getattr(self._connection, "_transport", None), "_sock", None)
        if socket is not None:
            socket.close()
        self._connection = None
        self.publisher.lose()
        for subscription in self.subscriptions:
            subscription.lose()
            self._loop.add_callback(subscription.drain)  # whom the broken loop was to wake
        self._failed("the I/O thread failed")

    def _connect(self) -> None:
        if self._closing:
            return
        try:
            parameters = self._broker.parameters()
        except (OSError, ValueError) as error:  # a secret's file that is not there yet
            self._failed(f"{type(error).__name__}: {error}")
            return
        self._connection = SelectConnection(
            parameters,
            on_open_callback=lambda _: self._advance(self._set_up()),
            on_open_error_callback=lambda _, error: self._failed(reason_of(error)),
            on_close_callback=self._on_closed,
            custom_ioloop=self._loop,
        )

    def _advance(self, steps: Steps) -> None:
        """Take a set-up from answer to answer. One whose channel closes gets no answer, and is forgotten."""

        def answered(answer: Any = None) -> None:
            try:
                step = steps.send(answer)
                step(answered)
            except StopIteration:
                pass
            except AMQPError as error:  # the channel or connection closed between two steps
                log.debug("A set-up ended early. error=%r", error)

        answered()

    def _set_up(self) -> Steps:
        """Everything that a new connection needs."""
        yield from self._declare_topology()
        yield from self._open_publisher()
        for subscription in self.subscriptions:
            if self._started:  # each by itself: one that is refused now must not hold up the others
                self._advance(self._subscribe(subscription))
            else:
                yield from self._subscribe(subscription)
        if self._started:
            self.reconnects += 1
            log.info("Reconnected. broker=%s consumers=%d", self._broker, len(self.subscriptions))
        self._backoff.succeeded()
        self._started = self.connected = True
        self.failure = ""
        self._settled.set()

    def _declare_topology(self) -> Steps:
        channel: Channel = yield self._open_channel(self._on_set_up_refused)
        for exchange in self._declarations.exchanges:
            yield partial(
                _call, channel.exchange_declare, exchange.name, exchange.kind, exchange.passive, exchange.durable,
                exchange.auto_delete, exchange.internal, dict(exchange.args),
            )  # fmt: skip
        for queue in self._declarations.queues:
            yield partial(
                _call, channel.queue_declare, queue.name, queue.passive, queue.durable, queue.exclusive,
                queue.auto_delete, queue.arguments,
            )  # fmt: skip
        for binding in self._declarations.bindings:
            yield partial(
                _call, channel.queue_bind, binding.queue, binding.exchange, binding.routing_key, dict(binding.args)
            )
        channel.close()

    def _open_publisher(self) -> Steps:
        channel: Channel = yield self._open_channel(self._on_publisher_closed)
        yield lambda done: channel.confirm_delivery(self.publisher.on_confirm, callback=done)
        self.publisher.attach(channel)

    def _subscribe(self, subscription: Subscription) -> Steps:
        channel: Channel = yield self._open_channel(partial(self._on_channel_closed, subscription))
        subscription.acks.channel = channel
        channel.add_on_cancel_callback(lambda frame: self._on_cancelled(subscription, frame))
        yield lambda done: channel.basic_qos(prefetch_count=subscription.size.prefetch, callback=done)
        yield from self._consume(subscription, channel)

    def _consume(self, subscription: Subscription, channel: Channel) -> Steps:
        yield lambda done: channel.basic_consume(
            subscription.consumer.queue.name,
            subscription.on_delivery,
            exclusive=subscription.consumer.pool.exclusive,
            consumer_tag=subscription.name,
            arguments=subscription.arguments(),
            callback=done,
        )
        subscription.consuming = True
        subscription.backoff.succeeded()

    def _open_channel(self, on_closed: Callable[[Channel, Exception], None]) -> Step:
        def step(answered: Callable[[Any], None]) -> None:
            assert self._connection is not None
            channel = self._connection.channel(on_open_callback=answered)
            channel.add_on_close_callback(on_closed)

        return step

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
        self.publisher.lose()
        for subscription in self.subscriptions:
            subscription.lose()
        self._connection = None
        if self._closing:
            self._loop.stop()
        else:
            self._failed(self.failure if self.failure and not self.connected else reason_of(error))

    def _connection_is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def _on_set_up_refused(self, channel: Channel, error: Exception) -> None:
        """The broker refused a declaration. There is no use in half a topology: begin again from the connection."""
        if not isinstance(error, ChannelClosedByBroker) or not self._connection_is_open():
            return
        self.failure = reason_of(error)
        self.connected = False
        log.error("The broker refuses the topology. broker=%s reason=%s", self._broker, self.failure)
        assert self._connection is not None
        self._connection.close()

    def _on_publisher_closed(self, channel: Channel, error: Exception) -> None:
        self.publisher.lose()
        if self._connection_is_open() and not self._closing:
            log.error("Cannot publish retries and dead letters. reason=%s", reason_of(error))
            self._loop.call_later(1.0, self._reopen_publisher)

    def _reopen_publisher(self) -> None:
        if self._connection_is_open() and not self._closing:
            self._advance(self._open_publisher())

    def _on_channel_closed(self, subscription: Subscription, channel: Channel, error: Exception) -> None:
        if subscription.acks.channel is not channel or not self._connection_is_open():
            return
        subscription.lose()
        if self._closing:
            return
        reason = reason_of(error)
        if not self._started:
            self.failure = f"consumer {subscription.name!r}: {reason}"
            assert self._connection is not None
            self._connection.close()
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
        # What was lost again meanwhile, with its channel or the connection, is restored by whoever saw that.
        if subscription.acks.generation is lost and self._connection_is_open() and not subscription.stopping:
            self._advance(self._restoration(subscription))

    def _restoration(self, subscription: Subscription) -> Steps:
        yield from self._declare_topology()
        channel = subscription.acks.channel
        if channel is not None and channel.is_open:
            yield from self._consume(subscription, channel)
        else:
            yield from self._subscribe(subscription)
        subscription.restores += 1
        log.info("Consumer restored. consumer=%s", subscription.name)

    def _close(self) -> None:
        """Channels are closed by the broker after it has read every ack that we sent before."""
        if self._closing:
            return
        self._closing = True
        self.connected = False
        self.failure = self.failure or "stopped"
        for subscription in self.subscriptions:
            subscription.acks.flush(everything=True)
        if self._connection_is_open():
            assert self._connection is not None
            self._connection.close()
        else:
            self._loop.stop()


def _call(method: Callable[..., object], *args: Any) -> None:
    """Call a pika method whose last argument is the callback that the set-up appends; see `_advance`."""
    *given, callback = args
    method(*given, callback=callback)


def reason_of(error: BaseException) -> str:
    """The root of a failure in words, without what a URL may contain."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        # pika wraps the cause as `exception`, as the last of `exceptions` or as its only argument.
        inner = getattr(error, "exception", None) or getattr(error, "exceptions", None) or error.args
        if isinstance(inner, list | tuple):
            inner = inner[-1] if inner else None
        if not isinstance(inner, BaseException):
            break
        error = inner
    if isinstance(error, ProbableAuthenticationError):
        return "the broker refuses the user or password"
    if isinstance(error, ProbableAccessDeniedError):
        return "the broker refuses access to the virtual host"
    if isinstance(error, ChannelClosedByBroker | ConnectionClosedByBroker):
        return f"{error.reply_code} {error.reply_text}"
    return f"{type(error).__name__}: {error}"
