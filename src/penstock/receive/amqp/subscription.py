"""One consumer as the I/O thread sees it: from the broker's deliveries to the workers, from outcomes to acks."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pika import BasicProperties
from pika.channel import Channel
from pika.spec import Basic

from penstock.clock import Clock
from penstock.receive.amqp.acks import AckTracker
from penstock.receive.amqp.attempts import (
    EXCHANGE,
    ROUTING_KEY,
    attempt_of,
    for_another_attempt,
    for_the_dead_letters,
    returned_too_often,
)
from penstock.receive.amqp.backoff import Backoff, BackoffPolicy
from penstock.receive.amqp.batches import Batcher, Timers
from penstock.receive.amqp.declarations import Consumer
from penstock.receive.amqp.delivery import Delivery, Generation, Job, Outcome, Verdict, each
from penstock.receive.amqp.message import Message
from penstock.receive.amqp.options import pool_size
from penstock.receive.amqp.publisher import Publisher, with_headers
from penstock.receive.amqp.routes import RouteTable
from penstock.receive.amqp.streams import StreamPosition
from penstock.receive.amqp.workers import Reports, Workers

log = logging.getLogger(__name__)

ACK_PATIENCE = 0.05  # how long an ack may wait for the gap before it to close
# Where the broker takes no dead letter (no such exchange, no queue behind it) the message stays with us meanwhile.
DEAD_LETTER_AGAIN = BackoffPolicy(first=1.0, limit=30.0)


class Link(Timers, Protocol):
    """What a subscription needs of the connection."""

    publisher: Publisher

    def call(self, callback: Callable[[], None]) -> None:
        """Call back soon on the I/O thread; from any thread."""
        ...


class Subscription:
    """One consumer. I/O thread only, but for what is read by `stats`.

    Every delivery carries the generation of its channel: what a worker reports for a channel that is lost is counted
    and dropped, since the broker delivers the message again and refuses an ack for it.
    """

    def __init__(self, consumer: Consumer, link: Link, clock: Clock) -> None:
        self.consumer = consumer
        self.name = consumer.name
        self.table = RouteTable(consumer)
        self.size = pool_size(consumer.pool, self.table.largest_batch)
        self.auto_ack = consumer.pool.auto_ack
        self.position = StreamPosition() if consumer.queue.kind == "stream" else None
        # Order, or no way back to the broker: retries are the worker's own.
        self.in_place = self.size.workers == 1 or self.auto_ack or self.position is not None
        self.reports = Reports(lambda: link.call(self.drain))
        self.workers: Workers | None = None
        self.backoff = Backoff(BackoffPolicy(first=0.1, limit=10.0))
        self.channel: Channel | None = None
        self.consuming = False
        self.ack_frames = self.restores = 0
        self.handed = 0  # jobs with the workers
        self._link = link
        self._clock = clock
        self._tracker = AckTracker()
        self._generation = Generation(1)
        self._waiting: deque[Job] = deque()
        self._batcher = Batcher(link, self._enqueue)
        self._held: dict[Delivery, tuple[object, Callable[[], None]]] = {}
        self._publishing = 0
        self._ack_timer: object | None = None
        self._hold_acks = max(1, self.size.prefetch // 4)
        self._stopping: Callable[[], None] | None = None

    # The channel's life ------------------------------------------------------------------------------------------

    def attach(self, channel: Channel) -> None:
        """Use `channel`, which is new: its tags count from 1."""
        self.channel = channel

    def lose(self) -> None:
        """The channel is gone, and the broker has everything back that was not acknowledged."""
        self._generation.lost = True
        self._generation = Generation(self._generation.number + 1)
        self._tracker = AckTracker()
        self.channel = None
        self.consuming = False
        self._waiting.clear()
        self._batcher.clear()
        for timer, _ in self._held.values():
            self._link.cancel(timer)
        self._held.clear()
        self._publishing = 0
        if self.position:
            self.position.lose()
        self._tell_if_quiet()

    def arguments(self) -> dict[str, Any]:
        """The arguments to consume with; a stream goes on where it was."""
        args = dict(self.consumer.pool.args)
        return self.position.arguments(args) if self.position else args

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    @property
    def in_flight(self) -> int:
        return self._tracker.outstanding

    # From the broker to the workers --------------------------------------------------------------------------------

    def on_delivery(self, channel: Channel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        tag: int = method.delivery_tag
        self._tracker.delivered(tag)
        if self._stopping is not None:
            self._give_back(tag)
            return
        headers, table = properties.headers, self.table
        event_type: Any = (headers or {}).get(table.header) if table.header else properties.type
        route = table.by_type.get(event_type, table.default)
        counts = route.counts
        counts.delivered += 1
        if method.redelivered:
            counts.redelivered += 1
        message = Message(
            body, event_type or "", 1, method.redelivered, method.exchange, method.routing_key, properties
        )
        delivery = Delivery(tag, self._generation, message, route, self._clock.monotonic())
        if headers:
            message.attempt = attempt_of(headers)
            message.exchange = headers.get(EXCHANGE, message.exchange)
            message.routing_key = headers.get(ROUTING_KEY, message.routing_key)
            if self.position:
                self.position.delivered(tag, headers)
            if returned_too_often(headers, route.options.max_deliveries):
                self._give_up(delivery, f"came back unacknowledged more than {route.options.max_deliveries} times")
                return
        if not route.handled:
            self._give_up(delivery, f"no handler for event type {event_type!r}")
        elif route.batch_size:
            self._batcher.add(delivery)
        else:
            self._enqueue(delivery)

    def _enqueue(self, job: Job) -> None:
        if self.handed < self.size.buffer:
            self._hand_over(job)
        else:
            self._waiting.append(job)

    def _hand_over(self, job: Job) -> None:
        self.handed += 1
        if self.auto_ack:
            for delivery in job if isinstance(job, list) else (job,):
                self._tracker.settle(delivery.tag, True)
            self._flush()
        assert self.workers is not None
        self.workers.submit(job)

    # From the workers to the broker --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Settle what the workers have reported, hand over what waited for them, and acknowledge at once."""
        generation, settle = self._generation, self._tracker.settle
        now = self._clock.monotonic()
        for job, seconds, outcome in self.reports.take():
            self.handed -= 1
            if outcome is None and not isinstance(job, list) and job.generation is generation and not self.auto_ack:
                # The way of nearly every message, without a call.
                route = job.route
                route.counts.acked += 1
                route.handler_seconds.observe(seconds)
                route.settle_seconds.observe(now - job.received)
                route.counts.retried += job.retries
                settle(job.tag, True)
            else:
                self._settle_job(job, seconds, outcome, now)
        while self._waiting and self.handed < self.size.buffer:
            self._hand_over(self._waiting.popleft())
        self._flush()
        self._tell_if_quiet()

    def _settle_job(self, job: Job, seconds: float, outcomes: Any, now: float) -> None:
        deliveries = job if isinstance(job, list) else [job]
        if outcomes is None or isinstance(outcomes, list) or outcomes.verdict is not Verdict.RETURN:
            deliveries[0].route.handler_seconds.observe(seconds)
        for delivery, outcome in zip(deliveries, each(deliveries, outcomes)):
            self._settle(delivery, outcome, now)

    def _settle(self, delivery: Delivery, outcome: Outcome | None, now: float) -> None:
        route, tag = delivery.route, delivery.tag
        counts = route.counts
        counts.retried += delivery.retries
        stale = delivery.generation is not self._generation
        if stale and not self.auto_ack:
            counts.stale += 1
        elif outcome is None:
            counts.acked += 1
            route.settle_seconds.observe(now - delivery.received)
            if not self.auto_ack:
                self._tracker.settle(tag, True)
        elif outcome.verdict is Verdict.RETURN:
            counts.nacked += 1
            self._give_back(tag)
        elif (wait := route.wait_before_retry(outcome, delivery.message.attempt)) is None:
            self._give_up(delivery, outcome.reason)
        else:
            counts.retried += 1
            again = self._try_again if outcome.counted else self._give_back_later
            self._hold(delivery, wait, lambda: again(delivery))

    def _hold(self, delivery: Delivery, wait: float, action: Callable[[], None]) -> None:
        """Do `action` after `wait` seconds; the delivery stays unacknowledged until then. When stopping, do it now."""
        if self._stopping is not None or not wait:
            action()
            return

        def due() -> None:
            del self._held[delivery]
            action()
            self._flush()

        self._held[delivery] = self._link.call_later(wait, due), action

    def _give_back(self, tag: int) -> None:
        """Leave the message to the queue. A stream never lost it, and what was acked early cannot go back."""
        if self.auto_ack and not self._tracker.is_outstanding(tag):
            return
        self._tracker.settle(tag, False)
        if self.channel is not None and self.position is None and self.channel.is_open:
            self.channel.basic_nack(tag, requeue=True)

    def _give_back_later(self, delivery: Delivery) -> None:
        self._give_back(delivery.tag)

    def _try_again(self, delivery: Delivery) -> None:
        """Send the message to the end of its queue with its attempts counted, then acknowledge the old one."""
        message = delivery.message
        headers = for_another_attempt(message.headers, message.attempt, message.exchange, message.routing_key)

        def sent() -> None:
            self._tracker.settle(delivery.tag, True)

        self._publish(delivery, "", self.consumer.queue.name, headers, sent, lambda: self._give_back(delivery.tag))

    def _give_up(self, delivery: Delivery, reason: str, tries: int = 1) -> None:
        """Dead-letter the message with the reason."""
        route, message, tag = delivery.route, delivery.message, delivery.tag
        if tries == 1:
            log.warning(
                "Message given up. queue=%s event_type=%s attempt=%d reason=%s",
                self.consumer.queue.name, route.label, message.attempt, reason,
            )  # fmt: skip
        if route.dead_letters is None:
            # The broker knows where to (a policy may say so); only the reason gets no further than our log.
            route.counts.dead_lettered += 1
            self._refuse(tag)
            return
        headers = for_the_dead_letters(
            message.headers, queue=self.consumer.queue.name, attempt=message.attempt, reason=reason,
            exchange=message.exchange, routing_key=message.routing_key,
        )  # fmt: skip

        def sent() -> None:
            route.counts.dead_lettered += 1
            if self._tracker.is_outstanding(tag):
                self._tracker.settle(tag, True)

        def failed() -> None:
            if self._stopping is not None:
                self._give_back(tag)
                return
            wait = DEAD_LETTER_AGAIN.delay(tries, 0.0)
            self._hold(delivery, wait, lambda: self._give_up(delivery, reason, tries + 1))

        key = route.dead_letters.routing_key
        key = message.routing_key if key is None else key
        self._publish(delivery, route.dead_letters.exchange, key, headers, sent, failed)

    def _refuse(self, tag: int) -> None:
        if self.auto_ack:
            if self._tracker.is_outstanding(tag):
                self._tracker.settle(tag, True)
        elif self.position is not None:
            self._tracker.settle(tag, True)
        else:
            self._tracker.settle(tag, False)
            if self.channel is not None and self.channel.is_open:
                self.channel.basic_nack(tag, requeue=False)
        self._flush_soon()

    def _publish(
        self,
        delivery: Delivery,
        exchange: str,
        key: str,
        headers: dict[str, Any],
        sent: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._publishing += 1

        def done(taken: bool) -> None:
            if delivery.generation is not self._generation:
                return
            self._publishing -= 1
            (sent if taken else failed)()
            self._flush_soon()
            self._tell_if_quiet()

        properties = with_headers(delivery.message.properties, headers)
        self._link.publisher.publish(exchange, key, delivery.message.body, properties, done)

    def _flush_soon(self) -> None:
        """Acknowledge after this turn of the loop, together with what else it settles."""
        if self._ack_timer is None:
            self._ack_timer = self._link.call_later(0.0, self._flush_all_due)

    def _flush_all_due(self) -> None:
        self._ack_timer = None
        self._flush()

    def _flush(self, everything: bool = False) -> None:
        """Acknowledge the prefix with one frame, and the rest when it takes too much of the prefetch window."""
        channel, tracker = self.channel, self._tracker
        if channel is None or not channel.is_open:
            return
        tag = tracker.take_prefix()
        if tag is not None:
            channel.basic_ack(tag, multiple=True)
            self.ack_frames += 1
            if self.position:
                self.position.acknowledged(tag)
        if tracker.held:
            if everything or tracker.held >= self._hold_acks:
                for tag in tracker.take_rest():
                    channel.basic_ack(tag)
                    self.ack_frames += 1
            elif self._ack_timer is None:
                self._ack_timer = self._link.call_later(ACK_PATIENCE, self._patience_is_over)

    def _patience_is_over(self) -> None:
        self._ack_timer = None
        self._flush(everything=True)

    # Stopping ------------------------------------------------------------------------------------------------------

    def stop(self, quiet: Callable[[], None]) -> None:
        """Take nothing new, give back what no worker has begun; `quiet()` when nothing is in hand any more."""
        self._stopping = quiet
        assert self.workers is not None
        self.workers.stop()
        if self.channel is not None and self.channel.is_open and self.consuming and self.position is None:
            # Until the broker confirms, pika sends back what still comes. (It must not do so to a stream.)
            self.channel.basic_cancel(self.name, callback=lambda _: self._cancelled())
        else:
            self.consuming = False
        for job in self._waiting:
            for delivery in job if isinstance(job, list) else (job,):
                delivery.route.counts.nacked += 1
                self._give_back(delivery.tag)
        self._waiting.clear()
        for delivery in self._batcher.clear():
            delivery.route.counts.nacked += 1
            self._give_back(delivery.tag)
        held, self._held = self._held, {}
        for timer, action in held.values():
            self._link.cancel(timer)
            action()
        self._flush(everything=True)
        self._tell_if_quiet()

    def _cancelled(self) -> None:
        self.consuming = False
        self._tell_if_quiet()

    def flush_everything(self) -> None:
        """Acknowledge whatever is settled, before the channel closes."""
        self._flush(everything=True)

    def _tell_if_quiet(self) -> None:
        if self._stopping is None or self.handed or self._publishing or self.consuming:
            return
        self._flush(everything=True)
        self._stopping()
