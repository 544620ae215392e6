"""Messages that go back to the broker: retries and dead letters, each confirmed before the original is acknowledged.

They have a connection of their own. An alarm of the broker (memory, disk) makes it read nothing more from a connection
that publishes: acks on the same one would stay unread, and no consumer could empty the queues that caused the alarm.
"""

import logging
import struct
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

from pika import BasicProperties, SelectConnection
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import AMQPError
from pika.frame import Method
from pika.spec import Basic

from penstock.broker import Broker, abandon, reason_of

log = logging.getLogger(__name__)

Done = Callable[[bool], None]  # told whether the broker has the message


@dataclass(slots=True, eq=False)
class _Pending:
    exchange: str
    key: str
    body: bytes
    properties: BasicProperties
    done: Done
    returned: bool = False


class ConsumerPublisher:
    """Publishes with confirms, over a connection that is opened when it is first needed. I/O thread only.

    Loss: `done(True)` comes only when a queue has the message: one that no queue takes counts as failed.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connection: SelectConnection | None = None
        self._channel: Channel | None = None
        self._unsent: list[_Pending] = []  # what waits for the connection
        self._pending: dict[int, _Pending] = {}  # what waits for its confirm, by number
        self._sequence = 0

    def publish(
        self, loop: IOLoop, exchange: str, key: str, body: bytes, properties: BasicProperties, done: Done
    ) -> None:
        message = _Pending(exchange, key, body, properties, done)
        if self._channel is not None:
            self._send(message)
            return
        self._unsent.append(message)
        if self._connection is None:
            self._connect(loop)

    def close(self, abruptly: bool = False) -> None:
        """Let the connection go. The fate of the pending messages is unknown, so they count as failed.

        `abruptly`: its loop is broken, and can close nothing.
        """
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and abruptly:
            abandon(connection)
        elif connection is not None and connection.is_open:
            connection.close()
        failed = [*self._pending.values(), *self._unsent]
        self._pending, self._unsent = {}, []
        for message in failed:
            message.done(False)

    def _connect(self, loop: IOLoop) -> None:
        try:
            parameters = self._broker.parameters("retries")
        except (OSError, ValueError) as error:
            self._failed(error, None)
            return
        self._connection = SelectConnection(
            parameters,
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_open_error_callback=lambda connection, error: self._failed(error, connection),
            on_close_callback=lambda connection, error: self._failed(error, connection),
            custom_ioloop=loop,
        )

    def _opened(self, channel: Channel) -> None:
        if channel.connection is not self._connection:  # let go before it was open
            channel.connection.close()
            return
        channel.add_on_close_callback(lambda channel, error: self._failed(error, channel.connection))
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._ready(channel))

    def _ready(self, channel: Channel) -> None:
        self._channel, self._sequence = channel, 0  # a new channel counts its confirms from 1
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._send(message)

    def _failed(self, error: BaseException, connection: SelectConnection | None) -> None:
        if connection is not self._connection:  # one that we have let go
            return
        if self._pending or self._unsent:
            log.error("Cannot publish retries and dead letters. broker=%s reason=%s", self._broker, reason_of(error))
        self.close()

    def _send(self, message: _Pending) -> None:
        channel = self._channel
        if channel is None or not channel.is_open or not channel.connection.is_open:
            message.done(False)
            return
        try:
            channel.basic_publish(message.exchange, message.key, message.body, message.properties, mandatory=True)
        except (AMQPError, ValueError, TypeError, struct.error) as error:
            # pika cannot encode it (a handler may have put anything into the headers), and has sent nothing of it.
            log.error("A message cannot be published. routing_key=%s error=%r", message.key, error)
            message.done(False)
            return
        self._sequence += 1
        self._pending[self._sequence] = message

    def _on_confirm(self, frame: Method[Any]) -> None:
        """The broker has (or has not) taken everything up to a number."""
        answer = frame.method
        taken = isinstance(answer, Basic.Ack)
        tag = answer.delivery_tag
        settled = [number for number in self._pending if number <= tag] if answer.multiple else [tag]
        for number in settled:
            message = self._pending.pop(number, None)
            if message is not None:
                message.done(taken and not message.returned)

    def _on_return(self, channel: Channel, method: Basic.Return, properties: BasicProperties, body: bytes) -> None:
        """No queue took it. The broker names no number, but returns it unchanged and before its confirm."""
        log.error("No queue takes this message. exchange=%s routing_key=%s", method.exchange, method.routing_key)
        for message in self._pending.values():
            same = message.key == method.routing_key and message.body == body
            if same and not message.returned and message.properties.headers == properties.headers:
                message.returned = True
                return


def properties_with_message_headers(properties: BasicProperties, headers: dict[str, Any]) -> BasicProperties:
    """The same properties with other headers, fit to be published by us."""
    changed = copy(properties)
    changed.headers = headers
    changed.user_id = None  # the broker refuses a message in another user's name
    changed.expiration = None  # what we send again has waited already, and must not expire in the dead letters
    return changed
