"""`on_idle`: when it is called, for which handlers, and that it never meets `consume`."""

import os
import threading
import time
import weakref
from typing import Any

import pytest

from penstock import (
    BatchQueue,
    BatchQueueConfig,
    BatchQueueManager,
    HandlerConsumer,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from penstock.batch.idle import IdleExclusion
from penstock.batch.scheduler import SharedDrainScheduler, SharedDrainTask
from penstock.testing import FakeClock, wait_until
from tests.batch.support import A, B, Recorder, config, item_types, join_all, open_queue, run_threads

PAIR: dict[str, Any] = {"threads": ThreadPolicy.fixed(2), "partitions": PartitionPolicy.fixed(2), "max_idle": 0.01}


def test_an_idle_handler_is_called_again_and_again() -> None:
    with open_queue() as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        wait_until(lambda: handler.idle_calls >= 5)


def test_idle_calls_are_paced() -> None:
    """With pauses of 1, 2, 4, … 50 ms a second has room for about 25 calls."""
    with open_queue() as queue:
        handler = Recorder()
        started = time.monotonic()
        queue.add_handler(A, handler)
        wait_until(lambda: handler.idle_calls >= 10)
        took = time.monotonic() - started

    assert took >= 0.001 + 0.002 + 0.004 + 0.008 + 0.016 + 0.032 + 3 * 0.05 - 0.01  # nine pauses; calls may be early


def test_a_handler_that_inherits_the_empty_on_idle_needs_no_waking() -> None:
    class Plain(HandlerConsumer[A]):
        def consume(self, batch: list[A]) -> None:
            pass

    with open_queue() as queue:
        queue.add_handler(A, Plain())
        timeouts = [queue._tasks[0].idle_timeout()]
        queue.add_handler(B, Recorder())
        timeouts.append(queue._tasks[0].idle_timeout())
        queue.remove_handler(B)
        timeouts.append(queue._tasks[0].idle_timeout())

    assert [timeout is None for timeout in timeouts] == [True, False, True]


def test_handlers_without_data_are_called_although_the_thread_is_busy_with_others() -> None:
    for partitions in (1, 2):  # their lanes in one partition, or each in its own
        with open_queue(partitions=PartitionPolicy.fixed(partitions), max_idle=0.005) as queue:
            quiet = Recorder()

            def never_dry(batch: list[A], queue: BatchQueue = queue) -> None:
                queue.produce(A())
                time.sleep(0.001)

            queue.add_handler(A, never_dry)
            queue.add_handler(B, quiet)
            queue.produce(A())
            wait_until(lambda quiet=quiet: quiet.idle_calls >= 5)  # type: ignore[misc]
            queue.remove_handler(A)


def test_the_consumer_is_called_when_idle_too() -> None:
    consumer = Recorder()
    with open_queue(consumer=consumer, threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)):
        wait_until(lambda: consumer.idle_calls >= 3)


def test_an_on_idle_that_fails_is_logged_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    class Failing:
        def consume(self, batch: list[Any]) -> None:
            pass

        def on_idle(self) -> None:
            calls.append(1)
            raise ValueError("not today")

    with open_queue() as queue:
        queue.add_handler(A, Failing())
        wait_until(lambda: len(calls) >= 2)

    assert "on_idle failed" in caplog.text


@pytest.mark.parametrize("selector", [PartitionSelector.type_hash(), PartitionSelector.round_robin()])
def test_on_idle_never_meets_consume_of_the_same_handler(selector: PartitionSelector) -> None:
    inside = 0
    idle_inside = False
    met: list[str] = []
    lock = threading.Lock()

    class Watching:
        def __init__(self) -> None:
            self.idle_calls = 0

        def consume(self, batch: list[Any]) -> None:
            nonlocal inside
            with lock:
                inside += 1
                if idle_inside:
                    met.append("consume during on_idle")
            time.sleep(0.0002)
            with lock:
                inside -= 1

        def on_idle(self) -> None:
            nonlocal idle_inside
            with lock:
                idle_inside = True
                if inside:
                    met.append("on_idle during consume")
            time.sleep(0.0002)
            with lock:
                idle_inside = False
            self.idle_calls += 1

    with open_queue(
        threads=ThreadPolicy.fixed(3),
        partitions=PartitionPolicy.fixed(3),
        selector=selector,
        min_idle=0.0001,
        max_idle=0.0005,
    ) as queue:
        handler = Watching()
        queue.add_handler(A, handler)

        def produce() -> None:
            for _ in range(300):
                queue.produce(A())
                queue._layout.reassign([0, 1, 2] if queue.stats().total_used % 2 else [2, 0, 1])

        join_all(run_threads(produce, produce))
        wait_until(lambda: handler.idle_calls >= 3)
        queue.close()

    assert met == []


