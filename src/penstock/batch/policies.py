"""How many threads and partitions there are, and which partition an item goes to.

The caller describes the workload, the machine decides the numbers.
"""

import math
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, Self

from penstock import machine
from penstock.errors import ConfigError


def _half_up(value: float) -> int:
    """Round to nearest, halves up: `round` would make 0.5 of a thread none and 1.5 threads two."""
    return math.floor(value + 0.5)


def _whole(what: str, kind: str, count: int) -> int:
    if type(count) is not int or count < 1:
        raise ConfigError(f"{what} must be a whole number >= 1, got {kind}({count!r})")
    return count


def _per_core(multiplier: float) -> float:
    if not isinstance(multiplier, (int, float)) or not 0 < multiplier < math.inf:
        raise ConfigError(f"threads per core must be a number > 0, got {multiplier!r}")
    return multiplier


@dataclass(frozen=True, slots=True)
class ThreadPolicy:
    """How many drain threads; always resolves to at least one."""

    kind: Literal["fixed", "cpu_cores", "io_bound"]
    base: int = 0
    per_core: float = 0.0

    @classmethod
    def fixed(cls, count: int) -> Self:
        """Exactly `count` threads."""
        return cls("fixed", base=_whole("threads", "fixed", count))

    @classmethod
    def cpu_cores(cls, multiplier: float) -> Self:
        """`multiplier` threads per core, rounded."""
        return cls("cpu_cores", per_core=_per_core(multiplier))

    @classmethod
    def cpu_cores_with_base(cls, base: int, multiplier: float) -> Self:
        """`base` threads and `multiplier` more per core."""
        if type(base) is not int or base < 0:
            raise ConfigError(f"base must be a whole number >= 0, got {base!r}")
        return cls("cpu_cores", base=base, per_core=_per_core(multiplier))

    @classmethod
    def io_bound(cls, count: int) -> Self:
        """Exactly `count` threads that mostly wait for others, so the number of cores does not matter."""
        return cls("io_bound", base=_whole("threads", "io_bound", count))

    def resolve(self, cores: int | None = None) -> int:
        """The number of threads on a machine of `cores` (by default what this process may use of this one)."""
        return max(1, self.base + _half_up(self.per_core * (machine.cores() if cores is None else cores)))


@dataclass(frozen=True, slots=True)
class PartitionPolicy:
    """How many partitions; always resolves to at least one."""

    kind: Literal["fixed", "thread_multiply", "adaptive"]
    count: int

    @classmethod
    def fixed(cls, count: int) -> Self:
        """Exactly `count` partitions."""
        return cls._checked("fixed", count)

    @classmethod
    def thread_multiply(cls, multiplier: int) -> Self:
        """`multiplier` partitions per drain thread."""
        return cls._checked("thread_multiply", multiplier)

    @classmethod
    def adaptive(cls, multiplier: int = 25) -> Self:
        """One partition per handler up to `multiplier` per thread, then one for every two handlers."""
        return cls._checked("adaptive", multiplier)

    @classmethod
    def _checked(cls, kind: Literal["fixed", "thread_multiply", "adaptive"], count: int) -> Self:
        return cls(kind, _whole("partitions", kind, count))

    def resolve(self, threads: int, weighted_handlers: float = 0.0) -> int:
        """The number of partitions for so many threads and for handlers whose weights add up to so much."""
        if self.kind == "fixed":
            return self.count
        if self.kind == "thread_multiply":
            return self.count * threads
        # Weights like 0.05 add up to 62.349999…: without the rounding a sum just above a whole number
        # would make a partition for nothing.
        handlers = math.ceil(round(weighted_handlers, 6))
        threshold = self.count * threads
        if handlers == 0:
            return threads
        return handlers if handlers <= threshold else threshold + (handlers - threshold) // 2


@dataclass(frozen=True, slots=True)
class PartitionSelector:
    """Where items go, and with it what may run at once.

    type_hash    one type, one partition, for good: its handler never runs on two threads at once, its items keep
                 their order. A single type keeps a single thread busy.
    round_robin  each item to the next partition: one type uses every thread. The handler (or consumer) runs for
                 several partitions at once, and there is no order across them.
    by_key       items of one key to one partition: order per key; the handler runs for several partitions at once.
    """

    kind: Literal["type_hash", "round_robin", "by_key"]
    key: Callable[[Any], Hashable] | None = None

    @classmethod
    def type_hash(cls) -> Self:
        """By exact type; the placement is sticky and even."""
        return cls("type_hash")

    @classmethod
    def round_robin(cls) -> Self:
        """One after the other."""
        return cls("round_robin")

    @classmethod
    def by_key(cls, function: Callable[[Any], Hashable]) -> Self:
        """By what `function` says of the item; whole numbers count as they are."""
        if not callable(function):
            raise ConfigError(f"by_key takes a function of the item, got {function!r}")
        return cls("by_key", function)


def stable_hash(key: Hashable) -> int:
    """The same number in every run for numbers, strings and bytes, which `hash` does not give."""
    if isinstance(key, int):
        return key
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    return hash(key)
