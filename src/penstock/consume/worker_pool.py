"""What every kind of worker promises, and what all kinds share.

A worker takes a job, calls the handler and reports the outcomes; it never touches the connection.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.clock import Clock
from penstock.consume.delivery import RETURNED, Delivery, HandlerOutcome, Job

log = logging.getLogger(__name__)

THREADS = "penstock-amqp-"  # what the names of our threads and processes begin with
Report = tuple[Job, float]  # a job whose deliveries have their outcomes, and how many seconds its handler took


class ConsumerWorkers(Protocol):
    """A pool of workers of one kind."""

    def submit(self, job: Job) -> None:
        """Take a job without ever blocking: the caller keeps count."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Start no further job: what is not yet begun is reported as returned."""
        ...

    def close(self, deadline: float) -> list[str]:
        """Wait for the workers until `deadline`, end what can be ended, and name the workers that did not end."""
        ...


class ConsumerReports:
    """Outcomes on their way to the I/O thread, which is woken once for any number of them."""

    def __init__(self, wake_drain: Callable[[], None]) -> None:
        self._waiting: deque[Report] = deque()
        self._wake_drain = wake_drain
        self._woken = False

    def put(self, job: Job, seconds: float) -> None:
        self._waiting.append((job, seconds))
        self.wake()

    def wake(self) -> None:
        """Have the I/O thread look for reports soon."""
        if not self._woken:
            self._woken = True
            self._wake_drain()

    def put_back(self, job: Job) -> None:
        """Report a job that was not begun."""
        for delivery in job:
            delivery.outcome = RETURNED
        self.put(job, 0.0)

    def take(self) -> Iterator[Report]:
        """Everything reported so far, and what is reported while it is taken."""
        self._woken = False  # first: a report in between wakes us for nothing, but is never left behind
        waiting = self._waiting
        while waiting:
            yield waiting.popleft()


class HandlerTraceback(Exception):
    """A handler's traceback as text: it may come from another process, which has the exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What a pool of any kind is made of."""

    name: str
    workers: int
    calls: tuple[Callable[[Any], Any], ...]  # the handlers, by the index of their route
    reports: ConsumerReports
    clock: Clock
    in_place: bool  # retry within the worker, so that nothing overtakes the message
    finish_all: bool  # what was taken cannot go back: run it even when its channel is lost or the pool stops

    def retries(self, job: Job, worker: int) -> Iterator[tuple[float, Delivery]]:
        """Log what failed, with the worker's number, and yield what to try again in place after which wait.

        Each message of a failed batch is tried on its own, for as long as it fails and has attempts.
        """
        for delivery in job:
            while (outcome := delivery.outcome) is not None and outcome is not RETURNED:
                self._log_failure(delivery, outcome, worker)
                wait = delivery.route.wait_before_retry(outcome, delivery.message.attempt)
                if wait is None or not self.in_place:
                    break
                delivery.retries += 1
                delivery.message.attempt += outcome.counted
                yield wait, delivery

    def _log_failure(self, delivery: Delivery, outcome: HandlerOutcome, worker: int) -> None:
        """A handler that raised is a warning, with its traceback. One that raises Retry or Reject has decided so."""
        message, verdict = delivery.message, outcome.verdict.name.lower()
        fields = (self.name, worker, delivery.route.label, message.attempt, verdict, outcome.reason)
        if outcome.trace:
            log.warning(
                "Handler failed. consumer=%s worker=%d event_type=%s attempt=%d verdict=%s reason=%s",
                *fields,
                exc_info=HandlerTraceback(outcome.trace),
            )
        else:
            log.debug("Handler decided. consumer=%s worker=%d event_type=%s attempt=%d verdict=%s reason=%s", *fields)
