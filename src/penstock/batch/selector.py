"""Which partition an item goes to."""

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, Self

from penstock.errors import ConfigError


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
