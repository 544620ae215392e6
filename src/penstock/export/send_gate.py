"""The send gate: whether a send may go out now, and what its outcome means for the next ones.

It joins the breaker, the pause that backoff or Retry-After ask for, and the limit of sends under way behind one lock.
"""

import logging
import threading
from typing import NamedTuple

from penstock.clock import Clock
from penstock.errors import ErrorClass, ExportError, TransientExportError
from penstock.export.backoff import Backoff
from penstock.export.breaker import CircuitBreaker, CircuitState
from penstock.export.classify import LONGEST_RETRY_AFTER

log = logging.getLogger(__name__)

# Errors of the destination: any other batch would have met them as well. (A client error that a batch causes is
# permanent; a transient one is caused by the address.)
DESTINATION_ERRORS = (ErrorClass.NETWORK, ErrorClass.RATE_LIMIT, ErrorClass.AUTH, ErrorClass.CLIENT_ERROR)

_LEAST_PAUSE = 0.1  # seconds, for a destination that says "at once" each time


class SendPermit(NamedTuple):
    """Permission for one send, with the state of breaker and backoff when it began."""

    generation: int
    step: int


class SendGate:
    """Lets sends out: `wait_open` before a batch is leased, `begin` before it is sent.

    Every permit of `begin` is given back with exactly one of `succeeded`, `refused`, `failed` and `abandoned`.
    Threads: every method may be called from any thread.
    Blocks: `wait_open` while the destination is to be left alone, `begin` while too many sends are under way.
    """

    def __init__(
        self,
        breaker: CircuitBreaker,
        backoff: Backoff,
        send_limit: int,
        clock: Clock,
        *,
        in_order: bool = False,
        queue: str = "memory",
        destination: str = "",
    ) -> None:
        self.queue = queue
        """The queue's name in log lines: a process may have several queues."""
        self._destination = destination
        self._clock = clock
        self.in_order = in_order
        self._send_limit = send_limit
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._breaker = breaker
        self._backoff = backoff
        self._paused_until = 0.0  # by backoff; a success ends it, and so does the breaker when it opens
        self._asked_until = 0.0  # by Retry-After; nothing ends it but time
        self._failing = False
        self._failed_at = 0.0
        self._last_error = ""
        self._stopped = False
        self.inflight = 0

    # -- before a send -----------------------------------------------------------------------------------------------

    def wait_open(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until a send could go out. Returns whether; `begin` decides."""
        deadline = self._clock.monotonic() + timeout
        with self._lock:
            while not self._stopped:
                now = self._clock.monotonic()
                pause = self._pause_locked(now)
                if pause <= 0 and self._breaker.would_allow(now):
                    return True
                if now >= deadline:
                    return False
                # While a probe is out, its outcome is what ends the wait.
                rest = max(pause, self._breaker.wait(now)) or timeout
                self._changed.wait(min(rest, deadline - now))
            return False

    def begin(self, *, is_continued: bool = False) -> SendPermit | None:
        """Take a place among the sends under way; None if the destination is to be left alone, or the gate is stopped.

        `is_continued`: it is the next part of a batch that is half sent. A stopped gate lets it out.
        """
        with self._lock:
            while is_continued or not self._stopped:
                now = self._clock.monotonic()
                if self._pause_locked(now) > 0:
                    return None
                if self.inflight < self._send_limit:
                    if not self._breaker.allow(now):
                        return None
                    self.inflight += 1
                    return SendPermit(self._breaker.generation, self._backoff.step)
                self._changed.wait()
            return None

    # -- after a send ------------------------------------------------------------------------------------------------

    def succeeded(self, permit: SendPermit) -> None:
        """The destination took the batch."""
        with self._lock:
            self._ended_locked()
            if permit.generation != self._breaker.generation:
                return  # it was sent before the circuit opened, and says nothing about now
            self._breaker.succeeded()
            self._backoff.succeeded()
            self._paused_until = 0.0
            recovered, self._failing = self._failing, False
        if recovered:
            log.info("Export recovered. queue=%s destination=%s", self.queue, self._destination)

    def refused(self, permit: SendPermit, error: ExportError) -> None:
        """The destination will never take this batch. It counts as a failure where the fault is its own (a 500).

        So bad data stops nothing, and a broken receiver does not turn the whole queue into dead letters.
        """
        if error.error_class is ErrorClass.SERVER_ERROR:
            self.failed(permit, TransientExportError(str(error), error.error_class), 1)
        else:
            self.succeeded(permit)

    def failed(self, permit: SendPermit, error: TransientExportError, attempts: int) -> float:
        """The destination could not take the batch now. Returns the seconds that the batch itself has to wait.

        The first failure in a row delays that batch alone; from the second on the destination is left alone. So one
        reset connection does not stop the others, and an outage does not send every batch into it. Where batches must
        stay in order, nothing may pass the one that failed: the destination is left alone from the first failure on.
        """
        with self._lock:
            self._ended_locked()
            now = self._clock.monotonic()
            was, began, self._failing = self._breaker.state, not self._failing, True
            if began:
                self._failed_at = now
            self._last_error = str(error)
            if error.retry_after is not None:
                self._breaker.released(permit.generation)  # a Retry-After is no failure to count
                until = now + min(max(error.retry_after, _LEAST_PAUSE), LONGEST_RETRY_AFTER)
                self._asked_until = max(self._asked_until, until)
                wait = 0.0
            else:
                wait = self._count_failure_locked(now, permit, error, attempts)
            opened = self._breaker.state is CircuitState.OPEN and was is CircuitState.CLOSED
            is_news = not self._stopped  # afterwards it is `close` that cuts sends off
        said = (self.queue, self._destination, error.error_class.value, error)
        if began and is_news:
            log.warning("Export started failing. queue=%s destination=%s error_type=%s error=%s", *said)
        if opened and is_news:
            log.warning("Circuit opened. queue=%s destination=%s error_type=%s error=%s", *said)
        return wait

    def _count_failure_locked(
        self, now: float, permit: SendPermit, error: TransientExportError, attempts: int
    ) -> float:
        self._breaker.failed(now, permit.generation)
        delay = self._backoff.failed(permit.step)
        if self._breaker.state is CircuitState.OPEN:
            self._paused_until = 0.0  # now its rest is what counts: a probe each time, not minutes of backoff
        elif self._breaker.state is CircuitState.CLOSED and (self._backoff.failures > 1 or self.in_order):
            self._paused_until = max(self._paused_until, now + delay)
        is_held = self._breaker.state is not CircuitState.CLOSED or self._pause_locked(now) > 0
        if is_held and (self.in_order or error.error_class in DESTINATION_ERRORS):
            return 0.0
        return delay if attempts <= 1 else self._backoff.delay_after(attempts)

    def abandoned(self, permit: SendPermit) -> None:
        """The send ended without an outcome: another may probe in its stead."""
        with self._lock:
            self._ended_locked()
            self._breaker.released(permit.generation)

    def counts_as_attempt(self, error: TransientExportError) -> bool:
        """Whether the failure counts toward `max_attempts`: not where the destination is down."""
        return (
            error.retry_after is None
            and error.error_class not in DESTINATION_ERRORS
            and self._breaker.state is CircuitState.CLOSED
        )

    def stop(self) -> None:
        """Let no further send out. Threads that wait return."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    @property
    def state(self) -> CircuitState:
        return self._breaker.state

    @property
    def opened(self) -> int:
        return self._breaker.opened

    @property
    def rejected(self) -> int:
        return self._breaker.rejected

    def failing(self) -> tuple[str, float, str] | None:
        """The destination, the seconds since it began to fail, and its last error; None while it works."""
        with self._lock:
            if not self._failing:
                return None
            return self._destination, self._clock.monotonic() - self._failed_at, self._last_error

    def pause_left(self) -> float:
        """Seconds until the destination is asked again, by backoff, Retry-After or breaker; 0.0 if it may be now."""
        with self._lock:
            now = self._clock.monotonic()
            return max(0.0, self._pause_locked(now), self._breaker.wait(now))

    def _ended_locked(self) -> None:
        self.inflight -= 1
        self._changed.notify_all()  # there is room, and the outcome may open or close the gate

    def _pause_locked(self, now: float) -> float:
        """Seconds of backoff or Retry-After that are left; 0.0 or less if there are none."""
        return max(self._paused_until, self._asked_until) - now
