"""What users set: the durable queue's settings under the names and with the defaults of the seed."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError
from penstock.units import parse_bytes, parse_duration

Compression = Literal["none", "snappy", "lz4", "zstd"]
Order = Literal["fifo", "freshest"]

_COMPRESSIONS = ("none", "snappy", "lz4", "zstd")
_ORDERS = ("fifo", "freshest")
_LARGEST_BUFFER = 2**30  # small blocks share frames of this size, which a reader holds in memory
_LARGEST_FRAME = 2**32 - 2**20  # a frame holds the length of its payload in 32 bits


class Durability(Enum):
    """What a block has survived once `push` has returned.

    MEMORY: nothing yet. It is in memory until the memory layer overflows, the stale flush comes or the queue is
        closed; `kill -9` loses what is still there (at most `inmemory_blocks` and `stale_flush` seconds' worth).
        Fastest by far.
    DISK: `kill -9`, because the kernel has it. A power cut loses what the kernel had not written back yet: at most
        the last `meta_sync_interval` where the disk keeps up.
    FSYNC: a power cut, because the disk has it. Pushers that come together share one sync.

    An ack is remembered as well as a push at DISK. At FSYNC a power cut may forget the acks of the last
    `meta_sync_interval`, at MEMORY `kill -9` may: those blocks are delivered again, none is lost by it.
    """

    MEMORY = "memory"
    DISK = "disk"
    FSYNC = "fsync"


class FullBehavior(Enum):
    """What a push does when there is no room."""

    DROP_OLDEST = "drop_oldest"  # evict the oldest blocks until the new one fits
    DROP_NEWEST = "drop_newest"  # refuse the new block: QueueFull
    BLOCK = "block"  # wait for room, at most `block_timeout` seconds, then QueueFull


# As users may set them: a member, or its text.
DurabilitySetting = Durability | Literal["memory", "disk", "fsync"]
FullBehaviorSetting = FullBehavior | Literal["drop_oldest", "drop_newest", "block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FastQueueConfig:
    """Settings of one `FastQueue`. Sizes are bytes or strings like `512Mi`, durations seconds or strings like `30s`.

    The defaults are the seed's: fast, and not durable. A queue that loses nothing needs two settings:
    `durability="disk"` (or `"fsync"`) and `full_behavior="block"` (or `"drop_newest"`).
    """

    max_size: int = 10_000
    max_bytes: int | str = "1Gi"
    full_behavior: FullBehaviorSetting = FullBehavior.DROP_OLDEST
    """A member, or its text: `"block"`. Read back, it is the member."""
    block_timeout: float | str = 30.0
    inmemory_blocks: int = 2048
    """MEMORY: so many blocks wait in memory before they go to the disk. Else: so many are kept there as well, to hand
    them out without reading them back."""
    inmemory_bytes: int | str | None = None
    """Bytes that may be in memory, those on lease included, before the disk is used. None: blocks alone are counted."""
    chunk_size: int | str = "512Mi"
    meta_sync_interval: float | str = 1.0
    stale_flush: float | str = 30.0
    write_buffer_size: int | str = "256Ki"
    compression: Compression = "snappy"
    durability: DurabilitySetting = Durability.MEMORY
    """A member, or its text: `"disk"`. Read back, it is the member."""
    max_block_bytes: int | str = "128Mi"
    max_attempts: int | None = None
    """After so many deliveries without an ack a block becomes a dead letter. None: it is tried for ever."""
    dead_letter: str | Path | None = None
    """Folder of the dead-letter queue. None: `dead-letters` inside the queue's own folder."""
    order: Order = "fifo"

    def __post_init__(self) -> None:
        for field in ("max_bytes", "chunk_size", "write_buffer_size", "max_block_bytes"):
            self._set(field, parse_bytes(getattr(self, field), field))
        if self.inmemory_bytes is not None:
            self._set("inmemory_bytes", parse_bytes(self.inmemory_bytes, "inmemory_bytes"))
            if self.inmemory_bytes == 0:
                raise ConfigError("must be >= 1 or None, got 0", field="inmemory_bytes")
        for field in ("block_timeout", "meta_sync_interval", "stale_flush"):
            self._set(field, parse_duration(getattr(self, field), field))
        for field, kind in (("full_behavior", FullBehavior), ("durability", Durability)):
            self._set(field, _member(kind, getattr(self, field), field))
        for field in ("max_size", "max_bytes", "chunk_size", "write_buffer_size", "max_block_bytes", "inmemory_blocks"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"must be >= 1, got {value!r}", field=field)
        most = self.max_attempts
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError(f"must be >= 1 or None, got {most!r}", field="max_attempts")
        if parsed_bytes(self.write_buffer_size) > _LARGEST_BUFFER:
            raise ConfigError(
                f"must be <= {_LARGEST_BUFFER} (1Gi), got {self.write_buffer_size}", field="write_buffer_size"
            )
        if self.meta_sync_interval == 0:
            raise ConfigError("must be > 0, got 0", field="meta_sync_interval")
        if self.compression not in _COMPRESSIONS:
            raise ConfigError(
                f"must be one of {', '.join(_COMPRESSIONS)}, got {self.compression!r}", field="compression"
            )
        if self.order not in _ORDERS:
            raise ConfigError(f"must be one of {', '.join(_ORDERS)}, got {self.order!r}", field="order")
        self._set(
            "max_block_bytes", min(parsed_bytes(self.max_block_bytes), parsed_bytes(self.max_bytes), _LARGEST_FRAME)
        )

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)


def parsed_bytes(value: int | str) -> int:
    """A size that `FastQueueConfig` has parsed already, as the int that it is."""
    assert isinstance(value, int)
    return value


def parsed_seconds(value: float | str) -> float:
    """A duration that `FastQueueConfig` has parsed already, as the float that it is."""
    assert isinstance(value, float)
    return value


def _member(kind: type[Enum], value: object, field: str) -> Enum:
    """The enum member, also by its value: configuration files say `drop_oldest`."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"must be one of {', '.join(m.value for m in kind)}, got {value!r}", field=field) from None
