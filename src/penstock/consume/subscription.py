"""One consumer as the I/O thread sees it: deliveries to the workers, outcomes to the broker."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pika import BasicProperties
from pika.channel import Channel
from pika.spec import Basic

from penstock.clock import Clock
from penstock.consume.acknowledger import ConsumerStreamPosition, DeliveryAcknowledger
from penstock.consume.attempts import (
    attempt_of,
    dead_letter_headers,
    origin_of_message,
    retry_headers,
    returned_too_often,
)
from penstock.consume.backoff_policy import BackoffPolicy, RetryDelay
from penstock.consume.batches import DeliveryTimers, MessageBatcher
from penstock.consume.consumer_options import pool_size
from penstock.consume.declarations import Consumer
from penstock.consume.delivery import RETURNED, Delivery, Job, Verdict
from penstock.consume.message import MAX_RETRY_DELAY, Message
from penstock.consume.publisher import Done, properties_with_message_headers
from penstock.consume.routes import ConsumerRoutes
from penstock.consume.unreadable_headers import UnreadableHeaders
from penstock.consume.worker_pool import ConsumerReports, ConsumerWorkers, PoolSettings

log = logging.getLogger(__name__)

# A message that the dead letters do not take (no such exchange, no queue behind it) stays unacknowledged until then.
DEAD_LETTER_AGAIN = BackoffPolicy(first=1.0, limit=30.0, jitter=0.0)


class SubscriptionPort(DeliveryTimers, Protocol):
    """What a subscription needs of the connection."""

    def call(self, callback: Callable[[], None]) -> None:
        """Call back soon on the I/O thread; from any thread."""
        ...

    def publish(self, exchange: str, key: str, body: bytes, properties: BasicProperties, done: Done) -> None:
        """Send a message; `done` is told whether a queue has it."""
        ...


class Subscription:
    """One consumer. I/O thread only, but for what `stats` reads."""

    def __init__(self, consumer: Consumer, port: SubscriptionPort, clock: Clock) -> None:
        self.consumer = consumer
        self.name = consumer.name
        self.table = ConsumerRoutes(consumer)
        self.size = pool_size(consumer.pool, self.table.largest_batch)
        self.early_ack = consumer.pool.auto_ack
        self.position = ConsumerStreamPosition() if consumer.queue.kind == "stream" else None
        self.acks = DeliveryAcknowledger(self.position)
        self.reports = ConsumerReports(lambda: port.call(self.drain))
        self.workers: ConsumerWorkers | None = None
        self.backoff = RetryDelay(BackoffPolicy(first=0.1, limit=10.0))
        self.consuming = False
        self.restores = 0
        self.handed = 0  # jobs with the workers
        self._port = port
        self._clock = clock
        # What is acknowledged before its turn must be little. Of the rest the broker sends no more than the prefetch,
        # and the more the workers can take without asking us, the less often the threads must change places.
        self._room = self.size.buffer if self.early_ack else self.size.prefetch
        self._waiting: deque[Job] = deque()  # jobs that the workers' buffer has no room for; bounded by the prefetch
        self._batcher = MessageBatcher(port, self._enqueue)
        self._held: dict[Delivery, tuple[object, Callable[[], None]]] = {}  # what waits for its next attempt
        self._publishing = 0
        self.stopping = False
        self.quiet = threading.Event()  # stopping, and nothing is in hand any more

    def pool_settings(self) -> PoolSettings:
        return PoolSettings(
            name=self.name,
            workers=self.size.workers,
            calls=tuple(options.call for options in self.consumer.options),
            reports=self.reports,
            clock=self._clock,
            # For order, or for want of a way back to the broker, retries are the worker's own.
            in_place=self.size.workers == 1 or self.early_ack or self.position is not None,
            finish_all=self.early_ack,
        )

    def lose(self) -> None:
        """The channel is gone, and with it everything that no worker has begun: the broker sends it again."""
        self.acks.lose()
        self.consuming = False
        self._waiting.clear()
        self._batcher.clear()
        for timer, _ in self._held.values():
            self._port.cancel(timer)
        self._held.clear()
        self._publishing = 0
        self._note_if_quiet()

    def on_consuming(self) -> None:
        """The broker sends from now on."""
        self.consuming = True
        self.backoff.succeeded()
        if self.stopping:  # we were told to stop while it made up its mind
            self._cancel()

    def arguments(self) -> dict[str, Any]:
        """The arguments to consume with; a stream goes on where it was."""
        args = dict(self.consumer.pool.args)
        return self.position.arguments(args) if self.position else args

    @property
    def in_flight(self) -> int:
        return self.acks.tracker.outstanding

    # To the workers

    def on_delivery(self, channel: Channel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        tag: int = method.delivery_tag
        acks = self.acks
        acks.tracker.delivered(tag)
        headers, table = properties.headers, self.table
        event_type: Any = (headers or {}).get(table.header) if table.header else properties.type
        if not isinstance(event_type, str):  # a header may hold anything
            event_type = ""
        route = table.by_type.get(event_type, table.default)
        message = Message(body, event_type, 1, method.redelivered, method.exchange, method.routing_key, properties)
        delivery = Delivery(tag, acks.generation, message, route, self._clock.monotonic())
        if self.stopping:
            self.acks.nack(delivery, requeue=True)
            return
        counts = route.counts
        counts.delivered += 1
        if message.redelivered:
            counts.redelivered += 1
        if headers:
            message.attempt = attempt_of(headers)
            message.exchange, message.routing_key = origin_of_message(headers, message.exchange, message.routing_key)
            if self.position:
                self.position.delivered(tag, headers)
            if isinstance(headers, UnreadableHeaders):
                self._give_up(delivery, headers.reason)
                return
            # A publisher may send any count: the broker's own begins with the second delivery.
            if message.redelivered and returned_too_often(headers, route.options.max_deliveries):
                self._give_up(delivery, f"came back unacknowledged {route.options.max_deliveries} times")
                return
        if route.handled:
            self._batcher.add(delivery)
        else:
            self._give_up(delivery, f"no handler for event type {event_type!r}")

    def _enqueue(self, job: Job) -> None:
        self._waiting.append(job)
        self._hand_over()

    def _hand_over(self) -> None:
        assert self.workers is not None
        while self._waiting and self.handed < self._room:
            job = self._waiting.popleft()
            self.handed += 1
            if self.early_ack:
                for delivery in job:
                    self.acks.ack(delivery)
                self.reports.wake()  # `drain` sends the acks of all that is handed over until then
            self.workers.submit(job)

    # From the workers

    def drain(self) -> None:
        """Settle what the workers have reported, hand over what waited for them, and acknowledge."""
        now = self._clock.monotonic()
        for job, seconds in self.reports.take():
            self.handed -= 1
            if job[0].outcome is not RETURNED:
                job[0].route.handler_seconds.observe(seconds)
            for delivery in job:
                self._settle(delivery, now)
        self._hand_over()
        self.acks.flush()
        self._note_if_quiet()

    def _settle(self, delivery: Delivery, now: float) -> None:
        route, outcome = delivery.route, delivery.outcome
        counts = route.counts
        counts.retried += delivery.retries
        if delivery.generation is not self.acks.generation and not self.early_ack:
            counts.stale += outcome is not RETURNED  # what was not begun has not been handled in vain
        elif outcome is None:
            counts.acked += 1
            route.settle_seconds.observe(now - delivery.received)
            self.acks.ack(delivery)
        elif outcome.verdict is Verdict.RETURN:
            self._give_back(delivery)
        elif (wait := route.wait_before_retry(outcome, delivery.message.attempt)) is None:
            self._give_up(delivery, outcome.reason)
        else:
            counts.retried += 1
            # The broker closes the channel of what is unacknowledged for too long, however patient we are.
            here = not outcome.counted and now + wait - delivery.received <= MAX_RETRY_DELAY
            failed = delivery.message.attempt - (not outcome.counted)
            self._hold(delivery, wait, lambda: self._repeat(delivery) if here else self._try_again(delivery, failed))

    def _hold(self, delivery: Delivery, wait: float, action: Callable[[], None]) -> None:
        """Do `action` after `wait` seconds; the delivery stays unacknowledged until then. When stopping, do it now."""
        if self.stopping:
            action()
            return

        def due() -> None:
            del self._held[delivery]
            action()

        self._held[delivery] = self._port.call_later(wait, due), action

    def _give_back(self, delivery: Delivery) -> None:
        delivery.route.counts.nacked += 1
        self.acks.nack(delivery, requeue=True)

    def _repeat(self, delivery: Delivery) -> None:
        """Let a worker have it once more. The broker is not told, since a quorum queue would count it as a delivery."""
        if self.stopping:
            self._give_back(delivery)
        else:
            self._batcher.add(delivery)

    def _try_again(self, delivery: Delivery, failed: int) -> None:
        """Send the message to the end of its queue with its attempts counted, then acknowledge the old one."""
        message = delivery.message
        headers = retry_headers(message.headers, failed, message.exchange, message.routing_key)

        def done(taken: bool) -> None:
            if taken:
                self.acks.ack(delivery)
            else:
                message.attempt = failed + 1
                self._repeat(delivery)

        self._publish(delivery, "", self.consumer.queue.name, headers, done)

    def _give_up(self, delivery: Delivery, reason: str, tries: int = 1) -> None:
        """Dead-letter the message with the reason."""
        route, message, queue = delivery.route, delivery.message, self.consumer.queue.name
        if tries == 1:
            log.warning(
                "Message given up. queue=%s event_type=%s attempt=%d reason=%s",
                *(queue, route.label, message.attempt, reason),
            )
        if route.dead_letters is None:
            # The broker may know where to (a policy can say so); only the reason gets no further than our log.
            route.counts.dead_lettered += 1
            route.counts.nacked += 1
            self.acks.nack(delivery, requeue=False)
            self.acks.flush()
            return

        def done(taken: bool) -> None:
            if taken:
                route.counts.dead_lettered += 1
                self.acks.ack(delivery)
            elif self.stopping:
                self._give_back(delivery)
            else:
                wait = DEAD_LETTER_AGAIN.delay(tries, 0.0)
                self._hold(delivery, wait, lambda: self._give_up(delivery, reason, tries + 1))

        headers = dead_letter_headers(
            retry_headers(message.headers, message.attempt, message.exchange, message.routing_key), queue, reason
        )
        key = route.dead_letters.routing_key
        self._publish(delivery, route.dead_letters.exchange, message.routing_key if key is None else key, headers, done)

    def _publish(self, delivery: Delivery, exchange: str, key: str, headers: dict[str, Any], done: Done) -> None:
        generation = self.acks.generation
        self._publishing += 1

        def confirmed(taken: bool) -> None:
            if generation is self.acks.generation:  # otherwise the broker has the original back
                self._publishing -= 1
                done(taken)
                self.acks.flush()
                self._note_if_quiet()

        properties = properties_with_message_headers(delivery.message.properties, headers)
        self._port.publish(exchange, key, delivery.message.body, properties, confirmed)

    # The end

    def stop(self) -> None:
        """Take nothing new, give back what no worker has begun; `quiet` is set when nothing is in hand any more."""
        self.stopping = True
        assert self.workers is not None
        self.workers.stop()
        self._cancel()
        unbegun = [delivery for job in self._waiting for delivery in job]
        self._waiting.clear()
        for delivery in unbegun + self._batcher.clear():
            self._give_back(delivery)
        held, self._held = self._held, {}
        for timer, action in held.values():
            self._port.cancel(timer)
            action()
        self._note_if_quiet()

    def _cancel(self) -> None:
        channel = self.acks.writable()
        if channel is not None and self.consuming and self.position is None:
            # Until the broker confirms, pika sends back what still comes. (It must not do so to a stream.)
            channel.basic_cancel(self.name, callback=lambda _: self._cancelled())
        else:
            self.consuming = False

    def _cancelled(self) -> None:
        self.consuming = False
        self._note_if_quiet()

    def _note_if_quiet(self) -> None:
        if self.stopping and not (self.handed or self._publishing or self.consuming):
            self.quiet.set()
