"""The rounds at the moments at which they and somebody else could miss each other, and on a machine of made-up time."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from penstock import BatchQueue, BatchQueueConfig, ThreadPolicy
from penstock.batch import rounds
from penstock.batch.drain import DrainTask
from penstock.batch.idle_pace import IdlePace
from penstock.testing import FakeClock, wait_until
from tests.batch.support import A, B, Recorder, open_queue
from tests.batch.test_rounds import PAIR, Named

pytestmark = pytest.mark.usefixtures("patient_rounds")


class Time:
    """Stands for the module of that name in the rounds; calls `look` whenever they look at the clock."""

    sleep = staticmethod(time.sleep)

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def monotonic(self) -> float:
        self._look()
        return time.monotonic()


def test_a_queue_closes_while_the_rounds_pass_by_what_its_task_has_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    passing_by, go_on, consuming = threading.Event(), threading.Event(), threading.Event()

    class Sending(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if task.on_rounds and rounds.IDLE_ROUNDS.calling is not None and not consuming.is_set():
                second.produce(A())
                assert consuming.wait(10)

    class Consuming(Recorder):
        def consume(self, batch: list[Any]) -> None:
            consuming.set()
            assert passing_by.wait(10)
            super().consume(batch)

    def look() -> None:
        calling = rounds.IDLE_ROUNDS.calling
        if calling is not None and calling.task is task and consuming.is_set():
            passing_by.set()
            go_on.wait(10)

    second = BatchQueue("second", BatchQueueConfig(**PAIR))
    task = second._tasks[0]
    with open_queue("first", **PAIR) as first:
        monkeypatch.setattr(rounds, "time", Time(look))
        sending, handler = Sending(), Consuming()
        first.add_handler(A, sending)
        sending.wait_for_calls("penstock-idle")
        second.add_handler(A, handler)
        assert passing_by.wait(10)
        try:
            assert second.close(5.0)
        finally:
            go_on.set()

    assert len(handler.items) == 1


def test_handlers_that_get_nothing_are_called_while_others_of_the_thread_keep_it_busy() -> None:
    """Also where the first pause is the longest already, so that it could go to the rounds after every batch."""
    done = threading.Event()

    class Busy(Named):
        def consume(self, batch: list[Any]) -> None:
            if not done.is_set():
                queue.produce(A())

    with open_queue(**{**PAIR, "min_idle": 0.01}) as queue:
        busy, quiet = Busy(), Named()
        queue.add_handler(A, busy)
        queue.add_handler(type("Between", (), {}), print)  # so that A and B are of one thread
        queue.add_handler(B, quiet)
        queue.produce(A())
        try:
            wait_until(lambda: quiet.idle_on.count("penstock-test-0") >= 5, timeout=10)
        finally:
            done.set()


def test_a_pace_is_not_steady_between_data_and_the_next_call() -> None:
    pace = IdlePace(1.0, 1.0, now=0.0)
    assert pace.is_steady()
    pace.had_data(5.0)
    assert not pace.is_steady()
    pace.was_called(6.0)
    assert pace.is_steady()
    assert pace.due == 7.0


class Machine(FakeClock):
    """Whose time passes only while the rounds sleep, for whom it stands for their alarm too."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def acquire(self, blocking: bool, timeout: float) -> None:
        self.advance(timeout)

    def locked(self) -> bool:
        return False


@pytest.mark.parametrize("pauses", [(0.05, 1.0), (0.05, 0.06), (0.05, 0.1, 86_400.0)])
def test_every_pause_is_kept_beside_shorter_ones(monkeypatch: pytest.MonkeyPatch, pauses: tuple[float, ...]) -> None:
    machine = Machine()
    monkeypatch.setattr(rounds, "time", machine)
    idle_rounds = rounds.IdleRounds()
    idle_rounds._alarm = machine  # type: ignore[assignment]
    idle_rounds._thread = rounds.IdleThread(idle_rounds)  # which never runs: we make the rounds
    calls: list[list[float]] = [[] for _ in pauses]
    started, span = machine.monotonic(), 100 * pauses[1]
    tasks: list[DrainTask] = []

    def on_idle(index: int) -> None:
        calls[index].append(machine.monotonic() - started)
        if calls[index][-1] >= span:
            for task in tasks:
                idle_rounds.leave(task)

    for index, pause in enumerate(pauses):
        config = BatchQueueConfig(threads=ThreadPolicy.fixed(1), min_idle=pause, max_idle=pause)
        task = DrainTask("test", 0, config, machine, merges=False, on_quiet=lambda _: None, on_cycle=None)
        task.may_join = True
        task.idle_calls = ((partial(on_idle, index),), ())
        tasks.append(task)
        idle_rounds.join(task)
    idle_rounds.run()

    for times, pause in zip(calls, pauses):
        assert len(times) == pytest.approx(span / pause, abs=2)
        assert all(later - earlier < 1.3 * pause for earlier, later in pairwise(times))


def test_the_rounds_keep_nothing_of_a_closed_queue_while_they_sleep_for_long() -> None:
    with open_queue("rare", **{**PAIR, "max_idle": 1e3, "min_idle": 1e3}) as rare:
        rare.add_handler(A, Named())
        wait_until(lambda: rare._tasks[0].on_rounds)
        handler = Named()
        with open_queue("often", **PAIR) as often:
            often.add_handler(A, handler)
            handler.wait_for_calls("penstock-idle")
        gone = weakref.ref(often), weakref.ref(handler)
        del often, handler

        def are_gone() -> bool:
            gc.collect()
            return all(reference() is None for reference in gone)

        wait_until(are_gone, timeout=5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_thread_another_goes_on_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Named):
        def on_idle(self) -> None:
            super().on_idle()
            raise ValueError("not today")

    def fail(*arguments: object) -> None:
        ended.append(threading.current_thread())
        raise MemoryError

    ended: list[threading.Thread] = []
    with open_queue("one", **PAIR) as one, open_queue("two", **PAIR) as two:
        failing, other = Failing(), Named()
        two.add_handler(A, other)
        other.wait_for_calls("penstock-idle")
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "log_idle_failure", fail)
            one.add_handler(A, failing)
            wait_until(lambda: ended)
        one.produce(A())
        wait_until(lambda: failing.consumed_on, timeout=5)
        for handler in (failing, other):
            handler.idle_on.clear()
            handler.wait_for_calls("penstock-idle")
    for thread in ended:  # what it raised is told when it ends, and not to a later test
        thread.join(20)


def test_a_handler_that_forks_on_the_rounds_and_goes_on_in_the_child_has_one_thread_for_them_there() -> None:
    children: list[int] = []

    class Forking(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if self.idle_on[-1] != "penstock-idle":
                return
            if not children:
                children.append(os.fork())
                if children == [0]:
                    self.idle_on.clear()
                    queue.produce(A())  # which gives it a thread
            elif children == [0] and len(self.idle_on) > 20:
                os._exit(7 if [thread.name for thread in threading.enumerate()].count("penstock-idle") == 1 else 2)

    with open_queue("fork", **PAIR) as queue:
        queue.add_handler(A, Forking())
        wait_until(lambda: children)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
