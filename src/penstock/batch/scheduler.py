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
    """A thread that drains. `served` is its queue or scheduler: it never waits for room there."""

    def __init__(self, name: str, run: Callable[[], None], served: object) -> None:
        # A daemon, so that a forgotten queue does not keep the process alive; it is drained at exit.
        super().__init__(target=run, name=name, daemon=True)
        self.served = served


def drains_for(served: object) -> bool:
    """Whether the current thread is a drain thread of `served`."""
    return getattr(threading.current_thread(), "served", None) is served


class OwnDrainTask(DrainTask):
    """A task with a thread of its own."""

    def __init__(self, *arguments: Any, served: object, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.served = served
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
                thread = DrainThread(f"penstock-{self.queue_name}-{self.index}", self._run, self.served)
                thread.start()
                self.thread = thread  # only now: if there are no more threads, the next item tries again

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
                partition = self.ready.get(timeout=self.idle_timeout())
            except Empty:
                self.idle_if_due()
            else:
                if partition is not None:
                    self.cycle(partition)


class SharedDrainTask(DrainTask):
    """All partitions of one queue, drained by whichever thread of the scheduler is free, by one at a time."""

    def __init__(self, *arguments: Any, scheduler: "SharedDrainScheduler", **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._scheduler = scheduler
        self.turn = threading.Lock()  # the thread that holds it runs the task

    def inbox(self) -> "SimpleQueue[Partition | None]":
        return self._scheduler.inbox()

    def nudge(self) -> None:
        self._scheduler.inbox().put(None)

    def run(self, partition: Partition) -> None:
        """Drain `partition`, now or, if another thread runs the task, when that one has time."""
        self.ready.put(partition)
        self._run_ready()

    def _run_ready(self) -> None:
        # A thread that finds the turn taken may leave: its holder looks at `ready` once more after giving it back.
        while not self.ready.empty() and self.turn.acquire(blocking=False):
            try:
                partition = self.ready.get_nowait()
                if partition is not None:
                    self.cycle(partition)
            except Empty:
                pass  # the last holder of the turn has drained it
            finally:
                self.turn.release()

    def idle_if_due(self) -> None:
        """Call `on_idle` of every handler if it is time and no thread runs the task."""
        if not self.idle_partitions or not self.turn.acquire(blocking=False):
            return
        try:
            super().idle_if_due()
        finally:
            self.turn.release()
        self._run_ready()

    def reset(self) -> None:
        super().reset()
        self.turn = threading.Lock()


class SharedDrainScheduler:
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
        self._tasks: tuple[SharedDrainTask, ...] = ()
        self.threads: list[DrainThread] = []

    def start(self) -> None:
        """Start the threads, if they do not run."""
        with self._lock:
            if self.threads or self._stopping:
                return
            for index in range(self.policy.resolve()):
                thread = DrainThread(f"penstock-{self.name}-{index}", self._run, self)
                thread.start()
                self.threads.append(thread)  # only now: if there are no more threads, those that run have to do

    def add(self, task: SharedDrainTask) -> None:
        with self._lock:
            self._tasks = (*self._tasks, task)
        task.nudge()  # a thread has to see that it has idle calls

    def remove(self, task: SharedDrainTask) -> None:
        with self._lock:
            self._tasks = tuple(other for other in self._tasks if other is not task)
        if self._stopping:
            self._have_threads_look()

    def inbox(self) -> "SimpleQueue[Partition | None]":
        """Where partitions of any of the queues are put."""
        if not self.threads:  # after a fork nothing runs until it is needed
            self.start()
        return self._ready

    def stop(self, timeout: float) -> bool:
        """Have the threads end once all their queues have; False if one is still there after `timeout` seconds.

        In one of them, or in a handler that is called for them, it does not wait.
        """
        self._stopping = True
        deadline = self._clock.monotonic() + timeout
        self._have_threads_look()
        if drains_for(self):
            return False
        for thread in self.threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _have_threads_look(self) -> None:
        for _ in self.threads:
            self._ready.put(None)

    def reset(self) -> None:
        """Start over in the child of a fork: the threads are the parent's."""
        self._lock = threading.Lock()
        self._ready = SimpleQueue()
        self.threads = []

    def _run(self) -> None:
        while self._tasks or not self._stopping:
            try:
                partition = self._ready.get(timeout=self._until_idle_is_due())
            except Empty:
                for task in self._tasks:
                    task.idle_if_due()
            else:
                if partition is not None:
                    partition.owner.run(partition)

    def _until_idle_is_due(self) -> float | None:
        # A task that runs just now is left to its thread, which comes here when it is done.
        pauses = [task.idle_timeout() for task in self._tasks if not task.turn.locked()]
        return min((pause for pause in pauses if pause is not None), default=None)
