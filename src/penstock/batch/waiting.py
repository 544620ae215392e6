"""Producers that wait for room: a thread on a lock, a coroutine on a future."""

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batch.partition import Lane


LINK = 1.0  # seconds after which who was to be woken by another looks for itself


class Waiter(ABC):
    """One `produce` in line for room. The thread that makes room appends the item and only then wakes the producer.

    So waiters are served in the order in which they came, and no later producer overtakes them.
    The partition's lock guards `granted`.
    """

    __slots__ = ("granted", "items", "lane", "sizes")

    def __init__(self, lane: "Lane", items: Sequence[Any], sizes: Sequence[int] | None) -> None:
        self.lane = lane
        self.items = items
        self.sizes = sizes
        self.granted = 0

    @abstractmethod
    def wake(self) -> None:
        """All is granted, or the queue has closed."""


class ThreadWaiter(Waiter):
    """A thread that waits."""

    __slots__ = ("_line", "_woken", "called", "gone")

    def __init__(self, lane: "Lane", items: Sequence[Any], sizes: Sequence[int] | None, line: "WakeLine") -> None:
        super().__init__(lane, items, sizes)
        self._woken = threading.Lock()
        self._woken.acquire()
        self._line = line
        self.called = False  # these belong to the line: it is to be woken
        self.gone = False  # it does not wait any more

    def wake(self) -> None:
        self._line.call(self)

    def wake_now(self) -> None:
        try:
            self._woken.release()
        except RuntimeError:
            pass  # woken already, by a `close` that was interrupted and called again

    def wait(self, timeout: float | None) -> None:
        """Until woken, or for `timeout` seconds."""
        left = math.inf if timeout is None else timeout
        while left > 0 and not self._woken.acquire(timeout=min(left, LINK)):
            if self.called or self.granted == len(self.items):
                return  # the thread that was to wake us was itself interrupted: the line goes on from here
            left -= LINK

    def leave(self) -> None:
        """Wait no more, whether woken or not."""
        self._line.leave(self)


class WakeLine:
    """Wakes the threads that have got what they waited for one after the other: who runs again wakes the next.

    All woken at once would all be ahead of the drain threads in the line for the interpreter, and each of them would
    soon wait again at a partition that is still full: several times as many switches of threads for the same items.

    Threads: every method may be called from any thread.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """No thread waits: also in the child of a fork."""
        # _lock guards everything below, and `called` and `gone` of the waiters.
        self._lock = threading.Lock()
        self._first: ThreadWaiter | None = None  # woken, but it does not run yet; without it, `_others` is empty
        self._others: deque[ThreadWaiter] = deque()

    def call(self, waiter: ThreadWaiter) -> None:
        """Have `waiter` woken in its turn."""
        with self._lock:
            if waiter.gone or waiter.called:
                return
            waiter.called = True
            if self._first is not None:
                self._others.append(waiter)
                return
            self._first = waiter
        waiter.wake_now()

    def leave(self, waiter: ThreadWaiter) -> None:
        """`waiter` runs again: wake the next."""
        with self._lock:
            waiter.gone = True
            if waiter is not self._first:
                if not waiter.called or waiter not in self._others:
                    return
                self._others.remove(waiter)  # it waited for its turn for too long
            self._first = following = self._others.popleft() if self._others else None
        if following is not None:
            following.wake_now()


class AsyncWaiter(Waiter):
    """A coroutine that waits; woken from whichever thread made the room."""

    __slots__ = ("_loop", "future")

    def __init__(self, lane: "Lane", items: Sequence[Any], sizes: Sequence[int] | None) -> None:
        super().__init__(lane, items, sizes)
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            pass  # the loop has closed: no coroutine is left to wake

    async def wait(self, timeout: float | None) -> None:  # noqa: ASYNC109 - as for threads
        """Until woken, or for `timeout` seconds."""
        left = math.inf if timeout is None else timeout
        while left > 0:
            woken, _ = await asyncio.wait((self.future,), timeout=min(left, LINK))
            if woken or self.granted == len(self.items):
                return  # in the latter case the thread that was to wake us was itself interrupted
            left -= LINK

    def _resolve(self) -> None:
        if not self.future.done():  # the coroutine may have been cancelled
            self.future.set_result(None)