def test_the_exclusion_lets_many_in_together_or_one_alone() -> None:
    exclusion = IdleExclusion()
    exclusion.enter()
    exclusion.enter()
    assert not exclusion.try_alone()
    exclusion.leave()
    exclusion.leave()
    assert exclusion.try_alone()
    assert not exclusion.try_alone()
    entered = threading.Event()

    def enter() -> None:
        exclusion.enter()
        entered.set()

    threads = run_threads(enter)
    assert not entered.wait(0.01)
    exclusion.leave_alone()
    join_all(threads)
    assert entered.is_set()


def test_a_consumer_on_shared_threads_is_called_however_late_its_queue_comes_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, until_idle_is_due = SharedDrainScheduler.add, SharedDrainScheduler._until_idle_is_due
    sleepers: set[threading.Thread] = set()

    def look(scheduler: SharedDrainScheduler) -> float | None:
        pause = until_idle_is_due(scheduler)
        if pause is None:
            sleepers.add(threading.current_thread())
        return pause

    def late(scheduler: SharedDrainScheduler, task: SharedDrainTask) -> None:
        # The threads have looked for idle calls, found none, and sleep until something comes.
        wait_until(lambda: len(sleepers) == 2 and scheduler._ready.empty())
        add(scheduler, task)

    monkeypatch.setattr(SharedDrainScheduler, "_until_idle_is_due", look)
    monkeypatch.setattr(SharedDrainScheduler, "add", late)
    manager = BatchQueueManager()
    consumer = Recorder()
    manager.create("late", config(shared_scheduler=("io", ThreadPolicy.fixed(2)), consumer=consumer))
    try:
        wait_until(lambda: consumer.idle_calls > 2)
    finally:
        manager.shutdown_all()


def test_every_call_of_a_handler_comes_from_the_thread_that_drains_its_partition() -> None:
    """So a handler may keep what belongs to a thread, like a connection to SQLite, while partitions stay in place."""
    threads: list[set[str]] = [set() for _ in range(20)]
    calls = [0] * 20

    class Named(HandlerConsumer[Any]):
        def __init__(self, index: int) -> None:
            self.index = index

        def consume(self, batch: list[Any]) -> None:
            threads[self.index].add(threading.current_thread().name)

        def on_idle(self) -> None:
            threads[self.index].add(threading.current_thread().name)
            calls[self.index] += 1

    with open_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive(), max_idle=0.01) as queue:
        for index, type_ in enumerate(item_types(20)):
            queue.add_handler(type_, Named(index))
            queue.produce(type_())
        wait_until(lambda: min(calls) >= 10)
        seen = [set(names) for names in threads]

    assert all(len(names) == 1 for names in seen)
    assert len(set.union(*seen)) == 4


def test_a_handler_that_hangs_does_not_end_the_calls_of_other_threads() -> None:
    release = threading.Event()

    class Hanging(HandlerConsumer[Any]):
        def consume(self, batch: list[Any]) -> None:
            pass

        def on_idle(self) -> None:
            release.wait(20)

    try:
        with open_queue(**PAIR) as queue:
            queue.add_handler(A, Hanging())
            other = Recorder()
            queue.add_handler(B, other)
            wait_until(lambda: other.idle_calls >= 5)
            queue.produce(B())
            wait_until(lambda: other.items)
            release.set()
    finally:
        release.set()


