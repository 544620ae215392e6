"""Workers that are coroutines on one event loop, at most `workers` of them at a time."""

import asyncio
import threading
from collections import deque
from time import perf_counter

from penstock.clock import Clock
from penstock.consume.delivery import (
    RETURNED,
    Delivery,
    HandlerOutcome,
    Job,
    Outcomes,
    outcome_of_error,
    outcome_per_delivery,
    outcomes_of_answers,
)
from penstock.consume.thread_workers import THREADS, Reports, log_failure


class CoroutineWorkers:
    """Async handlers. They share the loop's thread: one that computes keeps all others waiting, but never the I/O."""

    def __init__(self, name: str, size: int, reports: Reports, clock: Clock, *, in_place: bool, finish_all: bool):
        self._name = name
        self._reports = reports
        self._clock = clock
        self._in_place = in_place
        self._finish_all = finish_all
        self._idle = list(range(size, 0, -1))  # numbers of the workers that have nothing to do; loop thread only
        self._tasks: set[asyncio.Task[None]] = set()  # loop thread only
        self._jobs: deque[Job] = deque()
        self._woken = False
        self._stopping = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}{name}-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._begin_jobs)

    def stop(self) -> None:
        self._stopping.set()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_waits)

    def close(self, deadline: float) -> list[str]:
        if not self._thread.is_alive():
            return []
        finished = threading.Event()
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._finish(deadline, finished)))
        finished.wait(max(0.0, deadline - self._clock.monotonic()) + 0.5)  # the cancelled need a moment to end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(0.5)
        return [self._thread.name] if self._thread.is_alive() else []

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stopped = asyncio.Event()
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _cancel_waits(self) -> None:
        self._stopped.set()
        while self._jobs and not self._finish_all:  # not left to the workers: they may be busy until the deadline
            self._reports.put((self._jobs.popleft(), 0.0, RETURNED))

    def _begin_jobs(self) -> None:
        self._woken = False
        while self._jobs and self._idle:
            job = self._jobs.popleft()
            generation = job[0].generation if isinstance(job, list) else job.generation
            if (generation.lost or self._stopping.is_set()) and not self._finish_all:
                self._reports.put((job, 0.0, RETURNED))
                continue
            task = self._loop.create_task(self._work(job, self._idle.pop()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, job: Job, number: int) -> None:
        started = perf_counter()
        outcome = await self._perform(job)
        seconds = perf_counter() - started
        if outcome is not None:
            log_failure(self._name, number, job, outcome)
            if self._in_place:
                outcome = await self._until_settled(job, outcome, number)
        self._reports.put((job, seconds, outcome))
        self._idle.append(number)
        if self._jobs:
            self._begin_jobs()

    async def _perform(self, job: Job) -> Outcomes:
        try:
            if isinstance(job, list):
                return outcomes_of_answers(await job[0].route.call([delivery.message for delivery in job]), len(job))
            await job.route.call(job.message)
        except asyncio.CancelledError as error:
            # By our own deadline, so the outcome stays unknown; or by something that it awaited.
            return RETURNED if self._stopping.is_set() else outcome_of_error(error)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything; the worker outlives it
            return outcome_of_error(error)
        return None

    async def _until_settled(self, job: Job, outcome: Outcomes, number: int) -> Outcomes:
        if isinstance(job, list):
            return [
                one if one is None else await self._one_until_settled(delivery, one, number)
                for delivery, one in zip(job, outcome_per_delivery(job, outcome))
            ]
        assert isinstance(outcome, HandlerOutcome)
        return await self._one_until_settled(job, outcome, number)

    async def _one_until_settled(
        self, delivery: Delivery, outcome: HandlerOutcome, number: int
    ) -> HandlerOutcome | None:
        route, message = delivery.route, delivery.message
        result: HandlerOutcome | None = outcome
        while result is not None and (wait := route.wait_before_retry(result, message.attempt)) is not None:
            delivery.retries += 1
            try:
                await asyncio.wait_for(self._stopped.wait(), wait)
                return RETURNED
            except TimeoutError:
                pass
            if delivery.generation.lost and not self._finish_all:
                return RETURNED
            message.attempt += result.counted
            again = await self._perform([delivery] if route.batch_size else delivery)
            result = again[0] if isinstance(again, list) else again
            log_failure(self._name, number, delivery, result)
        return result

    async def _finish(self, deadline: float, finished: threading.Event) -> None:
        """Wait for the tasks until the deadline, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, deadline - self._clock.monotonic()))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=0.4)
        finished.set()
