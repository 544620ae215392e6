"""`on_idle`: when it is called, for whom, and that it never meets `consume`."""

import threading
import time
from typing import Any

import pytest

from penstock import BatchQueue, BatchQueueManager, HandlerConsumer, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.batch.idle_exclusion import Gate
from penstock.batch.scheduler import SharedScheduler, SharedTask
from penstock.testing import wait_until
from tests.batch.support import A, B, Recorder, config, join_all, open_queue, run_threads


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


def test_a_handler_that_inherits_the_empty_on_idle_wakes_nobody() -> None:
    class Plain(HandlerConsumer[A]):
        def consume(self, batch: list[A]) -> None:
            pass

    with open_queue() as queue:
        queue.add_handler(A, Plain())
        calls = [queue._tasks[0].calls_idle]
        queue.add_handler(B, Recorder())
        calls.append(queue._tasks[0].calls_idle)
        queue.remove_handler(B)
        calls.append(queue._tasks[0].calls_idle)

    assert calls == [False, True, False]


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


def test_a_gate_lets_many_in_together_or_one_alone() -> None:
    gate = Gate()
    gate.enter()
    gate.enter()
    assert not gate.try_alone()
    gate.leave()
    gate.leave()
    assert gate.try_alone()
    assert not gate.try_alone()
    entered = threading.Event()

    def enter() -> None:
        gate.enter()
        entered.set()

    threads = run_threads(enter)
    assert not entered.wait(0.01)
    gate.leave_alone()
    join_all(threads)
    assert entered.is_set()


def test_a_consumer_on_shared_threads_is_called_however_late_its_queue_comes_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, until_idle_is_due = SharedScheduler.add, SharedScheduler._until_idle_is_due
    sleepers: set[threading.Thread] = set()

    def look(scheduler: SharedScheduler) -> float | None:
        pause = until_idle_is_due(scheduler)
        if pause is None:
            sleepers.add(threading.current_thread())
        return pause

    def late(scheduler: SharedScheduler, task: SharedTask) -> None:
        # The threads have looked for idle calls, found none, and sleep until something comes.
        wait_until(lambda: len(sleepers) == 2 and scheduler._ready.empty())
        add(scheduler, task)

    monkeypatch.setattr(SharedScheduler, "_until_idle_is_due", look)
    monkeypatch.setattr(SharedScheduler, "add", late)
    manager = BatchQueueManager()
    consumer = Recorder()
    manager.create("late", config(shared_scheduler=("io", ThreadPolicy.fixed(2)), consumer=consumer))
    try:
        wait_until(lambda: consumer.idle_calls > 2)
    finally:
        manager.shutdown_all()
