"""RabbitMQ streams as logs with offsets: where one begins and ends, and what lies between. No JVM is needed here.

Over AMQP 0.9.1 a stream tells neither its first nor its last offset; both are learnt by attaching to it. An offset
below the first attaches to the first without a word, so the reader of a range looks for what is missing. Offsets
may have holes that never held a message (the broker keeps marks of its own in the log): lost is only what lies below
the first message of the stream.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pika import exceptions

from penstock.broker import Broker, reason_of
from penstock.clock import Clock, SystemClock
from penstock.errors import BrokerError, StreamDataLost
from penstock.spark.amqp.stream_link import StreamAttachment, StreamDelivery, StreamLink

log = logging.getLogger(__name__)
EMPTY_AFTER = 1.0  # seconds without a first message after which a stream is taken to be empty for now
END_WITHIN = 2.0  # seconds to follow a stream that grows while we look for its end: any place seen there will do
# Seconds: a consumer that attaches just when retention removes its offset may wait for ever.
ATTACH_AGAIN = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # between attempts to reach a broker that is away
_FINAL = (403, 404, 405, 406)  # access refused, not found, locked, no stream: waiting does not change that
_AWAY = "down or inaccessible"  # what a broker says, with "not found", of a stream while it starts: only the text tells
_FAILURES = (exceptions.AMQPError, ConnectionError, TimeoutError, socket.gaierror)
_REFUSALS = (exceptions.ProbableAuthenticationError, exceptions.ProbableAccessDeniedError)
T = TypeVar("T")


class StreamClient:
    """Reads streams over one connection, which it makes anew when it is lost.

    Order: a range comes in the order of its offsets, each message once, whatever happens to the connection.
    Loss: what retention has removed is refused (StreamDataLost) or, without `fail_on_loss`, counted and logged.
    Blocks: for `timeout` seconds without progress at most, then BrokerError.
    Threads: one thread only.
    """

    def __init__(
        self, broker: Broker, *, timeout: float = 60.0, fail_on_loss: bool = True, clock: Clock | None = None
    ) -> None:
        self._broker = broker
        self._timeout = timeout
        self._fail_on_loss = fail_on_loss
        self._clock: Clock = clock or SystemClock()
        self._link: StreamLink | None = None
        self.lost = 0  # offsets that were to be read and had been removed

    def earliest(self, stream: str, empty_after: float = EMPTY_AFTER) -> int | None:
        """The offset of the first message; None if the stream is empty."""
        return self._look(stream, "first", empty_after, lambda consumer: consumer.waiting[0].offset)

    def latest(self, stream: str, empty_after: float = EMPTY_AFTER, *, known: int = 0) -> int | None:
        """The offset after the last message; None if the stream is empty.

        Of a stream that grows it may be a little before the end, but not before `known` if it gets there.
        """
        until = self._clock.monotonic() + empty_after + END_WITHIN

        def follow(consumer: StreamAttachment) -> int:
            end = 0
            while consumer.waiting:
                delivery = consumer.take()
                end = delivery.offset + 1
                if not consumer.waiting and (end < known or self._clock.monotonic() < until):
                    consumer.ask_for_more(delivery)
            return end

        return self._look(stream, "last", empty_after, follow)

    def reaches(self, stream: str, offset: int, within: float = EMPTY_AFTER) -> bool:
        """Whether a stream has got as far as `offset`; one that was made anew has not."""
        return self._look(stream, offset, within, lambda _: True) is not None

    def read(self, stream: str, start: int, end: int) -> Iterator[StreamDelivery]:
        """The messages from `start` to before `end`; it waits until the stream has got that far."""
        following = start
        patience = _Patience(self._timeout, self._clock)
        while following < end:
            try:
                with self._attached(stream, following) as consumer:
                    while following < end:
                        if not consumer.has_more_within(ATTACH_AGAIN):
                            raise exceptions.AMQPError(f"stream {stream!r} gives nothing from offset {following} on")
                        delivery = consumer.take()
                        if delivery.offset > following:
                            self.miss(stream, following, min(delivery.offset, end))
                        if following <= delivery.offset < end:
                            yield delivery
                            patience.renew()
                        following = max(following, delivery.offset + 1)
            except _FAILURES as error:
                self._after(error, stream, patience)

    def miss(self, stream: str, start: int, end: int) -> int:
        """Account for a range that did not come: how many of its offsets were removed. StreamDataLost if that matters.

        Those that the stream still reaches back to are holes, and no loss.
        """
        first = self.earliest(stream, self._timeout)
        if first is None:
            raise BrokerError(f"stream {stream!r} at {self._broker} does not say where it begins")
        if first <= start:
            return 0
        lost = min(first, end) - start
        what = (
            f"stream {stream!r} begins at offset {first}, but offsets {start} to {start + lost - 1} were still to be "
            f"read: retention has removed them ({lost} messages at most)"
        )
        if self._fail_on_loss:
            raise StreamDataLost(f"{what}. Go on without them with option failOnDataLoss=false, or give the stream "
                                 "more retention and start a new checkpoint")  # fmt: skip
        self.lost += lost
        log.warning(
            "Stream has lost messages. stream=%s from=%d to=%d first=%d", stream, start, start + lost - 1, first
        )
        return lost

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @contextmanager
    def _attached(self, stream: str, where: int | str) -> Iterator[StreamAttachment]:
        if self._link is None:
            self._link = StreamLink(self._broker.parameters(), self._timeout)
        attachment = StreamAttachment(self._link, stream, where)
        yield attachment
        attachment.close()  # after a failure the whole link goes

    def _look(self, stream: str, where: int | str, within: float, look: Callable[[StreamAttachment], T]) -> T | None:
        """What `look` makes of the stream from `where` on; None if there is nothing within that time."""
        until = self._clock.monotonic() + within
        patience = _Patience(self._timeout, self._clock)
        while True:
            try:
                with self._attached(stream, where) as consumer:
                    left = until - self._clock.monotonic()
                    if consumer.has_more_within(min(left, ATTACH_AGAIN)):
                        return look(consumer)
                    if left <= ATTACH_AGAIN:
                        return None
            except _FAILURES as error:
                self._after(error, stream, patience)

    def _after(self, error: Exception, stream: str, patience: "_Patience") -> None:
        """Wait before the next attempt; BrokerError if none would help, or there were enough."""
        self.close()
        reason = reason_of(error)
        if isinstance(error, exceptions.ChannelClosedByBroker) and error.reply_code in _FINAL and _AWAY not in reason:
            raise BrokerError(f"stream {stream!r} at {self._broker} cannot be read: {reason}") from None
        if _is_refusal(error):
            raise BrokerError(f"{self._broker}: {reason}") from None
        if not patience.wait():
            raise BrokerError(f"{self._broker} was away or silent for {self._timeout:g} s: {reason}") from None


def _is_refusal(error: BaseException) -> bool:
    """Whether the broker does not know us; pika wraps what it was told."""
    inner = [getattr(error, "exception", None), *getattr(error, "exceptions", ()), *error.args]
    return isinstance(error, _REFUSALS) or any(_is_refusal(one) for one in inner if isinstance(one, BaseException))


class _Patience:
    """Growing pauses between attempts, and an end to them `timeout` after the last success."""

    def __init__(self, timeout: float, clock: Clock) -> None:
        self._timeout = timeout
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        self._since = self._clock.monotonic()
        self._pause = FIRST_PAUSE

    def wait(self) -> bool:
        """Pause; False if there were attempts enough."""
        if self._clock.monotonic() - self._since >= self._timeout:
            return False
        threading.Event().wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return True
