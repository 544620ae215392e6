"""Workers that are threads."""

import threading
from queue import Empty, SimpleQueue
from time import perf_counter

from penstock.consume.delivery import (
    RETURNED,
    Job,
    Outcomes,
    handler_argument_of_messages,
    note_outcomes,
    outcomes_of_answer,
    outcomes_of_failure,
)
from penstock.consume.worker_pool import THREADS, PoolSettings


class ConsumerThreads:
    """Handlers in threads."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work, args=(number,), name=f"{THREADS}{settings.name}-worker-{number}", daemon=True
            )
            for number in range(1, settings.workers + 1)
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
        while not self._settings.finish_all:  # not left to the workers: they may be busy until the deadline
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            assert job is not None
            self._settings.reports.put_back(job)
        for _ in self._threads:
            self._jobs.put(None)  # behind the last job: an idle worker ends now

    def close(self, deadline: float) -> list[str]:
        self.stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._settings.clock.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self, number: int) -> None:
        settings, reports, stopping = self._settings, self._settings.reports, self._stopping
        while (job := self._jobs.get()) is not None:
            if (job[0].generation.lost or stopping.is_set()) and not settings.finish_all:
                reports.put_back(job)
                continue
            started = perf_counter()
            note_outcomes(job, self._perform(job, number))
            seconds = perf_counter() - started
            for wait, delivery in settings.retries(job, number):
                stopped = stopping.wait(wait) or (delivery.generation.lost and not settings.finish_all)
                note_outcomes([delivery], [RETURNED] if stopped else self._perform([delivery], number))
            reports.put(job, seconds)

    def _perform(self, job: Job, number: int) -> Outcomes:
        argument = handler_argument_of_messages(job)
        try:
            return outcomes_of_answer(job[0].route.call(argument), argument)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything; the worker outlives it
            return outcomes_of_failure(error, argument)
