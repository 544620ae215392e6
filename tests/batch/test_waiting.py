"""Those who wait for room: woken one after the other, whoever gives up or is interrupted meanwhile."""

import asyncio
import threading

import pytest

from penstock.batch import waiting
from penstock.batch.waiting import AsyncWaiter, ThreadWaiter, WakeLine
from penstock.testing import wait_until
from tests.batch.support import A, Recorder, join_all, open_queue, run_threads


class Waiting(ThreadWaiter):
    """Somebody who waits, without a thread that does."""

    def __init__(self, line: WakeLine) -> None:
        super().__init__(None, (), None, line)  # type: ignore[arg-type]
        self.wakes = 0

    def wake_now(self) -> None:
        self.wakes += 1


def woken(waiters: list[Waiting]) -> list[int]:
    return [waiter.wakes for waiter in waiters]


def test_who_runs_again_wakes_the_next() -> None:
    line = WakeLine()
    waiters = [Waiting(line) for _ in range(3)]
    seen = []
    for waiter in waiters:
        waiter.wake()
    for waiter in waiters:
        seen.append(woken(waiters))
        waiter.leave()
    late = Waiting(line)
    late.wake()

    assert seen == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert late.wakes == 1  # nobody was before it


def test_nobody_waits_for_one_who_gave_up() -> None:
    line = WakeLine()
    before, between, after, last = waiters = [Waiting(line) for _ in range(4)]
    between.leave()  # its time was up just before it was served
    for waiter in (before, between, after, last):
        waiter.wake()
    after.leave()  # its time was up while it stood in line: it wakes the next as if it had had its turn
    assert woken(waiters) == [1, 0, 0, 1]
    before.leave()
    last.leave()
    late = Waiting(line)
    late.wake()

    assert late.wakes == 1


def test_one_who_was_interrupted_before_it_woke_the_next_holds_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "LINK", 0.001)
    line = WakeLine()
    Waiting(line).wake()  # and nothing more is heard of it
    followers = [ThreadWaiter(None, ("item",), None, line) for _ in range(3)]  # type: ignore[arg-type]

    def wait(waiter: ThreadWaiter) -> None:
        waiter.wait(None)
        waiter.leave()

    threads = run_threads(*(lambda waiter=waiter: wait(waiter) for waiter in followers))
    for waiter in followers:
        waiter.wake()
    join_all(threads)
    late = Waiting(line)
    late.wake()

    assert late.wakes == 1


def test_who_is_not_called_waits_for_as_long_as_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LINK", 0.25)
    waited: list[float] = []

    class Lock:
        def acquire(self, timeout: float) -> bool:
            waited.append(timeout)
            return False

    waiter = ThreadWaiter(None, ("item",), None, WakeLine())  # type: ignore[arg-type]
    waiter._woken = Lock()  # type: ignore[assignment]
    waiter.wait(0.6)
    assert waited == [0.25, 0.25, pytest.approx(0.1)]

    waiter.granted = 1  # by somebody who was interrupted before it could wake us
    waiter.wait(0.6)
    assert len(waited) == 4


def test_all_who_wait_are_woken_by_one_drain_and_by_closing() -> None:
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


def test_a_coroutine_that_nobody_woke_sees_for_itself_that_it_has_got_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LINK", 0.001)
    monkeypatch.setattr(AsyncWaiter, "wake", lambda waiter: None)  # as if its thread had been interrupted just before
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
