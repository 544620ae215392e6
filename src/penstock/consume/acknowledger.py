"""The way back to the broker: acks, and messages returned or refused, over one channel at a time.

Workers finish out of order. Everything below the oldest unsettled delivery can be acknowledged with one
`ack(tag, multiple=True)`; what is settled beyond it waits until the gap closes or is acknowledged singly, because a
delivery that is not acknowledged takes a place in the prefetch window.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from pika.channel import Channel

from penstock.consume.batches import Timers
from penstock.consume.delivery import Delivery, Generation

PATIENCE = 0.05  # seconds that an ack may wait for the gap before it to close
OFFSET = "x-stream-offset"


class AckTracker:
    """The settled deliveries of one channel. Does no I/O; one thread only."""

    __slots__ = ("_last", "_next", "_settled", "held")

    def __init__(self) -> None:
        self._next = 1  # the oldest tag that is not settled; a channel counts its deliveries from 1
        self._last = 0  # the newest tag that was delivered
        self._settled: dict[int, bool] = {}  # settled beyond _next: True if it still has to be acknowledged
        self.held = 0  # how many of _settled have to be acknowledged

    @property
    def outstanding(self) -> int:
        """How many deliveries are not settled yet."""
        return self._last - self._next + 1 - len(self._settled)

    def is_outstanding(self, tag: int) -> bool:
        return self._next <= tag <= self._last and tag not in self._settled

    def delivered(self, tag: int) -> None:
        """The broker sent `tag`. Tags that the client library swallowed in between count as settled by it."""
        if tag != self._last + 1:
            if tag <= self._last:
                raise ValueError(f"delivery tag {tag} came after {self._last}")
            for swallowed in range(self._last + 1, tag):
                self._settled[swallowed] = False
        self._last = tag

    def settle(self, tag: int, acknowledge: bool) -> None:
        """`tag` is done with: `acknowledge` it, or the caller has rejected it already.

        ValueError if it was never delivered or settled before: the broker closes the channel on such an ack.
        """
        if not self.is_outstanding(tag):
            raise ValueError(f"delivery tag {tag} is not outstanding")
        self._settled[tag] = acknowledge
        if acknowledge:
            self.held += 1

    def take_prefix(self) -> int | None:
        """The tag to acknowledge with `multiple=True`, if any; its acknowledgement is then the caller's duty.

        It is itself a tag that has to be acknowledged: the broker knows no rejected tag any more, and refuses it.
        """
        newest = None
        oldest, settled = self._next, self._settled
        while (acknowledge := settled.pop(oldest, None)) is not None:
            if acknowledge:
                newest = oldest
                self.held -= 1
            oldest += 1
        self._next = oldest
        return newest

    def take_rest(self) -> list[int]:
        """The tags beyond the prefix that have to be acknowledged one by one; the caller does so now."""
        if not self.held:
            return []
        rest = sorted(tag for tag, acknowledge in self._settled.items() if acknowledge)
        for tag in rest:
            self._settled[tag] = False
        self.held = 0
        return rest


class StreamPosition:
    """The offset of a stream to go on from after a reconnect. I/O thread only.

    A stream keeps what was read; an ack is only credit for more. Within one process we resume after the last
    acknowledged message; a new process begins where its arguments say (`x-stream-offset`).
    """

    def __init__(self) -> None:
        self._resume: int | None = None
        self._delivered: deque[tuple[int, int]] = deque()  # tags and offsets not yet acknowledged

    def delivered(self, tag: int, headers: Mapping[str, Any]) -> None:
        offset = headers.get(OFFSET)
        if isinstance(offset, int):
            self._delivered.append((tag, offset))

    def acknowledged(self, tag: int) -> None:
        """Everything up to `tag` is done with."""
        while self._delivered and self._delivered[0][0] <= tag:
            self._resume = self._delivered.popleft()[1] + 1

    def lose(self) -> None:
        self._delivered.clear()

    def arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        return args if self._resume is None else {**args, OFFSET: self._resume}


class Acknowledger:
    """Settles deliveries. I/O thread only.

    Whatever is asked for a delivery of a lost channel, or for one that is settled, is left undone: the broker has the
    first back already, and the second happens where messages are acknowledged early.
    """

    def __init__(self, timers: Timers, prefetch: int, position: StreamPosition | None) -> None:
        self.channel: Channel | None = None
        self.generation = Generation(1)
        self.tracker = AckTracker()
        self.frames = 0
        self._timers = timers
        self._position = position
        self._hold_at_most = max(1, prefetch // 4)  # unacknowledged messages take places in the prefetch window
        self._soon: object | None = None
        self._patience: object | None = None

    def lose(self) -> None:
        """The channel is gone, and the broker has everything back that was not acknowledged."""
        self.channel = None
        self.generation.lost = True
        self.generation = Generation(self.generation.number + 1)
        self.tracker = AckTracker()
        if self._position:
            self._position.lose()
        for timer in (self._soon, self._patience):
            if timer is not None:
                self._timers.cancel(timer)
        self._soon = self._patience = None

    def writable(self) -> Channel | None:
        """The channel, if it takes a frame. It may think itself open while its connection is closed already."""
        channel = self.channel
        return channel if channel is not None and channel.is_open and channel.connection.is_open else None

    def is_open(self, delivery: Delivery) -> bool:
        """Say whether the broker waits for a word about `delivery`."""
        return delivery.generation is self.generation and self.tracker.is_outstanding(delivery.tag)

    def ack(self, delivery: Delivery) -> None:
        """It is done with. The ack goes out with the next flush."""
        if self.is_open(delivery):
            self.tracker.settle(delivery.tag, True)

    def give_back(self, delivery: Delivery) -> None:
        """Leave it to the queue as it was. A stream has it still, and allows no nack."""
        if self.is_open(delivery):
            self.tracker.settle(delivery.tag, False)
            channel = self.writable()
            if self._position is None and channel is not None:
                channel.basic_nack(delivery.tag, requeue=True)

    def refuse(self, delivery: Delivery) -> None:
        """Let the broker dead-letter it."""
        if self._position is not None:
            self.ack(delivery)
        elif self.is_open(delivery):
            self.tracker.settle(delivery.tag, False)
            channel = self.writable()
            if channel is not None:
                channel.basic_nack(delivery.tag, requeue=False)

    def flush(self, everything: bool = False) -> None:
        """Acknowledge the prefix with one frame, and the rest if it takes too much of the window."""
        channel, tracker = self.writable(), self.tracker
        if channel is None:
            return
        newest = tracker.take_prefix()
        if newest is not None:
            channel.basic_ack(newest, multiple=True)
            self.frames += 1
            if self._position:
                self._position.acknowledged(newest)
        if tracker.held:
            if everything or tracker.held >= self._hold_at_most:
                for tag in tracker.take_rest():
                    channel.basic_ack(tag)
                    self.frames += 1
            elif self._patience is None:
                self._patience = self._timers.call_later(PATIENCE, self._lose_patience)

    def flush_soon(self) -> None:
        """Flush after this turn of the loop, together with what else it settles."""
        if self._soon is None:
            self._soon = self._timers.call_later(0.0, self._flush_now)

    def _flush_now(self) -> None:
        self._soon = None
        self.flush()

    def _lose_patience(self) -> None:
        self._patience = None
        self.flush(everything=True)
