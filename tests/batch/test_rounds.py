"""One thread makes the idle calls of all that sleep, and nobody suffers from it."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import BatchQueue, BatchQueueConfig, BatchQueueManager, HandlerConsumer, PartitionPolicy, ThreadPolicy
from penstock.batch import drain, rounds
from penstock.batch.scheduler import SharedScheduler, SharedTask
from penstock.testing import FakeClock, wait_until
from tests.batch.conftest import SLOW
from tests.batch.support import A, B, Recorder, item_types, open_queue

pytestmark = pytest.mark.usefixtures("patient_rounds")
PAIR: dict[str, Any] = {"threads": ThreadPolicy.fixed(2), "partitions": PartitionPolicy.fixed(2), "max_idle": 0.01}


class Named(HandlerConsumer[Any]):
    """Remembers on which threads it was called."""

    def __init__(self) -> None:
        self.consumed_on: list[str] = []
        self.idle_on: list[str] = []

    def consume(self, batch: list[Any]) -> None:
        self.consumed_on.append(threading.current_thread().name)

    def on_idle(self) -> None:
        self.idle_on.append(threading.current_thread().name)

    def wait_for_calls(self, thread: str, count: int = 3) -> None:
        """Until its last `count` idle calls came from `thread`."""
        wait_until(lambda: len(self.idle_on) >= count and set(self.idle_on[-count:]) == {thread})

    def wait_for_more_calls(self, thread: str, count: int = 3) -> None:
        """Until it was called so many times more from `thread`."""
        seen = len(self.idle_on)
        wait_until(lambda: self.idle_on[seen:].count(thread) >= count)


def rounds_thread() -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == "penstock-idle"), None)


@contextmanager
def off_rounds(task: drain.DrainTask) -> Iterator[None]:
    """Has the task leave, and keeps its turn, so that it does not come back."""
    while not task.turn.acquire(timeout=0.01):
        rounds.IDLE_ROUNDS.leave(task)
    try:
        yield
    finally:
        task.turn.release()


def test_the_idle_calls_of_threads_that_sleep_are_made_by_one() -> None:
    with open_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive(), max_idle=0.01) as queue:
        handlers = [Named() for _ in range(20)]
        for type_, handler in zip(item_types(20), handlers):
            queue.add_handler(type_, handler)
        for handler in handlers:
            handler.wait_for_calls("penstock-idle")


def test_the_queues_of_a_process_share_the_rounds() -> None:
    with open_queue("one", **PAIR) as one, open_queue("two", **PAIR) as two:
        handlers = Named(), Named()
        one.add_handler(A, handlers[0])
        two.add_handler(A, handlers[1])
        for handler in handlers:
            handler.wait_for_calls("penstock-idle")
        assert sum(thread.name == "penstock-idle" for thread in threading.enumerate()) == 1


def test_tasks_with_the_same_pause_are_called_together_whenever_they_came() -> None:
    """So the thread wakes up once per pause, however many there are."""
    with open_queue("one", **PAIR) as one, open_queue("two", **PAIR) as two:
        handlers = Named(), Named()
        one.add_handler(A, handlers[0])
        handlers[0].wait_for_calls("penstock-idle")
        two.add_handler(A, handlers[1])
        handlers[1].wait_for_calls("penstock-idle")

        assert one._tasks[0].round is two._tasks[0].round is not None


def test_a_call_that_fails_on_the_rounds_is_logged_and_the_others_are_made(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Named):
        def on_idle(self) -> None:
            super().on_idle()
            raise ValueError("not today")

    with open_queue(**PAIR) as queue:
        handlers = [Failing() if index in (0, 5) else Named() for index in range(8)]
        kinds = item_types(8)
        for kind, handler in zip(kinds, handlers):
            queue.add_handler(kind, handler)
        for handler in handlers:
            handler.wait_for_calls("penstock-idle")
        caplog.clear()
        for handler in handlers:
            handler.wait_for_more_calls("penstock-idle")

    text = "\n".join(record.getMessage() for record in caplog.records)
    for index, kind in enumerate(kinds):
        assert (f"on_idle failed. queue=test type={kind}" in text) == (index in (0, 5))


def test_a_handler_that_is_removed_during_a_round_is_neither_called_nor_kept() -> None:
    class Removing(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle" and queue.remove_handler(B):
                removed.append(len(calls))

    class Counted(Named):
        def on_idle(self) -> None:
            calls.append(threading.current_thread().name)

    calls: list[str] = []
    removed: list[int] = []
    with open_queue(**PAIR) as queue:
        first, second = Removing(), Counted()
        gone = weakref.ref(second)
        queue.add_handler(A, first)
        queue.add_handler(type("Between", (), {}), Named())  # so that A and B are of one thread
        queue.add_handler(B, second)
        del second
        wait_until(lambda: removed)
        first.wait_for_more_calls("penstock-idle")
        wait_until(lambda: gone() is None)

    assert removed == [len(calls)]


def test_what_a_handler_produces_on_the_rounds_into_its_own_full_queue_does_not_wait() -> None:
    answers: list[bool] = []

    class Producing(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle" and not answers:
                # The thread of the queue waits for its turn, so that nobody makes room.
                answers.extend(queue.produce(A()) for _ in range(3))

    with open_queue(**PAIR, buffer_size=2) as queue:
        handler = Producing()
        queue.add_handler(A, handler)
        wait_until(lambda: len(answers) == 3)
        wait_until(lambda: handler.consumed_on)

    assert answers == [True, True, False]


def test_a_partition_whose_handler_is_called_on_the_rounds_is_not_drained_by_its_new_owner_before() -> None:
    steps: list[str] = []

    class Moving(Recorder):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle" and not steps:
                queue._layout.reassign([1, 1])
                queue.produce(A())
                wait_until(lambda: not queue._tasks[0].on_rounds)  # it came to the new owner, and went on to the old
                steps.append(f"consumed {len(self.items)} during the call")

    with open_queue(**PAIR) as queue:
        handler = Moving()
        queue.add_handler(A, handler)
        wait_until(lambda: len(handler.items) == 1)

    assert steps == ["consumed 0 during the call"]
    assert not handler.overlapped


def test_data_wakes_the_thread_itself_and_its_pace_starts_over() -> None:
    with open_queue(**PAIR) as queue:
        handler = Named()
        queue.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle")
        for _ in range(5):
            queue.produce(A())
            wait_until(lambda: any(name != "penstock-idle" for name in handler.idle_on[-3:]))
            handler.wait_for_calls("penstock-idle")

    assert set(handler.consumed_on) == {"penstock-test-0"}


def test_who_comes_back_from_the_rounds_goes_on_from_its_last_call_there() -> None:
    with open_queue(**PAIR) as queue:
        handler = Named()
        queue.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle", 10)
        task = queue._tasks[0]
        joined = task.pace.called
        assert task.round is not None
        on = task.round
        with off_rounds(task):
            assert joined < task.pace.called
            assert task.pace.due == on.due == pytest.approx(task.pace.called + 0.01)


def test_who_was_not_called_on_the_rounds_of_others_is_due_as_before() -> None:
    with open_queue(**{**PAIR, "max_idle": 1e3, "min_idle": 1e3}) as rare, open_queue("often", **PAIR) as often:
        handler = Named()
        rare.add_handler(A, Named())
        task = rare._tasks[0]
        wait_until(lambda: task.on_rounds)
        called, due = task.pace.called, task.pace.due
        often.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle", 10)
        with off_rounds(task):
            assert task.pace.called == pytest.approx(called, abs=1e-3)
            assert task.pace.due == pytest.approx(due, abs=1e-3)


def test_who_comes_after_a_long_time_without_handlers_does_not_take_it_that_the_rounds_hang() -> None:
    with open_queue(**PAIR) as queue:
        handler = Named()
        task = queue._tasks[0]
        queue.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle")
        queue.remove_handler(A)
        wait_until(lambda: not task.on_rounds)
        task.pace.was_called(time.monotonic() - 1000)
        handler.idle_on.clear()
        queue.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle")

        assert task.takes_part
        assert handler.idle_on.count("penstock-test-0") <= 1  # if the rounds napped until after it was due


def test_a_queue_with_a_clock_of_its_own_stays_away_from_the_rounds_which_keep_the_machines_time() -> None:
    clock = FakeClock()
    with (
        BatchQueue("fake", BatchQueueConfig(**PAIR, min_idle=0.01), clock=clock) as queue,
        open_queue("other", **PAIR) as other,
    ):
        still, going = Named(), Named()
        queue.add_handler(A, still)
        other.add_handler(A, going)
        going.wait_for_calls("penstock-idle", 20)
        assert still.idle_on == []

        clock.advance(0.01)
        still.wait_for_calls("penstock-fake-0", 1)


def test_pauses_that_no_lock_can_wait_for_are_kept_by_the_rounds() -> None:
    with open_queue(**{**PAIR, "max_idle": 1e12, "min_idle": 1e12}) as long, open_queue("short", **PAIR) as short:
        handler = Named()
        long.add_handler(A, Named())
        wait_until(lambda: long._tasks[0].on_rounds)
        short.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle", 10)


def test_a_queue_with_one_thread_makes_all_its_calls_on_it() -> None:
    """So a handler may keep what belongs to a thread, like a connection to SQLite."""
    with open_queue(max_idle=0.01) as queue:
        handler = Named()
        queue.add_handler(A, handler)
        queue.produce(A())
        handler.wait_for_calls("penstock-test-0", 20)

    assert set(handler.consumed_on + handler.idle_on) == {"penstock-test-0"}


def test_handlers_that_take_long_are_called_by_their_own_thread_so_that_nobody_waits_for_them() -> None:
    class Slow(Named):
        def on_idle(self) -> None:
            super().on_idle()
            time.sleep(1.2 * SLOW)

    with open_queue(**PAIR) as queue:
        slow, quick = Slow(), Named()
        queue.add_handler(A, slow)
        queue.add_handler(B, quick)
        quick.wait_for_calls("penstock-idle")
        slow.wait_for_calls("penstock-test-0")
        seen = len(slow.idle_on)
        wait_until(lambda: len(slow.idle_on) >= seen + 5)

        assert "penstock-idle" not in slow.idle_on[seen:]


def test_a_thread_whose_handlers_are_quick_again_comes_back_to_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "TRUSTED", 5)

    class SlowOnce(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if self.idle_on.count("penstock-idle") == 1 and self.idle_on[-1] == "penstock-idle":
                time.sleep(1.2 * SLOW)

    with open_queue(**PAIR) as queue:
        handler = SlowOnce()
        queue.add_handler(A, handler)
        wait_until(lambda: "penstock-idle" in handler.idle_on)
        handler.wait_for_calls("penstock-test-0")
        handler.wait_for_calls("penstock-idle")


def test_a_handler_that_hangs_on_the_rounds_does_not_end_the_calls_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "PATIENCE", 5)
    release = threading.Event()

    class Hanging(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle":
                release.wait(20)

    try:
        with open_queue(**PAIR) as queue:
            hanging, other = Hanging(), Named()
            queue.add_handler(A, hanging)
            queue.add_handler(B, other)
            wait_until(lambda: hanging.idle_on[-1:] == ["penstock-idle"])
            other.wait_for_calls("penstock-test-1")
            used = time.process_time()
            release.wait(0.1)
            assert time.process_time() - used < 0.05  # nobody spins meanwhile
            queue.produce(B())
            wait_until(lambda: other.consumed_on)
            release.set()
            hanging.wait_for_calls("penstock-test-0")
    finally:
        release.set()


def test_a_thread_that_the_rounds_have_forgotten_keeps_the_pace_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "PATIENCE", 100)
    release = threading.Event()

    class Hanging(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle":
                release.wait(20)

    try:
        with open_queue(**PAIR) as queue, open_queue("other", **PAIR) as forgotten:
            hanging, other = Hanging(), Named()
            forgotten.add_handler(A, other)
            other.wait_for_calls("penstock-idle")
            queue.add_handler(A, hanging)
            wait_until(lambda: hanging.idle_on[-1:] == ["penstock-idle"])
            other.wait_for_calls("penstock-other-0", 1)
            seen, started = len(other.idle_on), time.monotonic()
            wait_until(lambda: len(other.idle_on) >= seen + 20)

            took = time.monotonic() - started
            release.set()

        assert took < 50 * 20 * 0.01  # half of what its patience would make of it, and fifty times what it takes
        assert "penstock-idle" not in other.idle_on[seen : seen + 20]
    finally:
        release.set()


def test_a_handler_on_the_rounds_that_fills_its_own_queue_is_answered_false() -> None:
    answers: list[bool] = []

    class Echo(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if self.idle_on[-1] == "penstock-idle":
                answers.extend(queue.produce(A()) for _ in range(5))

    with open_queue(buffer_size=2, **PAIR) as queue:
        queue.add_handler(A, Echo())
        wait_until(lambda: len(answers) >= 5)

        assert answers[:5] == [True, True, False, False, False]


def test_data_that_comes_during_a_call_on_the_rounds_is_consumed_after_it() -> None:
    inside, release = threading.Event(), threading.Event()

    class Waiting(Recorder):
        def on_idle(self) -> None:
            if threading.current_thread().name == "penstock-idle":
                inside.set()
                release.wait(20)

    with open_queue(**PAIR) as queue:
        handler = Waiting()
        queue.add_handler(A, handler)
        assert inside.wait(10)
        queue.produce(A())
        wait_until(lambda: not queue._tasks[0].on_rounds)  # its thread has come, and waits for its turn
        assert not handler.entered.wait(0.02)
        release.set()
        wait_until(lambda: len(handler.items) == 1)


def test_a_shared_scheduler_leaves_its_idle_calls_to_the_rounds_too() -> None:
    manager = BatchQueueManager()
    handlers = Recorder(), Recorder()
    settings: dict[str, Any] = {"shared_scheduler": ("pool", ThreadPolicy.fixed(3)), "max_idle": 0.01}
    queues = [
        manager.create(str(index), BatchQueueConfig(consumer=handler, **settings))
        for index, handler in enumerate(handlers)
    ]
    for _ in range(20):
        wait_until(lambda: all(queue._tasks[0].on_rounds for queue in queues))
        for queue, handler in zip(queues, handlers):
            calls, items = handler.idle_calls, len(handler.items)
            queue.produce(A())
            wait_until(lambda: len(handler.items) > items and handler.idle_calls > calls)  # noqa: B023 - at once

    assert manager.shutdown_all()
    assert [len(handler.items) for handler in handlers] == [20, 20]
    assert not any(handler.overlapped for handler in handlers)


def test_an_item_that_a_scheduler_thread_left_to_the_rounds_is_drained() -> None:
    inside, release = threading.Event(), threading.Event()

    class Waiting(Recorder):
        def on_idle(self) -> None:
            if threading.current_thread().name == "penstock-idle":
                inside.set()
                release.wait(20)

    manager = BatchQueueManager()
    handler = Waiting()
    shared = ("pool", ThreadPolicy.fixed(2))
    queue = manager.create("one", BatchQueueConfig(shared_scheduler=shared, consumer=handler, max_idle=0.01))
    assert inside.wait(10)
    queue.produce(A())
    wait_until(lambda: not queue._tasks[0].ready.empty())
    assert handler.items == []
    release.set()
    wait_until(lambda: len(handler.items) == 1)
    assert manager.shutdown_all()


@pytest.mark.parametrize("caller", ["penstock-idle", "penstock-pool-0"])
def test_a_handler_that_shuts_down_its_own_scheduler_leaves_nothing_undrained(caller: str) -> None:
    answers: list[bool] = []

    class Stopping(Recorder):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == caller and not answers:
                queue.produce_many([A(), A()])
                answers.append(manager.shutdown_all())

    manager, handler = BatchQueueManager(), Stopping()
    shared = ("pool", ThreadPolicy.fixed(2 if caller == "penstock-idle" else 1))
    queue = manager.create("one", BatchQueueConfig(shared_scheduler=shared, consumer=handler, max_idle=0.01))
    scheduler = queue._scheduler
    assert scheduler is not None
    wait_until(lambda: len(handler.items) == 2, timeout=5)
    assert queue.close()
    wait_until(lambda: not any(thread.is_alive() for thread in scheduler.threads))
    assert answers == [False]
    assert not handler.overlapped


class Looks:
    """Counts how often the threads of shared schedulers look whose idle calls are due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        look = SharedScheduler._until_idle_is_due

        def counted(scheduler: SharedScheduler) -> float | None:
            pause = look(scheduler)
            self.count += 1
            return pause

        monkeypatch.setattr(SharedScheduler, "_until_idle_is_due", counted)

    def wait_for_one_after(self, act: Callable[[], object]) -> None:
        seen = self.count
        act()
        wait_until(lambda: self.count > seen)


