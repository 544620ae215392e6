"""The gate before a destination: whether and when a send may go out, and what its outcome means for the next ones.

It joins three things behind one lock: the breaker, the pause that backoff or Retry-After ask for, and the limit of
sends that are under way.
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

# These say nothing about the batch that met them: another one would have failed as well. (A client error that is the
# batch's own is permanent; one that is transient is the address's.)
NOT_THE_BATCH = (ErrorClass.NETWORK, ErrorClass.RATE_LIMIT, ErrorClass.AUTH, ErrorClass.CLIENT_ERROR)

_LEAST_PAUSE = 0.1  # seconds, for a destination that says "at once" each time


class Permit(NamedTuple):
    """Leave to send, and where breaker and backoff were when it was given."""

    generation: int
    step: int


class Gate:
    """Lets sends out: `enter`, then `begin`, then exactly one of `succeeded`, `refused`, `failed` and `abandoned`.

    Threads: every method may be called from any thread.
    Blocks: `enter`, `wait_open` and `begin`, while the destination is to be left alone or has enough to do.
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
        """What log lines call the queue that waits before it: a process may have several, each to another place."""
        self._destination = destination
        self._clock = clock
        self.in_order = in_order
        self._send_limit = send_limit
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._breaker = breaker
        self._backoff = backoff
        self._paused_until = 0.0  # by backoff; a success ends it, and so does the breaker when it opens
        self._asked_until = 0.0  # by Retry-After; nothing ends it but time
        self._failing = False
        self._stopped = False
        self.inflight = 0
        self._waiting = 0  # for room
        # The permit of now, while everything is well: read without the lock, since a batch asks for it twice.
        self._current: Permit | None = self._permit_locked()

    # -- going out ---------------------------------------------------------------------------------------------------

    def enter(self, timeout: float) -> Permit | None:
        """Leave to send one batch, None if there is none within `timeout` seconds.

        A permit that is not used by `begin` is given back with `release`.
        """
        return self._current or self._enter(timeout)

    def _enter(self, timeout: float) -> Permit | None:
        deadline = self._clock.monotonic() + timeout
        with self._lock:
            while not self._stopped:
                now = self._clock.monotonic()
                pause = self._pause_locked(now)
                if pause <= 0 and self._breaker.allow(now):
                    self._refresh_locked(now)
                    return self._permit_locked()
                if now >= deadline:
                    return None
                # With a probe out there is nothing to wait for but its outcome.
                rest = max(pause, self._breaker.wait(now)) or timeout
                self._changed.wait(min(rest, deadline - now))
            return None

    def wait_open(self, timeout: float) -> bool:
        """Whether a send could go out, within `timeout` seconds. Takes no permit: for those who only prepare."""
        deadline = self._clock.monotonic() + timeout
        with self._lock:
            while not self._stopped:
                now = self._clock.monotonic()
                rest = max(self._pause_locked(now), self._breaker.wait(now))
                if rest <= 0:
                    return True
                if now >= deadline:
                    return False
                self._changed.wait(min(rest, deadline - now))
            return False

    def is_current(self, permit: Permit) -> bool:
        """Whether nothing has happened since the permit was given that would forbid the send now."""
        if permit is self._current:
            return True
        with self._lock:
            return self._is_current_locked(permit)

    def _is_current_locked(self, permit: Permit) -> bool:
        well = not self._stopped and self._pause_locked(self._clock.monotonic()) <= 0
        return well and permit == self._permit_locked()

    def enter_again(self) -> Permit | None:
        """Leave to send the next part of a batch of which one was just answered; None if the destination is to be left
        alone by now. Also when it has stopped: what has begun is finished."""
        with self._lock:
            now = self._clock.monotonic()
            if self._pause_locked(now) > 0 or not self._breaker.allow(now):
                return None
            self._refresh_locked(now)
            return self._permit_locked()

    def begin(self, permit: Permit) -> bool:
        """Take one of the sends that may be under way at a time; the outcome gives it back.

        False if nothing may be sent any more, after we had to wait: it was stopped, or the destination is to be left
        alone. Then the permit is back.
        """
        with self._lock:
            if self.inflight >= self._send_limit and not self._wait_for_room_locked(permit):
                self._release_locked(permit)
                return False
            self.inflight += 1
            return True

    def _wait_for_room_locked(self, permit: Permit) -> bool:
        """Whether there is room, and leave to use it."""
        while self.inflight >= self._send_limit:
            if self._stopped:
                return False
            self._waiting += 1
            try:
                self._has_room.wait()
            finally:
                self._waiting -= 1
        if self._is_current_locked(permit):
            return True
        if self._waiting:
            self._has_room.notify()  # we were told of a place that we do not take
        return False

    # -- what became of it -------------------------------------------------------------------------------------------

    def succeeded(self, permit: Permit) -> None:
        """The destination took it."""
        with self._lock:
            self._ended_locked()
            if permit is self._current and not self._failing:
                return
            if permit.generation != self._breaker.generation:
                return  # it was sent before the circuit opened: old news
            self._breaker.succeeded()
            self._backoff.succeeded()
            self._paused_until = 0.0
            recovered, self._failing = self._failing, False
            self._refresh_locked(self._clock.monotonic())
            self._changed.notify_all()
        if recovered:
            log.info("Export recovered. queue=%s destination=%s", self.queue, self._destination)

    def refused(self, permit: Permit, error: ExportError) -> None:
        """The destination will not have this batch. It counts as a failure where the fault is its own (a 500).

        So bad data stops nothing, and a broken receiver does not turn the whole queue into dead letters.
        """
        if error.error_class is ErrorClass.SERVER_ERROR:
            self.failed(permit, TransientExportError(str(error), error.error_class), 1)
        else:
            self.succeeded(permit)

    def failed(self, permit: Permit, error: TransientExportError, attempts: int) -> float:
        """The destination could not take it now. How long that batch has to wait, by itself, before its next attempt.

        The first failure in a row is the batch's alone; from the second on the destination is left alone. So one reset
        connection does not stop the others, and an outage does not send every batch into it. Where batches must stay in
        order, nothing may pass the one that failed: the destination is left alone from the first failure on.
        """
        with self._lock:
            self._ended_locked()
            now = self._clock.monotonic()
            was, began, self._failing = self._breaker.state, not self._failing, True
            if error.retry_after is not None:
                self._breaker.released(permit.generation)  # it said when: that is no failure to be counted
                until = now + min(max(error.retry_after, _LEAST_PAUSE), LONGEST_RETRY_AFTER)
                self._asked_until = max(self._asked_until, until)
                self._leave_alone_locked()
                wait = 0.0
            else:
                wait = self._count_failure_locked(now, permit, error, attempts)
            opened = self._breaker.state is CircuitState.OPEN and was is CircuitState.CLOSED
            is_news = not self._stopped  # afterwards it is us who cut sends off
        said = (self.queue, self._destination, error.error_class.value, error)
        if began and is_news:
            log.warning("Export started failing. queue=%s destination=%s error_type=%s error=%s", *said)
        if opened and is_news:
            log.warning("Circuit opened. queue=%s destination=%s error_type=%s error=%s", *said)
        return wait

    def _count_failure_locked(self, now: float, permit: Permit, error: TransientExportError, attempts: int) -> float:
        self._breaker.failed(now, permit.generation)
        delay = self._backoff.failed(permit.step)
        is_open = self._breaker.state is CircuitState.OPEN
        if is_open:
            self._paused_until = 0.0  # now its rest is what counts: a probe each time, not minutes of backoff
            self._changed.notify_all()
        elif self._breaker.state is CircuitState.CLOSED and (self._backoff.failures > 1 or self.in_order):
            self._paused_until = max(self._paused_until, now + delay)
            self._leave_alone_locked()
        is_held = self._breaker.state is not CircuitState.CLOSED or self._pause_locked(now) > 0
        self._refresh_locked(now)
        if is_held and (self.in_order or error.error_class in NOT_THE_BATCH):
            return 0.0
        return delay if attempts <= 1 else self._backoff.delay_after(attempts)

    def blames_batch(self, error: TransientExportError) -> bool:
        """Whether the failure may be the batch's own doing, rather than that of a destination that is down."""
        return (
            error.retry_after is None
            and error.error_class not in NOT_THE_BATCH
            and self._breaker.state is CircuitState.CLOSED
        )

    def abandoned(self, permit: Permit) -> None:
        """The send ended without an outcome."""
        with self._lock:
            self._ended_locked()
        self.release(permit)

    def release(self, permit: Permit) -> None:
        """Nothing was sent, and nothing was begun."""
        if permit is self._current:
            return
        with self._lock:
            self._release_locked(permit)

    def _release_locked(self, permit: Permit) -> None:
        self._breaker.released(permit.generation)
        if self._breaker.state is CircuitState.HALF_OPEN:
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nothing out any more; waiting workers are told so."""
        with self._lock:
            self._stopped = True
            self._current = None
            self._changed.notify_all()
            self._has_room.notify_all()

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

    def rest(self) -> float:
        """Seconds until the destination is asked again, by backoff, Retry-After or breaker; 0.0 if it may be now."""
        with self._lock:
            now = self._clock.monotonic()
            return max(0.0, self._pause_locked(now), self._breaker.wait(now))

    def _ended_locked(self) -> None:
        self.inflight -= 1
        if self._waiting:
            self._has_room.notify()

    def _refresh_locked(self, now: float) -> None:
        """Say again whether all is well; the permit changes only when breaker or backoff have."""
        well = self._breaker.state is CircuitState.CLOSED and self._pause_locked(now) <= 0 and not self._stopped
        fresh = self._permit_locked() if well else None
        if fresh != self._current:
            self._current = fresh

    def _permit_locked(self) -> Permit:
        return Permit(self._breaker.generation, self._backoff.step)

    def _pause_locked(self, now: float) -> float:
        """Seconds that the destination is to be left alone; 0.0 or less if it is not, as far as the breaker agrees."""
        return max(self._paused_until, self._asked_until) - now

    def _leave_alone_locked(self) -> None:
        self._current = None
        self._changed.notify_all()
