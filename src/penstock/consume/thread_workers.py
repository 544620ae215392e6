"""Workers that are threads, and what every kind of worker promises.

A worker takes a job, calls the handler and reports an outcome; it never touches the connection.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Protocol

from penstock.clock import Clock
from penstock.consume.delivery import (
    RETURNED,
    Delivery,
    HandlerOutcome,
    Job,
    Outcomes,
    Verdict,
    outcome_of_answer,
    outcome_of_error,
    outcome_per_delivery,
    outcomes_of_answers,
)

log = logging.getLogger(__name__)

THREADS = "penstock-amqp-"  # what the names of our threads and processes begin with
Report = tuple[Job, float, Outcomes]  # the job, how many seconds its handler took, how it ended


class WorkerPool(Protocol):
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


class Reports:
    """Outcomes on their way to the I/O thread, which is woken once for any number of them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waiting: deque[Report] = deque()
        self._wake = wake
        self._woken = False

    def put(self, report: Report) -> None:
        self._waiting.append(report)
        if not self._woken:
            self._woken = True
            self._wake()

    def take(self) -> Iterator[Report]:
        """Everything reported so far, and what is reported while it is taken."""
        self._woken = False  # first: a report in between wakes us for nothing, but is never left behind
        waiting = self._waiting
        while waiting:
            yield waiting.popleft()


class ThreadWorkers:
    """Handlers in threads."""

    def __init__(self, name: str, size: int, reports: Reports, clock: Clock, *, in_place: bool, finish_all: bool):
        self._name = name
        self._size = size
        self._reports = reports
        self._clock = clock
        self._in_place = in_place  # retry within the worker, so that nothing overtakes the message
        self._finish_all = finish_all  # what was taken cannot go back: run it even when stopping
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{THREADS}{name}-worker-{number}", daemon=True)
            for number in range(1, size + 1)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        while not self._finish_all:  # not left to the workers: they may be busy until the deadline
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            assert job is not None
            self._reports.put((job, 0.0, RETURNED))
        for _ in self._threads:
            self._jobs.put(None)  # behind the last job: an idle worker ends now

    def close(self, deadline: float) -> list[str]:
        self.stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self, number: int) -> None:
        get, put, perform = self._jobs.get, self._reports.put, self._perform
        stopping, finish_all, in_place = self._stopping, self._finish_all, self._in_place
        while (job := get()) is not None:
            generation = job[0].generation if isinstance(job, list) else job.generation
            if (generation.lost or stopping.is_set()) and not finish_all:
                put((job, 0.0, RETURNED))
                continue
            started = perf_counter()
            outcome = perform(job, number)
            seconds = perf_counter() - started
            if outcome is not None:
                log_failure(self._name, number, job, outcome)
                if in_place:
                    outcome = self._until_settled(job, outcome, number)
            put((job, seconds, outcome))

    def _perform(self, job: Job, number: int) -> Outcomes:
        try:
            if isinstance(job, list):
                return outcomes_of_answers(job[0].route.call([delivery.message for delivery in job]), len(job))
            answer = job.route.call(job.message)
            return None if answer is None else outcome_of_answer(answer)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything; the worker outlives it
            return outcome_of_error(error)

    def _until_settled(self, job: Job, outcome: Outcomes, number: int) -> Outcomes:
        """Try again here for as long as there are attempts, each message of a failed batch on its own."""
        if isinstance(job, list):
            return [
                one if one is None else self._one_until_settled(delivery, one, number)
                for delivery, one in zip(job, outcome_per_delivery(job, outcome))
            ]
        assert isinstance(outcome, HandlerOutcome)
        return self._one_until_settled(job, outcome, number)

    def _one_until_settled(self, delivery: Delivery, outcome: HandlerOutcome, number: int) -> HandlerOutcome | None:
        route, message = delivery.route, delivery.message
        result: HandlerOutcome | None = outcome
        while result is not None and (wait := route.wait_before_retry(result, message.attempt)) is not None:
            delivery.retries += 1
            if self._stopping.wait(wait) or (delivery.generation.lost and not self._finish_all):
                return RETURNED
            message.attempt += result.counted
            again = self._perform([delivery] if route.batch_size else delivery, number)
            result = again[0] if isinstance(again, list) else again
            log_failure(self._name, number, delivery, result)
        return result


def log_failure(name: str, number: int, job: Job, outcomes: Outcomes) -> None:
    """One line per failure, with the worker's number: the messages of a stuck worker can be found by it."""
    deliveries = job if isinstance(job, list) else [job]
    for delivery, outcome in zip(deliveries, outcome_per_delivery(deliveries, outcomes)):
        if outcome is None or outcome.verdict is Verdict.RETURN:
            continue
        log.warning(
            "Handler failed. consumer=%s worker=%d event_type=%s attempt=%d verdict=%s reason=%s%s",
            name,
            number,
            delivery.route.label,
            delivery.message.attempt,
            outcome.verdict.name.lower(),
            outcome.reason,
            f"\n{outcome.trace}".rstrip(),
        )
