"""A publisher of streams on a real broker, for the tests that read them."""

import itertools
import os
from typing import Any

import pika

_numbers = itertools.count(1)
_OPTIONS = "?heartbeat=0&blocked_connection_timeout=60"  # else a broker with an alarm is waited for for ever
# Segments of some twenty messages of 1000 bytes, and room for a few of them.
SHORT_LIVED = {"x-stream-max-segment-size-bytes": 20_000, "x-max-length-bytes": 60_000}


class Publisher:
    """Declares streams and fills them; what it published, it remembers."""

    def __init__(self, url: str) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(url + _OPTIONS))
        self.channel = self._connection.channel()
        self.channel.confirm_delivery()
        self.published: dict[str, list[bytes]] = {}

    def declare(self, **arguments: Any) -> str:
        """A stream of its own for a test."""
        stream = f"s{os.getpid()}.{next(_numbers)}"
        self.declare_again(stream, **arguments)
        return stream

    def declare_again(self, stream: str, **arguments: Any) -> None:
        self.channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream", **arguments})
        self.published[stream] = []

    def publish(self, stream: str, *bodies: bytes, **properties: Any) -> None:
        """Each of them confirmed: the stream has it when this returns."""
        for body in bodies:
            self.channel.basic_publish("", stream, body, pika.BasicProperties(**properties))
        self.published[stream] += bodies

    def fill(self, stream: str, count: int, size: int = 20) -> None:
        """`count` messages that say which they are; the stream has them when this returns."""
        first = len(self.published[stream])
        bodies = [b"%d" % n + b"." * size for n in range(first, first + count)]
        channel = self._connection.channel()
        for body in bodies[:-1]:
            channel.basic_publish("", stream, body)
        channel.confirm_delivery()
        channel.basic_publish("", stream, bodies[-1])  # confirmed after all that the same channel sent before
        channel.close()
        self.published[stream] += bodies

    def close(self) -> None:
        if self._connection.is_open:
            self._connection.close()
