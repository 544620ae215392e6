"""How long to leave a destination alone after a failure: doubling, capped, with jitter."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.units import check_flag, check_number

_MAX_DOUBLINGS = 64  # beyond it every sensible multiplier has met its cap, and floats would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffConfig:
    """`backoff` in the configuration file."""

    enabled: bool = True
    """Wait longer after each failure in a row; false: every delay is the retry interval."""
    multiplier: float = 2.0
    """By what factor."""
    jitter: float = 0.5
    """Share of a delay that chance may take off, so that many senders do not come back in one moment."""

    def __post_init__(self) -> None:
        check_flag(self.enabled, "backoff.enabled")
        check_number(self.multiplier, "backoff.multiplier", 1.0)
        check_number(self.jitter, "backoff.jitter", 0.0, 1.0)


class Backoff:
    """Counts failures in a row and says how long to wait. It does no I/O, reads no time and has no lock.

    Sends that were under way together fail together: they are one failure. So a failure carries the `step` at which
    its send began, and only the first of a step counts.
    """

    def __init__(
        self,
        config: BackoffConfig | None = None,
        *,
        retry_interval: float = 5.0,
        max_retry_delay: float = 300.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if max_retry_delay < retry_interval:
            raise ConfigError(
                f"must be >= retry_interval = {retry_interval}, got {max_retry_delay}", field="max_retry_delay"
            )
        self._config = config or BackoffConfig()
        self._first = retry_interval
        self._most = max_retry_delay
        self._chance = chance
        self.step = 0
        self.failures = 0
        self.delay = 0.0
        """Seconds to wait now: 0.0 after a success."""

    def failed(self, step: int) -> float:
        """A send that began at `step` failed: the delay from now on."""
        if step == self.step:
            self.step += 1
            self.failures += 1
            self.delay = self.delay_after(self.failures)
        return self.delay

    def succeeded(self) -> None:
        if self.failures:
            self.step += 1
            self.failures = 0
            self.delay = 0.0

    def delay_after(self, failures: int) -> float:
        """The wait after so many failures in a row, shortened by chance."""
        config = self._config
        full = self._first
        if config.enabled:
            full *= config.multiplier ** min(max(failures, 1) - 1, _MAX_DOUBLINGS)
        return min(full, self._most) * (1.0 - config.jitter * self._chance())
