"""Dispatch by event type: which handler takes a message, and what its messages amounted to."""

from collections.abc import Callable
from dataclasses import dataclass
from random import random
from typing import Any

from penstock.consume.consumer_options import ConsumerOptions, DeadLetters
from penstock.consume.declarations import Consumer
from penstock.consume.delivery import HandlerOutcome, Verdict
from penstock.telemetry import Buckets

ANY = "*"  # the label of the handler that takes every other type
UNKNOWN = "unknown"  # the label of types without a handler: the types themselves are the senders', and unbounded


@dataclass(slots=True)
class Counts:
    """What happened to the messages of one route. Written by the I/O thread only."""

    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    nacked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    stale: int = 0  # finished after their channel was lost: the broker sends them again


class ConsumerRoute:
    """One handler of a consumer, or the lack of one."""

    def __init__(self, label: str, index: int, options: ConsumerOptions, handled: bool = True) -> None:
        self.label = label
        self.index = index  # the handler's place in the consumer: what a worker process is told
        self.options = options
        self.handled = handled
        self.call: Callable[[Any], Any] = options.call
        self.batch_size = options.batch_size
        self.counts = Counts()
        self.handler_seconds = Buckets("penstock_amqp_handler_seconds", (options.queue, label))
        self.settle_seconds = Buckets("penstock_amqp_settle_seconds", (options.queue, label))
        self.dead_letters: DeadLetters | None = None

    def wait_before_retry(self, outcome: HandlerOutcome, attempt: int) -> float | None:
        """How long to wait before the attempt after `attempt`; None if there is to be none."""
        if outcome.verdict is not Verdict.RETRY:
            return None
        if outcome.counted and attempt >= self.options.max_attempts:
            return None
        return outcome.delay if outcome.delay is not None else self.options.retry.delay(attempt, random())


class ConsumerRoutes:
    """The routes of one consumer by event type."""

    def __init__(self, consumer: Consumer) -> None:
        self.routes = [
            ConsumerRoute(options.event_type or ANY, index, options) for index, options in enumerate(consumer.options)
        ]
        for route in self.routes:
            route.dead_letters = route.options.dead_letters or consumer.queue.dead_letters
        self.header = consumer.pool.event_type_header
        self.by_type = {route.options.event_type: route for route in self.routes if route.options.event_type}
        default = next((route for route in self.routes if route.options.event_type is None), None)
        if default is None:
            default = ConsumerRoute(UNKNOWN, -1, consumer.pool, handled=False)
            default.dead_letters = self.routes[0].dead_letters
            self.routes.append(default)
        self.default = default
        self.largest_batch = max(options.batch_size or 1 for options in consumer.options)
