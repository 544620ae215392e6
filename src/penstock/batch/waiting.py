"""Producers that wait for room: a thread on a lock, a coroutine on a future."""

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batch.partition import Lane


class Waiter:
    """One `produce` in line for room. Who makes the room appends the item and only then wakes the producer.

    So those who wait are served in the order in which they came, and nobody who came later overtakes them.
    The partition's lock guards `granted`.
    """

    __slots__ = ("granted", "items", "lane", "sizes")

    def __init__(self, lane: "Lane", items: Sequence[Any], sizes: Sequence[int] | None) -> None:
        self.lane = lane
        self.items = items
        self.sizes = sizes
        self.granted = 0

    def wake(self) -> None:
        """All is granted, or the queue has closed."""
        raise NotImplementedError  # a thread and a coroutine are woken in different ways


class ThreadWaiter(Waiter):
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
            pass  # woken already, by a `close` that was interrupted and called again

    def wait(self, timeout: float | None) -> None:
        """Until woken, or for `timeout` seconds."""
        self._woken.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))


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
            pass  # the loop has closed: nobody is left to be woken

    def _resolve(self) -> None:
        if not self.future.done():  # the coroutine may have been cancelled meanwhile
            self.future.set_result(None)
