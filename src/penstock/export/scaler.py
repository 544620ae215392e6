"""How many workers are worth having: one more while the queue is deep and the destination fast, half when idle."""

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.units import check_count, check_flag

INTERVAL = 1.0  # seconds between decisions: a few sends of a slow destination, so that each step can be seen to help
IDLE_AFTER = 30.0  # seconds without a block before workers are given up: shorter than that is a pause between flushes
DEEP = 0.5  # seconds of work that wait: less is gone before another worker would be up
SLOW = 2.0  # times the best latency seen: from there on more workers only queue up inside the destination
ALWAYS_FAST = 0.05  # seconds: below that, noise is larger than what load does to a destination
_WEIGHT = 0.2  # of a new latency in the average: the last ten or so matter
_FORGET = 1.01  # per decision; the best latency fades, since a destination may have become slower for good


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveWorkersConfig:
    """`adaptive_workers` in the configuration file."""

    enabled: bool = False
    """As many workers as are worth it."""
    min_workers: int = 1
    """At least so many."""
    max_workers: int = 0
    """At most; 0: four for each core."""

    def __post_init__(self) -> None:
        check_flag(self.enabled, "adaptive_workers.enabled")
        check_count(self.min_workers, "adaptive_workers.min_workers", 1)
        check_count(self.max_workers, "adaptive_workers.max_workers")
        if self.max_workers and self.max_workers < self.min_workers:
            raise ConfigError(
                f"must be 0 or >= min_workers = {self.min_workers}, got {self.max_workers}",
                field="adaptive_workers.max_workers",
            )


class Ewma:
    """A moving average that forgets. Written without a lock: of two samples in one moment either may be missed."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.value = sample if self.value == 0.0 else self.value + _WEIGHT * (sample - self.value)


class WorkerScaler:
    """Decides how many workers there are to be. Time is passed in; it does no I/O and has no lock."""

    def __init__(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ConfigError(f"workers need 1 <= least <= most, got {least} and {most}")
        self._least = least
        self._most = most
        self._best = 0.0
        self._busy_at: float | None = None

    def decide(self, now: float, *, workers: int, depth: int, latency: float) -> int:
        """How many workers from now on. `depth`: blocks that wait; `latency`: their average send, 0.0 if unknown."""
        if self._busy_at is None or depth:
            self._busy_at = now
        if latency:
            self._best = min(latency, self._best * _FORGET) if self._best else latency
        wanted = workers
        if now - self._busy_at >= IDLE_AFTER:
            self._busy_at = now
            wanted = workers // 2
        elif self._is_deep(workers, depth, latency) and self._is_fast(latency):
            wanted = workers + 1
        return min(max(wanted, self._least), self._most)

    def _is_deep(self, workers: int, depth: int, latency: float) -> bool:
        return depth > workers and (not latency or depth * latency / workers > DEEP)

    def _is_fast(self, latency: float) -> bool:
        return latency <= max(ALWAYS_FAST, SLOW * self._best)
