"""Fakes that are part of the product: what we test with, you can test with."""

import threading
import time
from collections.abc import Callable, Iterable

from penstock.errors import PayloadTooLarge
from penstock.export.exporter import PartialSuccess, Prepared


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


def wait_until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Return as soon as `condition()` is true; AssertionError if it is not within `timeout` seconds.

    For what another thread or process will do soon. It is no substitute for an event where there is one.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not true after {timeout} s: {condition}")
        time.sleep(0.001)


class MemoryExporter:
    """An exporter that keeps what it is sent.

    `max_bytes`: a larger batch is refused as too large; halves of it may fit. `hold`: while it is set, sends wait.
    Threads: every method may be called from any thread.
    """

    def __init__(self, *, max_bytes: int | None = None, in_order: bool = False) -> None:
        self.in_order = in_order
        self._max_bytes = max_bytes
        self._may_send = threading.Event()
        self._may_send.set()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.batches: list[bytes] = []
        self.most_at_once = 0
        self._at_once = 0
        self.closed = False

    def hold(self) -> None:
        """Let every send wait from now on, until `release` or `close`."""
        self._may_send.clear()

    def release(self) -> None:
        self._may_send.set()

    @property
    def at_once(self) -> int:
        """Sends that are under way."""
        return self._at_once

    def prepare(self, batch: bytes) -> Prepared:
        return Prepared(batch)

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._may_send.wait()
            if self.closed:
                raise ConnectionAbortedError("the exporter was closed")
            return self.take(prepared)
        finally:
            with self._lock:
                self._at_once -= 1

    def take(self, prepared: Prepared) -> PartialSuccess | None:
        """What a send does when its turn has come."""
        self._check_size(prepared.body)
        with self._lock:
            self.batches.append(prepared.body)
        return None

    def _check_size(self, body: bytes) -> None:
        if self._max_bytes is not None and len(body) > self._max_bytes:
            raise PayloadTooLarge(f"{len(body)} bytes, at most {self._max_bytes}")

    def split(self, batch: bytes) -> list[bytes] | None:
        """Its two halves."""
        middle = len(batch) // 2
        return [batch[:middle], batch[middle:]] if middle else None

    def close(self) -> None:
        self.closed = True
        self._may_send.set()


class FailingExporter(MemoryExporter):
    """An exporter that fails as it is told to.

    `errors` are raised by the first sends, one each, None among them is a success. `fail_with` makes all sends fail
    until `recover`. `poison` names what a batch must contain to fail with that error, always.
    """

    def __init__(
        self,
        errors: Iterable[Exception | None] = (),
        *,
        poison: tuple[bytes, Exception] | None = None,
        max_bytes: int | None = None,
        in_order: bool = False,
    ) -> None:
        super().__init__(max_bytes=max_bytes, in_order=in_order)
        self._errors = iter(tuple(errors))
        self._poison = poison
        self._failing: Exception | None = None
        self.attempts: list[bytes] = []

    def fail_with(self, error: Exception) -> None:
        self._failing = error

    def recover(self) -> None:
        self._failing = None

    def take(self, prepared: Prepared) -> PartialSuccess | None:
        with self._lock:
            self.attempts.append(prepared.body)
            error = self._failing or next(self._errors, None)
        if error is not None:
            raise error
        self._check_size(prepared.body)
        if self._poison is not None and self._poison[0] in prepared.body:
            raise self._poison[1]
        return super().take(prepared)
