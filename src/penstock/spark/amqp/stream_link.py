"""A connection to the broker that one thread drives while it waits, and consumers of streams on it.

pika's blocking connection will not do: when it closes a channel it rejects what was not handled yet, and a broker ends
the connection of a client that rejects a message of a stream.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pika import SelectConnection
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.connection import Parameters
from pika.exceptions import AMQPError, ChannelClosedByClient, ConnectionClosedByClient
from pika.spec import Basic, BasicProperties

from penstock.errors import BrokerError

OFFSET = "x-stream-offset"
PREFETCH = 1000  # a stream sends whole chunks, mostly of some hundred messages


@dataclass(frozen=True, slots=True)
class StreamDelivery:
    """One message of a stream, as the broker sent it."""

    offset: int
    method: Basic.Deliver
    properties: BasicProperties
    body: bytes


class StreamLink:
    """One connection. Its errors (AMQPError, OSError) come up in `wait`. One thread only."""

    def __init__(self, parameters: Parameters, timeout: float) -> None:
        self.failure: BaseException | None = None
        self._timeout = timeout
        self._loop = IOLoop()
        self._connection = SelectConnection(
            parameters,
            on_open_callback=lambda _: self.wake(),
            on_open_error_callback=self.failed,
            on_close_callback=self.failed,
            custom_ioloop=self._loop,
        )
        self.expect(lambda: self._connection.is_open)

    def failed(self, _: Any, error: BaseException | str) -> None:
        if not isinstance(error, ChannelClosedByClient | ConnectionClosedByClient):
            self.failure = self.failure or (error if isinstance(error, BaseException) else AMQPError(error))
        self.wake()

    def wake(self, *_: Any) -> None:
        """Have `wait` look at its condition again."""
        self._loop.stop()

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Serve the connection until `condition()` is true; False if it is not within `seconds`."""
        expired: list[bool] = []

        def expire() -> None:
            expired.append(True)
            self.wake()

        timer = self._loop.call_later(seconds, expire)
        try:
            while not condition():
                if self.failure is not None:
                    raise self.failure
                if expired:
                    return False
                self._loop.start()
        finally:
            self._loop.remove_timeout(timer)
        return True

    def expect(self, condition: Callable[[], object]) -> None:
        """Wait for an answer of the broker; AMQPError if none comes."""
        if not self.wait(condition, self._timeout):
            raise AMQPError(f"no answer within {self._timeout:g} s")

    def channel(self) -> Channel:
        channel = self._connection.channel(on_open_callback=self.wake)
        channel.add_on_close_callback(self.failed)
        self.expect(lambda: channel.is_open)
        return channel

    def close(self) -> None:
        if self._connection.is_open:
            self._connection.close()
            try:
                self.expect(lambda: self._connection.is_closed)
            except (AMQPError, OSError):
                pass  # it was lost already
        self._loop.close()


class StreamAttachment:
    """One consumer on a channel of its own, attached somewhere in a stream: `where` is an offset, first or last."""

    def __init__(self, link: StreamLink, stream: str, where: int | str) -> None:
        self._link = link
        self._stream = stream
        self._refusal: BrokerError | None = None
        self._taken = 0
        self.waiting: deque[StreamDelivery] = deque()
        self._channel = link.channel()
        self._channel.basic_qos(prefetch_count=PREFETCH)
        self._channel.basic_consume(stream, self._delivered, arguments={OFFSET: where})

    def _delivered(self, _: Channel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        offset = (properties.headers or {}).get(OFFSET)
        if isinstance(offset, int):
            self.waiting.append(StreamDelivery(offset, method, properties, body))
        else:  # nothing was acknowledged, so a queue still has all of its messages
            self._refusal = BrokerError(f"{self._stream!r} is a queue and no stream: x-queue-type must be stream")
        self._link.wake()

    def has_more_within(self, seconds: float) -> bool:
        """Whether there is a message to take, if need be after `seconds`."""
        if not self.waiting:
            self._link.wait(lambda: self.waiting or self._refusal, seconds)
        if self._refusal:
            raise self._refusal
        return bool(self.waiting)

    def take(self) -> StreamDelivery:
        delivery = self.waiting.popleft()
        self._taken += 1
        if self._taken >= PREFETCH // 2:  # the broker sends on while we work on the other half
            self._acknowledge(delivery)
        return delivery

    def _acknowledge(self, delivery: StreamDelivery) -> None:
        self._channel.basic_ack(delivery.method.delivery_tag, multiple=True)
        self._taken = 0

    def ask_for_more(self, last: StreamDelivery) -> None:
        """Have what the stream holds beyond `last` in `waiting`; nothing is there only if it ends with `last`.

        The broker answers a channel in order: what it has to send for the new credit comes before the second answer.
        """
        answers: list[Any] = []

        def answered(frame: Any) -> None:
            answers.append(frame)
            self._link.wake()

        self._acknowledge(last)
        self._channel.basic_qos(prefetch_count=PREFETCH, callback=answered)
        self._link.expect(lambda: answers)

    def close(self) -> None:
        if self._channel.is_open:
            self._channel.close()
            self._link.wait(lambda: self._channel.is_closed, 1.0)
