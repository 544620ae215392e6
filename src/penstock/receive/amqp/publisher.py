"""Messages that go back to the broker: retries and dead letters, each confirmed before the original is acknowledged."""

import logging
from collections.abc import Callable
from copy import copy
from typing import Any

from pika import BasicProperties
from pika.channel import Channel
from pika.frame import Method
from pika.spec import Basic

log = logging.getLogger(__name__)

Done = Callable[[bool], None]  # told whether the broker has the message


class _Pending:
    __slots__ = ("body", "done", "key", "properties", "returned")

    def __init__(self, key: str, body: bytes, properties: BasicProperties, done: Done) -> None:
        self.key = key
        self.body = body
        self.properties = properties
        self.done = done
        self.returned = False


class Publisher:
    """Publishes with confirms over one channel. I/O thread only.

    Loss: `done(True)` comes only when a queue has the message: one that no queue takes counts as failed.
    """

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._pending: dict[int, _Pending] = {}
        self._sequence = 0

    def attach(self, channel: Channel) -> None:
        """Use `channel`, which is new: its confirms count from 1."""
        self._channel = channel
        self._sequence = 0
        channel.add_on_return_callback(self._on_return)

    def lose(self) -> None:
        """The channel is gone. Nobody knows what became of the pending messages, so they count as failed."""
        self._channel = None
        pending, self._pending = self._pending, {}
        for message in pending.values():
            message.done(False)

    def publish(self, exchange: str, key: str, body: bytes, properties: BasicProperties, done: Done) -> None:
        if self._channel is None or not self._channel.is_open or not self._channel.connection.is_open:
            done(False)
            return
        self._sequence += 1
        self._pending[self._sequence] = _Pending(key, body, properties, done)
        self._channel.basic_publish(exchange, key, body, properties, mandatory=True)

    def on_confirm(self, frame: Method[Any]) -> None:
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


def with_headers(properties: BasicProperties, headers: dict[str, Any]) -> BasicProperties:
    """The same properties with other headers, fit to be published by us."""
    changed = copy(properties)
    changed.headers = headers
    changed.user_id = None  # the broker refuses a message in another user's name
    changed.expiration = None  # what we send again has waited already, and must not expire in the dead letters
    return changed