def test_a_handler_that_another_one_removes_is_neither_called_nor_kept() -> None:
    class Removing(Recorder):
        def on_idle(self) -> None:
            super().on_idle()
            if queue.remove_handler(B):
                removed.append(len(calls))

    class Counted(Recorder):
        def on_idle(self) -> None:
            calls.append(1)

    calls: list[int] = []
    removed: list[int] = []
    with open_queue() as queue:
        first, second = Removing(), Counted()
        gone = weakref.ref(second)
        queue.add_handler(B, second)
        del second
        wait_until(lambda: calls)
        queue.add_handler(A, first)
        wait_until(lambda: removed)
        seen = first.idle_calls
        wait_until(lambda: first.idle_calls >= seen + 3)
        wait_until(lambda: gone() is None)

    assert removed == [len(calls)]


def test_what_a_handler_produces_when_idle_into_its_own_full_queue_does_not_wait() -> None:
    answers: list[bool] = []

    class Echo(Recorder):
        def on_idle(self) -> None:
            if not answers:
                answers.extend(queue.produce(A()) for _ in range(3))

    with open_queue(**PAIR, buffer_size=2) as queue:
        handler = Echo()
        queue.add_handler(A, handler)
        wait_until(lambda: len(handler.items) == 2)

    assert answers == [True, True, False]


def test_data_that_comes_during_an_idle_call_is_consumed_after_it() -> None:
    inside, release = threading.Event(), threading.Event()

    class Waiting(Recorder):
        def on_idle(self) -> None:
            inside.set()
            release.wait(20)

    with open_queue(**PAIR) as queue:
        handler = Waiting()
        queue.add_handler(A, handler)
        assert inside.wait(10)
        queue.produce(A())
        queue._layout.reassign([1, 1])  # nor does a new owner consume it before
        assert not handler.entered.wait(0.02)
        release.set()
        wait_until(lambda: len(handler.items) == 1)

    assert not handler.overlapped


def test_idle_calls_follow_the_clock_of_the_queue() -> None:
    clock = FakeClock()
    with BatchQueue("fake", BatchQueueConfig(**PAIR, min_idle=0.01), clock=clock) as queue, open_queue() as other:
        still, going = Recorder(), Recorder()
        queue.add_handler(A, still)
        other.add_handler(A, going)
        wait_until(lambda: going.idle_calls >= 10)
        assert still.idle_calls == 0

        clock.advance(0.01)
        wait_until(lambda: still.idle_calls == 1)


def test_a_handler_that_shuts_down_its_own_scheduler_leaves_nothing_undrained() -> None:
    answers: list[bool] = []

    class Stopping(Recorder):
        def on_idle(self) -> None:
            super().on_idle()
            if not answers:
                queue.produce_many([A(), A()])
                answers.append(manager.shutdown_all())

    manager, handler = BatchQueueManager(), Stopping()
    shared = ("pool", ThreadPolicy.fixed(2))
    config = BatchQueueConfig(shared_scheduler=shared, consumer=handler, min_idle=0.01, max_idle=0.01)
    queue = manager.create("one", config)
    scheduler = queue._scheduler
    assert scheduler is not None
    wait_until(lambda: len(handler.items) == 2, timeout=5)
    assert queue.close()
    wait_until(lambda: not any(thread.is_alive() for thread in scheduler.threads))
    assert answers == [False]
    assert not handler.overlapped


def test_closing_waits_for_the_call_under_way_and_makes_the_last_one_alone() -> None:
    inside, release = threading.Event(), threading.Event()

    class Waiting(Recorder):
        def on_idle(self) -> None:
            super().on_idle()
            with self._inside:
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
    assert handler.idle_calls > calls
    assert not handler.overlapped


def test_handlers_are_called_idle_in_the_child_of_a_fork_too() -> None:
    with open_queue(**PAIR) as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        wait_until(lambda: handler.idle_calls >= 3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                handler.idle_calls = 0
                handler._inside = threading.Lock()
                queue.produce(A())
                wait_until(lambda: handler.idle_calls >= 3)
                status = 7 if queue.close() else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
