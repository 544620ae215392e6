"""Closing: nothing accepted is lost, no producer waits in vain, and a handler that hangs is not waited for for ever."""

import asyncio
import threading
import time
from typing import Any

import pytest

from penstock import BatchQueue, BufferStrategy, PartitionPolicy, ThreadPolicy
from penstock.batch.scheduler import DrainThread
from penstock.errors import QueueClosed
from penstock.testing import wait_until
from tests.batch.support import A, B, Recorder, config, join_all, open_queue, run_threads


def test_closing_consumes_what_is_held_and_ends_the_threads() -> None:
    with open_queue("closing", threads=ThreadPolicy.fixed(3), partitions=PartitionPolicy.adaptive()) as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        queue.produce_many([A(0, number) for number in range(1000)])
        running = [queue.running]
        assert queue.close()
        running.append(queue.running)

    assert running == [True, False]
    assert len(handler.items) == 1000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-closing")]


def test_a_closed_queue_answers_false_and_counts_it() -> None:
    with open_queue() as queue:
        queue.add_handler(A, Recorder())
        queue.produce(A())
        queue.close()

        assert not queue.produce(A())
        assert queue.produce_many([A(), A()]) == 0
        assert queue.produce_many([A(), B()], timeout=1.0) == 0
        assert queue.stats().types[A].dropped == 4


def test_closing_twice_is_the_same_as_once() -> None:
    with open_queue() as queue:
        assert queue.close()
        assert queue.close()


def test_every_handler_gets_one_last_idle_call_after_its_last_item() -> None:
    class Flushing:
        def __init__(self) -> None:
            self.held: list[A] = []
            self.flushed: list[A] = []

        def consume(self, batch: list[A]) -> None:
            self.held += batch

        def on_idle(self) -> None:
            self.flushed += self.held
            self.held = []

    with open_queue(min_idle=30.0, max_idle=30.0) as queue:
        handler = Flushing()
        queue.add_handler(A, handler)
        queue.produce_many([A()] * 10)
        assert queue.close()

    assert len(handler.flushed) == 10


def test_a_handler_that_outlasts_the_timeout_leaves_the_rest_to_the_error_handler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    handed: list[tuple[list[Any], BaseException]] = []
    with open_queue(error_handler=lambda batch, error: handed.append((batch, error))) as queue:
        handler = Recorder(release)
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        assert handler.entered.wait(10)
        queue.produce_many([A(0, 1), A(0, 2)])

        assert not queue.close(timeout=0.01)

        assert [[item.number for item in batch] for batch, _ in handed] == [[1, 2]]
        assert isinstance(handed[0][1], QueueClosed)
        assert "abandoned=2" in caplog.text
        release.set()
        wait_until(lambda: handler.items)
        assert not queue.close()  # it has ended by now, but not with everything consumed

    assert [item.number for item in handler.items] == [0]
    counts = queue.stats().types[A]
    assert (counts.produced, counts.consumed, counts.errors) == (3, 1, 2)


def test_a_handler_may_close_its_own_queue() -> None:
    answers: list[bool] = []
    with open_queue() as queue:

        def close_it(batch: list[A]) -> None:
            answers.append(queue.close())

        queue.add_handler(A, close_it)
        queue.produce(A())
        wait_until(lambda: answers)
        assert queue.close()

    assert answers == [False]


def test_producers_that_race_with_closing_are_answered_truly() -> None:
    """Every True is consumed, however the last items and `close` meet."""
    for round_number in range(30):
        with open_queue(
            buffer_size=8 if round_number % 2 else 2000,
            threads=ThreadPolicy.fixed(2),
            partitions=PartitionPolicy.adaptive(),
            strategy=BufferStrategy.IF_POSSIBLE if round_number % 3 == 0 else BufferStrategy.BLOCKING,
        ) as queue:
            handlers = {A: Recorder(), B: Recorder()}
            for type_, handler in handlers.items():
                queue.add_handler(type_, handler)
            accepted = [0] * 6
            going = threading.Barrier(7)

            def produce(
                index: int, queue: Any = queue, accepted: list[int] = accepted, going: threading.Barrier = going
            ) -> None:
                emit = queue.producer(B)
                going.wait()
                while queue.running:
                    accepted[index] += queue.produce(A()) + emit(B()) + queue.produce_many([A(), B(), B()])

            threads = run_threads(*(lambda index=index: produce(index) for index in range(6)))
            going.wait()
            wait_until(lambda handlers=handlers: handlers[A].items)  # type: ignore[misc]
            assert queue.close()
            join_all(threads)
            assert sum(len(handler.items) for handler in handlers.values()) == sum(accepted)


def test_a_slot_lost_to_an_interrupt_does_not_hold_up_closing() -> None:
    class Interrupting(list[Any]):
        def append(self, item: Any) -> None:
            raise KeyboardInterrupt

    with open_queue() as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        credits, items = queue._routes[A]
        queue._routes[A] = (credits, Interrupting())
        with pytest.raises(KeyboardInterrupt):
            queue.produce(A(0, 1))
        queue._routes[A] = (credits, items)
        queue.produce(A(0, 2))
        started = time.monotonic()

        assert queue.close(timeout=20.0)
        assert time.monotonic() - started < 10.0

    assert [item.number for item in handler.items] == [0, 2]


def test_a_queue_that_gets_too_few_threads_says_so_and_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = DrainThread.start
    started: list[DrainThread] = []

    def only_one(thread: DrainThread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(DrainThread, "start", only_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        BatchQueue("poor", config(threads=ThreadPolicy.fixed(3), partitions=PartitionPolicy.fixed(3)))

    join_all(list(started))


def test_a_queue_closes_at_the_end_of_its_with() -> None:
    handler = Recorder()
    with BatchQueue("test", config()) as queue:
        queue.add_handler(A, handler)
        queue.produce_many([A(), A()])

    assert not queue.running
    assert len(handler.items) == 2


def test_a_queue_closes_at_the_end_of_its_async_with_and_the_loop_goes_on() -> None:
    handler = Recorder()

    async def main() -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        async with BatchQueue("test", config()) as queue:
            queue.add_handler(A, handler)
            assert await queue.produce_many_async([A(), A()]) == 2
            before = turns
        turning.cancel()
        assert not queue.running
        return turns - before

    assert asyncio.run(main()) > 0
    assert len(handler.items) == 2


def test_closing_may_take_for_ever_and_pauses_may_be_longer_than_any_clock() -> None:
    handler = Recorder()
    with open_queue(min_idle=1e12, max_idle=1e13) as queue:
        queue.add_handler(A, handler)
        queue.produce(A())
        wait_until(lambda: handler.items)
        queue.produce(A())  # its thread is still there
        assert handler.idle_calls == 0
        assert queue.close(timeout=float("inf"))

    assert len(handler.items) == 2
