"""The circuit breaker: a destination that keeps failing is left alone for a while, then asked with one probe.

closed ──threshold failures in a row──► open ──reset_timeout──► half open ──probe succeeds──► closed
                                          ▲                         │
                                          └───────probe fails───────┘
"""

from dataclasses import dataclass
from enum import Enum

from penstock.units import check_count, check_flag, parse_duration


class CircuitState(Enum):
    """Where the breaker is: the label `state` of `penstock_circuit_breaker_state`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """`circuit_breaker` in the configuration file."""

    enabled: bool = True
    """Leave a failing destination alone."""
    threshold: int = 5
    """So many failures in a row open the circuit."""
    reset_timeout: float | str = 30.0
    """Seconds that it stays open before one probe may go out."""

    def __post_init__(self) -> None:
        check_flag(self.enabled, "circuit_breaker.enabled")
        check_count(self.threshold, "circuit_breaker.threshold", 1)
        object.__setattr__(self, "reset_timeout", parse_duration(self.reset_timeout, "circuit_breaker.reset_timeout"))


class CircuitBreaker:
    """Says whether a call may go out. Time is passed in; it does no I/O and has no lock.

    Every call that was allowed is answered with exactly one of `succeeded`, `failed` and `released`. Where calls
    overlap the answer carries the `generation` that the breaker had when the call was allowed: what was sent before
    the last change of state says nothing about the state that came after it.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        config = config or BreakerConfig()
        self._enabled = config.enabled
        self._threshold = config.threshold
        self._rest = float(config.reset_timeout)
        self._opened_at = 0.0
        self._probe_is_out = False
        self.state = CircuitState.CLOSED
        self.generation = 0
        self.failures = 0  # in a row
        self.opened = 0  # how often
        self.rejected = 0  # calls that were not allowed

    def allow(self, now: float) -> bool:
        """Whether a call may go out at `now`. When the rest is over that is true once: for the probe."""
        if self.state is CircuitState.CLOSED:
            return True
        if not self.would_allow(now):
            return False
        if self.state is CircuitState.OPEN:
            self._enter(CircuitState.HALF_OPEN)
        self._probe_is_out = True
        return True

    def would_allow(self, now: float) -> bool:
        """Whether `allow` would say yes at `now`. It takes no probe; a no is counted as rejected."""
        is_allowed = self.wait(now) <= 0.0 and not self._probe_is_out
        self.rejected += not is_allowed
        return is_allowed

    def wait(self, now: float) -> float:
        """Seconds until a call may be allowed; 0.0 if one may be now. Changes nothing."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened_at + self._rest - now)

    def succeeded(self, generation: int | None = None) -> None:
        """The destination took a batch, or refused one for what it contains: it works."""
        if self._is_stale(generation):
            return
        self.failures = 0
        if self.state is CircuitState.HALF_OPEN:
            self._enter(CircuitState.CLOSED)

    def failed(self, now: float, generation: int | None = None) -> None:
        """The destination could not be reached or could not serve."""
        if self._is_stale(generation) or not self._enabled:
            return
        self.failures += 1
        if self.state is CircuitState.HALF_OPEN or self.failures >= self._threshold:
            self.opened += 1
            self._opened_at = now
            self._enter(CircuitState.OPEN)

    def released(self, generation: int | None = None) -> None:
        """Nothing was sent, or nothing can be concluded from the answer: another call may go out in its stead."""
        if not self._is_stale(generation):
            self._probe_is_out = False

    def _is_stale(self, generation: int | None) -> bool:
        return generation is not None and generation != self.generation

    def _enter(self, state: CircuitState) -> None:
        self.state = state
        self.generation += 1
        self.failures = 0
        self._probe_is_out = False
