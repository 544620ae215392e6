"""What a producer leaves behind that was interrupted, put off or gave up: nothing that the others would notice."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest

from penstock.testing import wait_until
from tests.batch.support import A, Recorder, join_all, open_queue, run_threads


class Moments:
    """What `look` finds at every moment of the `with` at which the interpreter may switch threads or be interrupted.

    It does so where a function begins, and when one of those in C is done.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.seen: list[Any] = []
        self._look = look
        self._hook = self._happened  # one and the same: the interpreter calls it after it has let go of it

    def _happened(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return", "c_exception"):
            sys.setprofile(None)
            self.seen.append(self._look())
            sys.setprofile(self._hook)

    def __enter__(self) -> Self:
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def test_a_batch_goes_in_without_a_moment_at_which_its_lock_could_be_kept_from_others() -> None:
    """A thread that is switched away from while it holds the lock has all other producers pile up behind it."""
    with open_queue() as queue:
        queue.add_handler(A, Recorder())
        lane = queue._layout.lane_for(A())
        partition = lane.partition
        with Moments(partition._lock.locked) as moments:
            assert partition.put_all(lane, [A(), A()], 2)

    assert len(moments.seen) > 2
    assert not any(moments.seen)


@pytest.mark.parametrize("in_bytes", [False, True])
def test_the_slots_add_up_at_every_moment_at_which_a_producer_may_be_interrupted(in_bytes: bool) -> None:
    settings: dict[str, Any] = {"buffer_bytes": 100, "size_of": lambda item: 7} if in_bytes else {}
    with open_queue(buffer_size=20, **settings) as queue:
        release = threading.Event()
        handler = Recorder(release)
        queue.add_handler(A, handler)
        queue.produce(A())
        assert handler.entered.wait(10)
        lane = queue._layout.lane_for(A())
        partition = lane.partition

        def lost() -> tuple[int, int, int]:
            held = len(lane.items)
            size = 7 * held if in_bytes else 0
            return (
                20 - held - partition._spare - len(partition.credits),
                size - partition._bytes,
                size - sum(lane.sizes),
            )

        with Moments(lost) as moments:
            assert queue.produce_many([A()] * 3) == 3
            assert queue.produce(A())
            assert queue.produce(A(), timeout=0.0)
            assert queue.produce_many([A()] * 30, timeout=0.0) == (9 if in_bytes else 15)
            assert queue.produce_many([A()] * 2, timeout=0.001) == 0
        release.set()

    # Between taking one slot and using it there is such a moment.
    assert set(moments.seen) - {(1, 0, 0)} == {(0, 0, 0)}
    assert moments.seen.count((1, 0, 0)) < len(moments.seen) / 2


def test_a_waiter_gets_the_bytes_that_an_earlier_one_did_not_fit_into_before_it_gave_up() -> None:
    release = threading.Event()
    handler = Recorder(release)
    with open_queue(buffer_bytes=10) as queue:
        queue.add_handler(bytes, handler)
        queue.produce(b"first")
        assert handler.entered.wait(10)
        queue.produce(b"12345")
        line = queue._layout.partitions[0]._waiters
        answers: list[bool] = []

        async def gives_up() -> None:
            large = asyncio.create_task(queue.produce_async(b"large one"))
            await asyncio.sleep(0)
            assert len(line) == 1
            threads = run_threads(lambda: answers.append(queue.produce(b"small")))
            wait_until(lambda: len(line) == 2)
            large.cancel()
            await asyncio.wait([large])
            join_all(threads)

        asyncio.run(gives_up())
        assert answers == [True]
        assert handler.items == []  # so nothing was drained
        release.set()
        queue.close()

    assert handler.items == [b"first", b"12345", b"small"]


def test_a_coroutine_that_was_interrupted_has_close_look_for_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*arguments: Any) -> int:
        partition._spare -= 1
        raise Interrupted

    with open_queue() as queue:
        queue.add_handler(A, Recorder())
        partition = queue._layout.lane_for(A()).partition
        monkeypatch.setattr(partition, "offer", interrupt)
        with pytest.raises(Interrupted):
            asyncio.run(queue.produce_async(A()))

        assert queue.close(timeout=10.0)
