"""Producers that wait for room: each is woken, also when the thread that made the room was interrupted."""

import asyncio
import threading

import pytest

from penstock.batch import waiting
from penstock.batch.waiting import AsyncProduceWaiter, ThreadProduceWaiter
from penstock.testing import wait_until
from tests.batch.support import A, Recorder, join_all, open_queue, run_threads


def test_a_waiter_that_is_not_woken_waits_for_as_long_as_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "RECHECK", 0.25)
    waited: list[float] = []

    class Lock:
        def acquire(self, timeout: float) -> bool:
            waited.append(timeout)
            return False

    waiter = ThreadProduceWaiter(None, ("item",), None)  # type: ignore[arg-type]
    waiter._woken = Lock()  # type: ignore[assignment]
    waiter.wait(0.6)
    assert waited == [0.25, 0.25, pytest.approx(0.1)]

    waiter.granted = 1  # by a thread that was interrupted before it could wake the waiter
    waiter.wait(0.6)
    assert len(waited) == 4


def test_all_waiters_are_woken_by_one_drain_and_by_closing() -> None:
    release = threading.Event()
    handler = Recorder(release)
    with open_queue(buffer_size=4) as queue:
        queue.add_handler(A, handler)
        queue.produce(A())
        assert handler.entered.wait(10)
        queue.produce_many([A()] * 4)
        answers: list[bool] = []
        line = queue._layout.partitions[0]._waiters
        threads = run_threads(*[lambda: answers.append(queue.produce(A()))] * 12)
        wait_until(lambda: len(line) == 12)
        release.set()
        join_all(threads)
        assert answers == [True] * 12

        handler.entered.clear()
        release.clear()
        queue.produce(A())
        assert handler.entered.wait(10)
        queue.produce_many([A()] * 4)
        threads = run_threads(*[lambda: answers.append(queue.produce(A()))] * 12)
        wait_until(lambda: len(line) == 12)
        queue.stop_accepting()
        join_all(threads)
        release.set()

    assert answers == [True] * 12 + [False] * 12


def test_a_coroutine_that_was_not_woken_sees_for_itself_that_it_has_got_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "RECHECK", 0.001)
    monkeypatch.setattr(
        AsyncProduceWaiter, "wake", lambda waiter: None
    )  # as if its thread had been interrupted just before
    release = threading.Event()
    handler = Recorder(release)

    async def produce() -> list[bool]:
        waits = [asyncio.create_task(queue.produce_async(A(0, number))) for number in range(2, 5)]
        await asyncio.sleep(0)
        assert len(queue._layout.partitions[0]._waiters) == 3
        release.set()
        return await asyncio.gather(*waits)

    with open_queue(buffer_size=1) as queue:
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        assert handler.entered.wait(10)
        queue.produce(A(0, 1))
        answers = asyncio.run(produce())
        queue.close()

    assert answers == [True, True, True]
    assert [item.number for item in handler.items] == [0, 1, 2, 3, 4]
