"""Workers that are coroutines on one event loop, at most `workers` of them at a time."""

import asyncio
import contextlib
import threading
from time import perf_counter

from penstock.consume.delivery import (
    RETURNED,
    Delivery,
    Job,
    Outcomes,
    handler_argument_of_messages,
    note_outcomes,
    outcomes_of_answer,
    outcomes_of_failure,
)
from penstock.consume.worker_pool import THREADS, PoolSettings


class ConsumerCoroutines:
    """Async handlers. They share the loop's thread: one that computes keeps all others waiting, but never the I/O."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}{settings.name}-loop", daemon=True)
        # Everything below belongs to the loop's thread.
        self._jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin_stop)

    def close(self, deadline: float) -> list[str]:
        self.stop()
        self._thread.join(max(0.0, deadline - self._settings.clock.monotonic()))
        for task in self._tasks:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(task.cancel)
        self._thread.join(0.5)  # the cancelled need a moment to end
        return [self._thread.name] if self._thread.is_alive() else []

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._tasks += [asyncio.create_task(self._work(number)) for number in range(1, self._settings.workers + 1)]
        await asyncio.wait(self._tasks)

    def _begin_stop(self) -> None:
        self._stopping.set()
        while not (self._settings.finish_all or self._jobs.empty()):  # not left to the workers: they may be busy
            job = self._jobs.get_nowait()
            if job is not None:
                self._settings.reports.put_back(job)
        for _ in range(self._settings.workers):
            self._jobs.put_nowait(None)  # behind the last job: an idle worker ends now

    async def _work(self, number: int) -> None:
        settings, reports, stopping = self._settings, self._settings.reports, self._stopping
        while (job := await self._jobs.get()) is not None:
            if (job[0].generation.lost or stopping.is_set()) and not settings.finish_all:
                reports.put_back(job)
                continue
            started = perf_counter()
            note_outcomes(job, await self._perform(job))
            seconds = perf_counter() - started
            for wait, delivery in settings.retries(job, number):
                stopped = await self._stopped_within(wait, delivery)
                note_outcomes([delivery], [RETURNED] if stopped else await self._perform([delivery]))
            reports.put(job, seconds)

    async def _stopped_within(self, wait: float, delivery: Delivery) -> bool:
        """Wait before a retry; say whether there is no point in it any more."""
        try:
            return await asyncio.wait_for(self._stopping.wait(), wait)
        except TimeoutError:
            return delivery.generation.lost and not self._settings.finish_all

    async def _perform(self, job: Job) -> Outcomes:
        argument = handler_argument_of_messages(job)
        try:
            answer = await job[0].route.call(argument)
            return outcomes_of_answer(answer, argument) if isinstance(argument, list) else None
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything; the worker outlives it
            # Cancelled by our own deadline the outcome stays unknown; by something that it awaited, it has failed.
            if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
                return [RETURNED] * len(job)
            return outcomes_of_failure(error, argument)
