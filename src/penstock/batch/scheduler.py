"""The threads that run drain tasks: one of its own per task, or a few that many queues share."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from penstock.batch.drain import DrainTask
from penstock.batch.partition import Partition
from penstock.batch.policies import ThreadPolicy
from penstock.clock import Clock


class DrainThread(threading.Thread):
    """A thread that drains. `crew` says for whom, so that it never waits for room that only itself could make."""

    def __init__(self, name: str, run: Callable[[], None], crew: object) -> None:
        # A daemon, so that a forgotten queue does not keep the process alive; `lifecycle` drains it at exit.
        super().__init__(target=run, name=name, daemon=True)
        self.crew = crew


def is_of_crew(crew: object) -> bool:
    """Whether the current thread is one of those that drain for `crew`."""
    return getattr(threading.current_thread(), "crew", None) is crew


class OwnTask(DrainTask):
    """A task with a thread of its own."""

    def __init__(self, *arguments: Any, crew: object, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._crew = crew
        self._stopping = False
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.thread: DrainThread | None = None

    def inbox(self) -> "SimpleQueue[Partition | None]":
        if self.thread is None:  # after a fork nothing runs until it is needed
            self.start()
        return self.ready

    def start(self) -> None:
        """Start the thread, if it does not run."""
        with self._lock:
            if self.thread is None:
                self.thread = DrainThread(f"penstock-{self._queue_name}-{self.index}", self._run, self._crew)
                self.thread.start()

    def stop(self) -> None:
        """Have the thread end after its present cycle."""
        self._stopping = True
        self.nudge()

    def reset(self) -> None:
        super().reset()
        self._lock = threading.Lock()
        self.thread = None

    def _run(self) -> None:
        while not self._stopping:
            try:
                timeout = max(0.0, self.pace.due - self._clock.monotonic()) if self.idle_partitions else None
                partition = self.ready.get(timeout=timeout)
            except Empty:
                self.idle(self._clock.monotonic())
            else:
                if partition is not None:
                    self.cycle(partition)


class SharedTask(DrainTask):
    """All partitions of one queue, drained by whichever thread of the scheduler is free, by one at a time."""

    def __init__(self, *arguments: Any, scheduler: "SharedScheduler", **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._scheduler = scheduler
        self._resting: list[SharedTask] = [self]  # the task's token, as `Partition.asleep` is a partition's

    def inbox(self) -> "SimpleQueue[Partition | None]":
        return self._scheduler.inbox()

    def nudge(self) -> None:
        self._scheduler.inbox().put(None)

    def reset(self) -> None:
        super().reset()
        self._resting[:] = [self]

    def run(self, partition: Partition) -> None:
        """Drain `partition`, now or, if another thread runs the task, when that one has time."""
        self.ready.put(partition)
        self._run_ready()

    @property
    def is_resting(self) -> bool:
        return bool(self._resting)

    def _run_ready(self) -> None:
        while not self.ready.empty():
            try:
                self._resting.pop()
            except IndexError:
                return  # who has the token looks at `ready` once more after putting it back
            try:
                partition = self.ready.get_nowait()
                if partition is not None:
                    self.cycle(partition)
            except Empty:
                pass  # whoever had the token just before us has drained it
            finally:
                self._resting.append(self)

    def idle_if_due(self, now: float) -> None:
        """Call the idle handlers if it is time and nobody runs the task."""
        if not self.calls_idle or now < self.pace.due:
            return
        try:
            self._resting.pop()
        except IndexError:
            return
        try:
            self.idle(now)
        finally:
            self._resting.append(self)
        self._run_ready()


class SharedScheduler:
    """Threads that run the tasks of several queues, each task on one thread at a time.

    Threads: every method may be called from any thread.
    """

    def __init__(self, name: str, policy: ThreadPolicy, clock: Clock) -> None:
        self.name = name
        self.policy = policy
        self._clock = clock
        self._ready: SimpleQueue[Partition | None] = SimpleQueue()
        self._stopping = False
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._tasks: tuple[SharedTask, ...] = ()
        self.threads: list[DrainThread] = []

    def start(self) -> None:
        """Start the threads, if they do not run."""
        with self._lock:
            if self.threads or self._stopping:
                return
            self.threads = [
                DrainThread(f"penstock-{self.name}-{index}", self._run, self) for index in range(self.policy.resolve())
            ]
            for thread in self.threads:
                thread.start()

    def add(self, task: SharedTask) -> None:
        with self._lock:
            self._tasks = (*self._tasks, task)

    def remove(self, task: SharedTask) -> None:
        with self._lock:
            self._tasks = tuple(other for other in self._tasks if other is not task)

    def inbox(self) -> "SimpleQueue[Partition | None]":
        """Where partitions of any of the queues are put."""
        if not self.threads:  # after a fork nothing runs until it is needed
            self.start()
        return self._ready

    def stop(self, timeout: float) -> bool:
        """End the threads; False if one is still in a handler after `timeout` seconds."""
        self._stopping = True
        deadline = self._clock.monotonic() + timeout
        for _ in self.threads:
            self._ready.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def reset(self) -> None:
        """We are the child of a fork: the threads are the parent's."""
        self._lock = threading.Lock()
        self._ready = SimpleQueue()
        self.threads = []

    def _run(self) -> None:
        while not self._stopping:
            try:
                partition = self._ready.get(timeout=self._until_idle_is_due())
            except Empty:
                for task in self._tasks:
                    task.idle_if_due(self._clock.monotonic())
            else:
                if partition is not None:
                    partition.owner.run(partition)

    def _until_idle_is_due(self) -> float | None:
        # A task that runs just now is left to its thread, which comes here when it is done.
        due = [task.pace.due for task in self._tasks if task.calls_idle and task.is_resting]
        return max(0.0, min(due) - self._clock.monotonic()) if due else None
