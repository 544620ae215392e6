"""How long to wait before the next try: doubling, capped, with jitter."""

from collections.abc import Callable
from dataclasses import dataclass
from random import random

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffPolicy:
    """Delays that double from `first` up to `limit`, each shortened by a random share of up to `jitter`."""

    first: float = 0.2
    limit: float = 30.0
    jitter: float = 0.5  # a restarted broker must not meet all its clients in one moment

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.limit:
            raise ConfigError(f"backoff needs 0 < first <= limit, got first={self.first} limit={self.limit}")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"backoff.jitter must be within 0 and 1, got {self.jitter}")

    def delay(self, failures: int, chance: float) -> float:
        """The wait after the `failures`-th failure in a row; `chance` within [0, 1)."""
        full = min(self.limit, self.first * 2.0 ** min(failures - 1, 60))
        return full * (1 - self.jitter * chance)


class RetryDelay:
    """Counts failures in a row. One thread only."""

    def __init__(self, policy: BackoffPolicy, chance: Callable[[], float] = random) -> None:
        self._policy = policy
        self._chance = chance
        self.failures = 0

    def failed(self) -> float:
        """One more failure: how long to wait now."""
        self.failures += 1
        return self._policy.delay(self.failures, self._chance())

    def succeeded(self) -> None:
        self.failures = 0
