"""One thread that makes the idle calls of all tasks that have had nothing to drain for a while.

A thread that wakes up twenty times a second to find nothing costs little; forty of them do not. So a task paces its
idle calls itself while they come close together, and once the pause has grown to its longest it leaves them to the
rounds and sleeps until data comes.
"""

import os
import threading
import time
from typing import TYPE_CHECKING, cast

from penstock.batch.crew import DrainThread

if TYPE_CHECKING:
    from penstock.batch.drain import DrainTask

LONGEST = 86_400.0  # seconds between two looks: any number that a lock can wait for
LINGER = 1.0  # seconds that the thread waits for a task before it ends
EARLY = 0.25  # of a task's pause: who is due so soon is called with the others, and from then on together with them


class IdleRounds:
    """Calls the idle handlers of the tasks that have joined.

    Threads: every method may be called from any thread. Its own comes with the first task and ends after the last.
    """

    def __init__(self) -> None:
        self._alarm = threading.Lock()
        self._alarm.acquire()
        # _lock guards everything below, and `on_rounds` of the tasks, but that the thread reads and says when it looks.
        self._lock = threading.Lock()
        self._tasks: tuple[DrainTask, ...] = ()
        self._thread: DrainThread | None = None
        self._looks_at = 0.0

    def join(self, task: "DrainTask") -> None:
        """Call the handlers of `task` from now on."""
        with self._lock:
            if task.on_rounds or not task.takes_part or not self._has_thread_locked():
                return
            # In this order: who sees a task on the rounds tells by `next_round` whether they hang.
            task.next_round = max(task.pace.due, time.monotonic())
            task.on_rounds = True
            self._tasks = (*self._tasks, task)
            if task.next_round < self._looks_at and self._alarm.locked():
                self._alarm.release()

    def _has_thread_locked(self) -> bool:
        if self._thread is None:
            thread = DrainThread("penstock-idle", self._run, None)
            self._looks_at = 0.0
            try:
                thread.start()
            except RuntimeError:
                return False  # no more threads, or the interpreter is ending: the task goes on by itself
            self._thread = thread
        return True

    def leave(self, task: "DrainTask") -> None:
        """Call them no more; a call under way is finished."""
        with self._lock:
            task.on_rounds = False
            self._tasks = tuple(other for other in self._tasks if other is not task)

    def reset(self) -> None:
        """We are the child of a fork: the thread and the locks are the parent's."""
        fresh = IdleRounds()
        self._alarm, self._lock, self._tasks, self._thread = fresh._alarm, fresh._lock, (), None

    def _run(self) -> None:
        # The thread mostly finds its caches cold, so what counts here is how much code and data it touches.
        thread = cast(DrainThread, threading.current_thread())
        while True:
            tasks = self._tasks
            now = time.monotonic()
            soonest = now + (LONGEST if tasks else LINGER)
            for task in tasks:
                if task.next_round <= now + EARLY * task.longest_pause:
                    task.next_round = now + task.longest_pause
                    thread.crew = task.crew  # what its handlers produce into its own queue must not wait for us
                    now = task.idle_on_rounds(now)
                if task.next_round < soonest:
                    soonest = task.next_round
            # First written, then looked: of who joins meanwhile either we see the task, or it sees when we look.
            self._looks_at = soonest
            if self._tasks is tasks:
                self._alarm.acquire(True, max(0.0, soonest - now))
                if not tasks and self._ends():
                    return

    def _ends(self) -> bool:
        """Whether no task has come, so that the next one needs another thread."""
        with self._lock:
            if not self._tasks:
                self._thread = None
            return self._thread is None


IDLE_ROUNDS = IdleRounds()
"""Those of the process."""

os.register_at_fork(after_in_child=IDLE_ROUNDS.reset)
