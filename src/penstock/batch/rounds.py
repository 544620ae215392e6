"""One thread that makes the idle calls of all tasks that have had nothing to drain for a while.

A thread that wakes up twenty times a second to find nothing costs little; forty of them do not. So a task paces its
idle calls itself while they come close together, and once the pause has grown to its longest it leaves them to the
rounds and sleeps until data comes.

The rounds have the turn of every task that is on them, so nobody drains one meanwhile and a round takes no locks. Who
has something to drain has the task leave first: that empties the list of its calls, so that none is begun any more, and
gives the turn back, at once or, if one of its calls is under way, after that. Who makes the calls first says whose,
then looks into the list; who leaves first empties the list, then looks whose are made: one of them sees the other.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.batch.idle_calls import IdleCalls, log_idle_failure, side_by_side

if TYPE_CHECKING:
    from penstock.batch.drain import DrainTask

LONGEST = 86_400.0  # seconds between two looks: any number that a lock can wait for
LINGER = 1.0  # seconds that the thread waits for a task before it ends
NAP = 0.1  # seconds up to which it sleeps and cannot be woken, which is cheaper than to wait for a lock
EARLY = 0.25  # of a round's pause: who is due so soon is called with the others, not to wake up once more for it
SLOW_CALLS = 0.005  # seconds: who takes so long makes its idle calls itself, not to hold up the others on the rounds


class TaskCalls(list[Callable[[], object]]):
    """What the rounds call for a task; emptied as soon as that is no longer to be called."""

    __slots__ = ("made_of", "task")

    def __init__(self, task: "DrainTask") -> None:
        self.task = task
        self.made_of: IdleCalls = task.idle_calls
        super().__init__(side_by_side(self.made_of[0]))


class Round:
    """Tasks with the same pause, all called together."""

    __slots__ = ("calls", "due", "pause", "tasks")

    def __init__(self, pause: float, due: float) -> None:
        self.pause = pause
        self.due = due  # a pause earlier is when they were last called, or were due if that was early
        self.tasks: tuple[DrainTask, ...] = ()
        self.calls: tuple[TaskCalls, ...] | None = None  # until they are gathered again


class IdleThread(threading.Thread):
    """The thread of the rounds. It drains for nobody, but what a handler produces into its own queue must not wait."""

    def __init__(self, rounds: "IdleRounds") -> None:
        super().__init__(target=rounds.run, name="penstock-idle", daemon=True)
        self._rounds = rounds

    @property
    def crew(self) -> object:
        """That of the task whose handlers it calls."""
        calling = self._rounds.calling
        return None if calling is None else calling.task.crew


class IdleRounds:
    """Calls the idle handlers of the tasks that have joined.

    Threads: every method may be called from any thread. Its own comes with the first task and ends after the last.
    """

    __slots__ = ("_alarm", "_leaving", "_lock", "_looks_at", "_rounds", "_thread", "calling")

    def __init__(self) -> None:
        self._alarm = threading.Lock()
        self._alarm.acquire()
        self.calling: TaskCalls | None = None  # written by the thread alone
        # _lock guards everything below, and `round` and `round_calls` of the tasks, but that the thread reads what it
        # finds and says when it looks.
        self._lock = threading.Lock()
        self._rounds: tuple[Round, ...] = ()
        self._leaving: list[DrainTask] = []  # to whom the thread owes their turn
        self._thread: IdleThread | None = None
        self._looks_at = 0.0

    def join(self, task: "DrainTask") -> None:
        """Call the handlers of `task` from now on, if nobody else has its turn."""
        with self._lock:
            # Without calls its queue may have closed since somebody looked, and then nobody would have it leave.
            if task.on_rounds or not (task.takes_part and task.calls_idle) or not self._has_thread_locked():
                return
            joined = self._round_locked(task)
            if joined is None:
                return
            task.round = joined  # first said, then taken: who finds its turn taken sees where it is
            if not task.turn.acquire(False):
                task.round = None
                return
            if not joined.tasks:
                self._rounds = (*self._rounds, joined)
            joined.tasks = (*joined.tasks, task)
            joined.calls = None
            if joined.due < self._looks_at and self._alarm.locked():
                self._alarm.release()

    def _has_thread_locked(self) -> bool:
        if self._thread is None:
            thread = IdleThread(self)
            self._looks_at = 0.0
            try:
                thread.start()
            except RuntimeError:
                return False  # no more threads, or the interpreter is ending: the task goes on by itself
            self._thread = thread
        return True

    def _round_locked(self, task: "DrainTask") -> Round | None:
        """The one with its pause, or a new one, unless that comes too late because the thread naps."""
        for existing in self._rounds:
            if existing.pause == task.longest_pause:
                return existing
        now = time.monotonic()
        due = max(task.pace.due, now)
        return None if due < self._looks_at <= now + NAP else Round(task.longest_pause, due)

    def leave(self, task: "DrainTask") -> bool:
        """Call them no more. True if a call is under way: it is finished, and only then is the turn free."""
        with self._lock:
            left = task.round
            if left is None:
                return task in self._leaving
            left.tasks = tuple(other for other in left.tasks if other is not task)
            left.calls = None
            if not left.tasks:
                self._rounds = tuple(other for other in self._rounds if other is not left)
            task.pace.was_called(max(task.pace.called, left.due - left.pause))
            self._empty_locked(task)
            task.round = None
            # First owed, then looked: else the thread could have looked for the last time just before.
            self._leaving.append(task)
            if self.under_way(task) is not None:
                return True
            self._leaving.remove(task)
            task.turn.release()
            return False

    def renew(self, task: "DrainTask") -> None:
        """The calls of `task` have changed: none of the former is begun any more."""
        with self._lock:
            if task.round is not None:
                task.round.calls = None  # first, for an interrupt may come in between: gathering sees what is stale
                self._empty_locked(task)

    def _empty_locked(self, task: "DrainTask") -> None:
        calls, task.round_calls = task.round_calls, None
        if calls is not None:
            calls.clear()

    def under_way(self, task: "DrainTask") -> IdleCalls | None:
        """Those of `task`, if they are being made, or passed by because it has left."""
        calling = self.calling
        return calling.made_of if calling is not None and calling.task is task else None

    def reset(self) -> None:
        """We are the child of a fork: the locks are the parent's, so is the thread, unless a handler forked on it."""
        for each in self._rounds:
            for task in each.tasks:
                self._empty_locked(task)
        fresh, forked = IdleRounds(), threading.current_thread()
        self._alarm, self._lock, self._rounds = fresh._alarm, fresh._lock, ()
        self._thread = forked if isinstance(forked, IdleThread) else None
        self.calling, self._leaving = None, []

    def run(self) -> None:
        """What the thread does."""
        try:
            self._make_rounds()
        except BaseException:  # no memory, or a log that raises: else nobody gave the turns back, or called any more
            self.calling = None
            with self._lock:
                self._thread = None
                if self._rounds:
                    self._has_thread_locked()
            self._give_turns_back()
            raise

    def _make_rounds(self) -> None:
        # It mostly finds its caches cold, so what counts is how much code and data it touches: hence one function.
        calls: TaskCalls | None
        call: Callable[[], object] | None
        while True:
            rounds = self._rounds
            now = time.monotonic()
            soonest = now + (LONGEST if rounds else LINGER)
            for each in rounds:
                if each.due <= now + EARLY * each.pause:
                    # From when it was due, so that who is called early is not called more often.
                    each.due = (each.due if each.due > now else now) + each.pause
                    for calls in each.calls or self._gather(each):
                        self.calling = calls
                        if self._leaving:
                            self._give_turns_back()
                        for call in calls:
                            try:
                                call()
                            except BaseException:  # noqa: BLE001 - whatever a handler raises, the others are called
                                log_idle_failure(calls.task.queue_name, calls.made_of, call)
                        started, now = now, time.monotonic()
                        if now - started >= SLOW_CALLS:
                            self._send_away(calls.task)
                    # Also what we go through with: it would be kept while we sleep.
                    self.calling = calls = call = None
                    if self._leaving:
                        self._give_turns_back()
                if each.due < soonest:
                    soonest = each.due
            # First written, then looked: of who joins meanwhile either we see the round, or it sees when we look.
            self._looks_at = soonest
            if self._rounds is rounds:
                pause = soonest - now
                if pause > NAP:
                    self._alarm.acquire(True, pause)
                elif pause > 0:
                    time.sleep(pause)
                if not rounds and self._ends():
                    return

    def _send_away(self, task: "DrainTask") -> None:
        """It is too slow for the others."""
        task.quick_passes = 0
        self.leave(task)

    def _give_turns_back(self) -> None:
        with self._lock:
            leaving, self._leaving = self._leaving, []
        for task in leaving:
            task.turn.release()
            task.resume()

    def _gather(self, one: Round) -> tuple[TaskCalls, ...]:
        """What is to be called for its tasks; those for which there is nothing leave."""
        with self._lock:
            for task in one.tasks:
                if task.round_calls is None or task.round_calls.made_of is not task.idle_calls:
                    task.round_calls = TaskCalls(task)
            one.calls = calls = tuple(task.round_calls for task in one.tasks if task.round_calls is not None)
        for of_task in calls:
            if not of_task.made_of[0]:  # its handlers are gone
                self.leave(of_task.task)
                of_task.task.resume()
        return calls

    def _ends(self) -> bool:
        """Whether no task has come, so that the next one needs another thread."""
        with self._lock:
            if not self._rounds:
                self._thread = None
            return self._thread is None


IDLE_ROUNDS = IdleRounds()
"""Those of the process."""

os.register_at_fork(after_in_child=IDLE_ROUNDS.reset)
