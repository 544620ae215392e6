"""What users set: the whole `exporter.queue` of the configuration file, under the seed's names and defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from penstock.errors import ConfigError
from penstock.export.backoff import Backoff, BackoffConfig
from penstock.export.breaker import BreakerConfig
from penstock.export.scaler import AdaptiveWorkersConfig
from penstock.machine import cores, usable_memory
from penstock.spool import Durability, FastQueueConfig, FullBehavior
from penstock.units import check_count, check_flag, check_number, parse_bytes, parse_duration

_QUEUE_TYPES = ("memory", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplitConfig:
    """`pipeline_split` in the configuration file: preparing and sending on threads of their own."""

    enabled: bool = False
    preparer_count: int = 0
    """Threads that compress; 0: one for each core."""
    sender_count: int = 0
    """Senders; 0: two for each core."""
    channel_size: int = 256
    """Prepared batches that may wait between the two."""

    def __post_init__(self) -> None:
        check_flag(self.enabled, "pipeline_split.enabled")
        for name, least in (("preparer_count", 0), ("sender_count", 0), ("channel_size", 1)):
            check_count(getattr(self, name), f"pipeline_split.{name}", least)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverConfig:
    """`failover` in the configuration file: where a block goes that the durable queue cannot take."""

    enabled: bool = True
    max_size: int = 1000
    max_bytes: int | str = 256_000_000
    drain_interval: float | str = 5.0
    """How often it is drained."""
    drain_batch: int = 10
    """Batches of one drain at most."""

    def __post_init__(self) -> None:
        check_flag(self.enabled, "failover.enabled")
        for name in ("max_size", "drain_batch"):
            check_count(getattr(self, name), f"failover.{name}", 1)
        for name, parsed in (
            ("max_bytes", parse_bytes(self.max_bytes, "failover.max_bytes")),
            ("drain_interval", parse_duration(self.drain_interval, "failover.drain_interval")),
        ):
            if not parsed:
                raise ConfigError(f"must be > 0, got {getattr(self, name)!r}", field=f"failover.{name}")
            object.__setattr__(self, name, parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendQueueConfig:
    """Settings of one `SendQueue` and of the queue beneath it. Sizes and durations as `FastQueueConfig` takes them."""

    # the queue
    enabled: bool = True
    """False: nothing is held. A push sends at once, and raises what went wrong."""
    type: Literal["memory", "disk"] = "disk"
    path: str | Path = "./queue"
    max_size: int = 10_000
    max_bytes: int | str = "1Gi"
    full_behavior: FullBehavior = FullBehavior.DROP_OLDEST
    block_timeout: float | str = 30.0
    inmemory_blocks: int = 2048
    chunk_size: int | str = "512Mi"
    meta_sync_interval: float | str = 1.0
    stale_flush: float | str = 30.0
    write_buffer_size: int | str = "256Ki"
    compression: Literal["none", "snappy", "lz4", "zstd"] = "snappy"
    durability: Durability = Durability.MEMORY
    max_attempts: int | None = None
    order: Literal["fifo", "freshest"] = "fifo"
    # how much of the machine
    memory_percent: float = 0.10
    """Share of the process's memory that the queue may hold; 0: no bound but the others."""
    memory_limit_ratio: float = 0.85
    """Share of the container's (else the machine's) memory that the process counts as its own."""
    adaptive_enabled: bool = True
    """The limit of blocks follows their mean size, so that the limit of bytes is the one that counts."""
    target_utilization: float = 0.85
    """Share of `max_bytes` that the adaptive limit of blocks aims at."""
    # sending
    always_queue: bool = True
    """False: a push first tries to send, on the caller's thread, and queues only what failed."""
    workers: int = 0
    """0: two for each core."""
    max_concurrent_sends: int = 4
    """Sends that one sender of the pipeline split may have under way."""
    global_send_limit: int = 0
    """Sends under way in all; 0: eight for each core."""
    retry_interval: float | str = 5.0
    max_retry_delay: float | str = 300.0
    backoff: BackoffConfig = field(default_factory=BackoffConfig)
    circuit_breaker: BreakerConfig = field(default_factory=BreakerConfig)
    pipeline_split: PipelineSplitConfig = field(default_factory=PipelineSplitConfig)
    adaptive_workers: AdaptiveWorkersConfig = field(default_factory=AdaptiveWorkersConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)

    def __post_init__(self) -> None:
        for name in ("enabled", "adaptive_enabled", "always_queue"):
            check_flag(getattr(self, name), name)
        for name, kind in _SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"must be a {kind.__name__}, got {getattr(self, name)!r}", field=name)
        if self.type not in _QUEUE_TYPES:
            raise ConfigError(f"must be one of {', '.join(_QUEUE_TYPES)}, got {self.type!r}", field="type")
        for name, least in (("workers", 0), ("max_concurrent_sends", 1), ("global_send_limit", 0)):
            check_count(getattr(self, name), name, least)
        for name in ("memory_percent", "memory_limit_ratio", "target_utilization"):
            check_number(getattr(self, name), name, 0.0, 1.0)
        if self.type == "memory" and self.order == "freshest":
            raise ConfigError("must be 'fifo' where type is 'memory', got 'freshest'", field="order")
        if not isinstance(self.path, (str, os.PathLike)):
            raise ConfigError(f"must name a folder, got {self.path!r}", field="path")
        for name in ("memory_limit_ratio", "target_utilization"):
            if not getattr(self, name):
                raise ConfigError("must be > 0, got 0", field=name)
        for name in ("retry_interval", "max_retry_delay"):
            self._set(name, parse_duration(getattr(self, name), name))
        self.new_backoff()  # refuses what makes no sense
        checked = FastQueueConfig(**{f.name: getattr(self, f.name) for f in fields(FastQueueConfig) if f.name in _OWN})
        for name in ("max_bytes", "block_timeout", "full_behavior", "durability"):
            self._set(name, getattr(checked, name))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    # -- what the zeros stand for ------------------------------------------------------------------------------------

    def worker_count(self) -> int:
        return self.workers or 2 * cores()

    def most_workers(self) -> int:
        """The upper end of adaptive scaling."""
        return max(self.adaptive_workers.max_workers or 4 * cores(), self.adaptive_workers.min_workers)

    def preparer_count(self) -> int:
        return self.pipeline_split.preparer_count or cores()

    def sender_count(self) -> int:
        return self.pipeline_split.sender_count or 2 * cores()

    def send_limit(self) -> int:
        return self.global_send_limit or 8 * cores()

    def new_backoff(self) -> Backoff:
        return Backoff(
            self.backoff, retry_interval=float(self.retry_interval), max_retry_delay=float(self.max_retry_delay)
        )

    def memory_budget(self, memory: int | None = None) -> int | None:
        """Bytes that the queue may hold in memory; None if `memory_percent` sets no bound. `memory`: of the process."""
        if not self.memory_percent:
            return None
        mine = (usable_memory() if memory is None else memory) * self.memory_limit_ratio
        return max(1, int(mine * self.memory_percent))

    def queue_config(self, memory: int | None = None) -> FastQueueConfig:
        """The durable queue's part, with the memory budget as the bound of its memory layer."""
        values = {f.name: getattr(self, f.name) for f in fields(FastQueueConfig) if f.name in _OWN}
        return FastQueueConfig(**values, inmemory_bytes=self.memory_budget(memory))

    def memory_bytes(self, memory: int | None = None) -> int:
        """The limit of a queue that is in memory only: `max_bytes`, or less if the machine is small."""
        budget = self.memory_budget(memory)
        return int(self.max_bytes) if budget is None else max(1, min(int(self.max_bytes), budget))

    # -- from a file -------------------------------------------------------------------------------------------------

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "exporter.queue") -> Self:
        """The settings of `exporter.queue` in a configuration file; what makes no sense is refused by its key."""
        values = dict(_known(cls, mapping, where))
        for name, kind in _SECTIONS.items():
            if name in values:
                section = {} if values[name] is None else values[name]  # a key with all below it commented out
                if not isinstance(section, Mapping):
                    raise ConfigError(f"{where}.{name} must be a mapping, got {section!r}")
                section = _known(kind, section, f"{where}.{name}")
                values[name] = _made(kind, section, where)
        made: Self = _made(cls, values, where)
        return made


_SECTIONS: dict[str, type[Any]] = {
    "backoff": BackoffConfig,
    "circuit_breaker": BreakerConfig,
    "pipeline_split": PipelineSplitConfig,
    "adaptive_workers": AdaptiveWorkersConfig,
    "failover": FailoverConfig,
}
_OWN = {f.name for f in fields(SendQueueConfig)}


def _known(kind: type[Any], mapping: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`mapping` if every key is a setting of `kind`."""
    known = {f.name for f in fields(kind)}
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{where}.{key} is not a setting; there are {', '.join(sorted(known))}")
    return mapping


def _made(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """`kind` of these values; what it refuses, it refuses by the key's place in the file."""
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
