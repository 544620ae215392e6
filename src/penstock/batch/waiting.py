"""Producers that wait for room: a thread on a lock, a coroutine on a future."""

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batch.partition import Lane

RECHECK = 1.0  # seconds after which a waiter looks for itself: the thread that granted room may have been interrupted


class ProduceWaiter(ABC):
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
        """All is granted, or the queue has closed. May be called again."""


class ThreadProduceWaiter(ProduceWaiter):
    """A thread that waits."""

    __slots__ = ("_woken",)

    def __init__(self, lane: "Lane", items: Sequence[Any], sizes: Sequence[int] | None) -> None:
        super().__init__(lane, items, sizes)
        self._woken = threading.Lock()
        self._woken.acquire()

    def wake(self) -> None:
        try:
            self._woken.release()
        except RuntimeError:
            pass  # woken already

    def wait(self, timeout: float | None) -> None:
        """Until woken, or for `timeout` seconds."""
        left = math.inf if timeout is None else timeout
        while left > 0 and not self._woken.acquire(timeout=min(left, RECHECK)) and self.granted < len(self.items):
            left -= RECHECK


class AsyncProduceWaiter(ProduceWaiter):
    """A coroutine that waits; woken from any thread."""

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
        while left > 0 and self.granted < len(self.items):
            woken, _ = await asyncio.wait((self.future,), timeout=min(left, RECHECK))
            if woken:
                return
            left -= RECHECK

    def _resolve(self) -> None:
        if not self.future.done():  # the coroutine may have been cancelled
            self.future.set_result(None)