def test_handlers_of_a_shared_scheduler_that_take_long_are_called_by_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, nudge = Looks(monkeypatch), SharedTask.nudge

    def nudge_slowly(task: SharedTask) -> None:
        looks.wait_for_one_after(lambda: nudge(task))  # whoever was woken is quicker than we are

    class SlowOnRounds(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle":
                time.sleep(1.2 * SLOW)

    manager, handler = BatchQueueManager(), SlowOnRounds()
    manager.create(
        "one", BatchQueueConfig(shared_scheduler=("pool", ThreadPolicy.fixed(2)), consumer=handler, max_idle=0.01)
    )
    monkeypatch.setattr(SharedTask, "nudge", nudge_slowly)
    wait_until(lambda: "penstock-idle" in handler.idle_on)
    seen = len(handler.idle_on)
    wait_until(lambda: len(handler.idle_on) >= seen + 5, timeout=10)
    monkeypatch.undo()
    assert manager.shutdown_all()


def test_a_thread_that_looks_while_the_rounds_have_the_turn_of_a_task_that_has_left_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, passed_by = Looks(monkeypatch), threading.Event()

    class Leaving(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if threading.current_thread().name == "penstock-idle" and not passed_by.is_set():
                task = queue._tasks[0]
                rounds.IDLE_ROUNDS.leave(task)
                for _ in range(2):
                    looks.wait_for_one_after(task.nudge)
                passed_by.set()

    manager, handler = BatchQueueManager(), Leaving()
    queue = manager.create(
        "one", BatchQueueConfig(shared_scheduler=("pool", ThreadPolicy.fixed(2)), consumer=handler, max_idle=0.01)
    )
    assert passed_by.wait(10)
    seen = len(handler.idle_on)
    wait_until(lambda: len(handler.idle_on) >= seen + 5, timeout=10)
    monkeypatch.undo()
    assert manager.shutdown_all()


def test_a_task_that_joins_while_its_queue_closes_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    join, tried, closed = rounds.IdleRounds.join, threading.Event(), threading.Event()
    manager, first = BatchQueueManager(), threading.Lock()

    def join_late(idle_rounds: rounds.IdleRounds, task: drain.DrainTask) -> None:
        if first.acquire(blocking=False):  # the other thread drains
            tried.set()
            assert closed.wait(10)
            join(idle_rounds, task)

    monkeypatch.setattr(rounds.IdleRounds, "join", join_late)
    shared = ("pool", ThreadPolicy.fixed(2))
    # A long pause: nobody would look at it again for as long.
    rare: dict[str, Any] = {"min_idle": 1e3, "max_idle": 1e3}
    queue = manager.create("one", BatchQueueConfig(shared_scheduler=shared, consumer=Named(), **rare))
    task = queue._tasks[0]
    assert tried.wait(10)
    assert queue.close()
    closed.set()
    assert manager.shutdown_all()  # and so the threads have ended
    assert not task.on_rounds


def test_closing_waits_for_the_call_under_way_and_makes_the_last_one_alone() -> None:
    inside, release = threading.Event(), threading.Event()

    class Waiting(Recorder):
        def on_idle(self) -> None:
            super().on_idle()
            with self._inside:
                if threading.current_thread().name == "penstock-idle":
                    inside.set()
                    release.wait(20)

    queue = BatchQueue("test", BatchQueueConfig(**PAIR))
    handler = Waiting()
    queue.add_handler(A, handler)
    assert inside.wait(10)
    assert not queue.close(timeout=0.05)
    calls = handler.idle_calls
    release.set()
    assert queue.close()
    assert handler.idle_calls == calls + 1
    assert not handler.overlapped


def test_the_thread_ends_after_the_last_task_and_comes_back_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "LINGER", 0.01)
    for _ in range(2):
        with open_queue(**PAIR) as queue:
            handler = Named()
            queue.add_handler(A, handler)
            handler.wait_for_calls("penstock-idle")
        wait_until(lambda: rounds_thread() is None)


def test_a_task_goes_on_by_itself_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_queue(**PAIR) as queue:

        def no_more(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(drain, "IDLE_ROUNDS", rounds.IdleRounds())
        monkeypatch.setattr(rounds.IdleThread, "start", no_more)
        handler = Named()
        queue.add_handler(A, handler)
        handler.wait_for_calls("penstock-test-0", 20)


def test_the_child_of_a_fork_has_rounds_of_its_own() -> None:
    with open_queue(**PAIR) as queue:
        handler = Named()
        queue.add_handler(A, handler)
        handler.wait_for_calls("penstock-idle")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                handler.idle_on.clear()
                queue.produce(A())
                handler.wait_for_calls("penstock-idle")
                status = 7 if queue.close() else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        handler.wait_for_calls("penstock-idle")
