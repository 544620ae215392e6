"""The way back to the broker: acks, and messages returned or refused, over one channel at a time."""

from pika.channel import Channel

from penstock.consume.acks import AckTracker
from penstock.consume.batches import Timers
from penstock.consume.delivery import Delivery, Generation
from penstock.consume.stream_positions import StreamPosition

PATIENCE = 0.05  # seconds that an ack may wait for the gap before it to close


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
