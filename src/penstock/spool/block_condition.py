"""The condition that leasers wait for: threads as for any other, coroutines without a thread."""

import asyncio
import threading


class SpoolCondition(threading.Condition):
    """A condition whose `notify` wakes as many threads as it says, and every coroutine: each looks for itself.

    Threads: `waiting` and all methods but `wait_async` are used under its lock.
    """

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._guard = lock
        self._futures: set[asyncio.Future[None]] = set()
        self.waiting = 0  # threads and coroutines

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1

    def notify(self, n: int = 1) -> None:
        super().notify(n)
        for future in self._futures:
            try:
                future.get_loop().call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                pass  # the loop has closed: no coroutine is left to wake

    def new_future(self) -> "asyncio.Future[None]":
        """What a coroutine waits for, from now on, with `wait_async`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        self.waiting += 1
        return future

    async def wait_async(self, future: "asyncio.Future[None]", timeout: float) -> None:  # noqa: ASYNC109 - as `wait`
        """Wait until notified, at most `timeout` seconds. The lock is not held."""
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            with self._guard:
                self._futures.discard(future)
                self.waiting -= 1


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
