"""Fakes that are part of the product: what we test with, you can test with."""

import threading
import time
from collections.abc import Callable


class FakeClock:
    """A clock that moves only when told to.

    Threads: every method may be called from any thread.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        with self._lock:
            self._now += seconds


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Return as soon as `condition()` is true; AssertionError if it is not within `timeout` seconds.

    For what another thread or process will do soon. It is no substitute for an event where there is one.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not true after {timeout} s: {condition}")
        time.sleep(0.001)
