"""The way back to the broker: acks, and messages returned or refused, over one channel at a time.

Workers finish out of order. Everything below the oldest unsettled delivery is acknowledged with one
`ack(tag, multiple=True)`; what is settled beyond it is acknowledged singly, because a delivery that is not acknowledged
takes a place in the prefetch window.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from pika.channel import Channel

from penstock.consume.delivery import Delivery, Generation

OFFSET = "x-stream-offset"


class DeliveryAckTracker:
    """The settled deliveries of one channel. Does no I/O; one thread only."""

    __slots__ = ("_due", "_last", "_settled", "oldest")

    def __init__(self) -> None:
        self.oldest = 1  # the oldest tag that is not settled; a channel counts its deliveries from 1
        self._last = 0  # the newest tag that was delivered
        self._settled: set[int] = set()  # those beyond the oldest
        self._due: list[int] = []  # those that have to be acknowledged

    @property
    def outstanding(self) -> int:
        """How many deliveries are not settled yet."""
        return self._last - self.oldest + 1 - len(self._settled)

    def is_outstanding(self, tag: int) -> bool:
        return self.oldest <= tag <= self._last and tag not in self._settled

    def delivered(self, tag: int) -> None:
        """The broker sent `tag`. Tags that the client library swallowed in between count as settled by it."""
        if tag <= self._last:
            raise ValueError(f"delivery tag {tag} came after {self._last}")
        self._settled.update(range(self._last + 1, tag))
        self._last = tag

    def settle(self, tag: int, acknowledge: bool) -> None:
        """`tag` is done with: `acknowledge` it, or the caller has rejected it already.

        ValueError if it was never delivered or settled before: the broker closes the channel on such an ack.
        """
        if not self.is_outstanding(tag):
            raise ValueError(f"delivery tag {tag} is not outstanding")
        self._settled.add(tag)
        if acknowledge:
            self._due.append(tag)

    def take(self) -> tuple[int | None, list[int]]:
        """The tag to acknowledge with `multiple=True`, if any, and those beyond it to acknowledge singly.

        Both are then the caller's duty. The first is itself one that has to be acknowledged: the broker refuses a tag
        that was acknowledged or rejected before.
        """
        while self.oldest in self._settled:
            self._settled.remove(self.oldest)
            self.oldest += 1
        due, self._due = self._due, []
        newest = max((tag for tag in due if tag < self.oldest), default=None)
        return newest, sorted(tag for tag in due if tag > self.oldest)


class ConsumerStreamPosition:
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

    def acknowledged(self, oldest: int) -> None:
        """Everything before the tag `oldest` is done with."""
        while self._delivered and self._delivered[0][0] < oldest:
            self._resume = self._delivered.popleft()[1] + 1

    def lose(self) -> None:
        self._delivered.clear()

    def arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        return args if self._resume is None else {**args, OFFSET: self._resume}


class DeliveryAcknowledger:
    """Settles deliveries. I/O thread only.

    Whatever is asked for a delivery of a lost channel, or for one that is settled, is left undone: the broker has the
    first back already, and the second happens where messages are acknowledged early.
    """

    def __init__(self, position: ConsumerStreamPosition | None) -> None:
        self.channel: Channel | None = None
        self.generation = Generation()
        self.tracker = DeliveryAckTracker()
        self.frames = 0
        self._position = position

    def lose(self) -> None:
        """The channel is gone, and the broker has everything back that was not acknowledged."""
        self.channel = None
        self.generation.lost = True
        self.generation = Generation()
        self.tracker = DeliveryAckTracker()
        if self._position:
            self._position.lose()

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

    def nack(self, delivery: Delivery, requeue: bool) -> None:
        """Leave it to its queue as it was, or let the broker dead-letter it.

        A stream allows no nack: what goes back it has still, and what it cannot dead-letter is skipped.
        """
        if self._position is not None and not requeue:
            self.ack(delivery)
        elif self.is_open(delivery):
            self.tracker.settle(delivery.tag, False)
            channel = self.writable()
            if self._position is None and channel is not None:
                channel.basic_nack(delivery.tag, requeue=requeue)

    def flush(self) -> None:
        """Send the acks of everything that was settled since the last time."""
        channel = self.writable()
        if channel is None:
            return
        newest, rest = self.tracker.take()
        if newest is not None:
            channel.basic_ack(newest, multiple=True)
        for tag in rest:
            channel.basic_ack(tag)
        self.frames += len(rest) + (newest is not None)
        if self._position:
            self._position.acknowledged(self.tracker.oldest)
