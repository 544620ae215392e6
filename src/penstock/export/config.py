"""What users set: the whole `exporter.queue` of the configuration file, under the names that its users know."""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.export.backoff import Backoff, BackoffConfig
from penstock.export.breaker import BreakerConfig
from penstock.export.scaler import AdaptiveWorkersConfig
from penstock.machine import cores, usable_memory
from penstock.spool import Durability, DurabilitySetting, FastQueueConfig, FullBehavior, FullBehaviorSetting
from penstock.units import check_count, check_flag, check_number, parse_bytes, parse_duration

_QUEUE_TYPES = ("memory", "disk")
_MAX_SIZE = 10_000  # as the seed has it


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplitConfig:
    """`pipeline_split` in the configuration file: preparing and sending on threads of their own."""

    enabled: bool = False
    """Compress and send on separate threads."""
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
    """`failover` in the configuration file: memory for what could not be queued or sent.

    It has an effect only where `durability` is memory: at disk and fsync, what is not on the disk is refused.
    """

    enabled: bool = True
    """Where durability is memory: keep there what the disk refuses; without a queue, what the destination does."""
    max_size: int = 1000
    """Most batches of these."""
    max_bytes: int | str = 256_000_000
    """Most bytes of these."""
    drain_interval: float | str = 5.0
    """How often some of these are sent."""
    drain_batch: int = 10
    """How many at a time."""

    def __post_init__(self) -> None:
        check_flag(self.enabled, "failover.enabled")
        for name in ("max_size", "drain_batch"):
            check_count(getattr(self, name), f"failover.{name}", 1)
        interval = parse_duration(self.drain_interval, "failover.drain_interval", is_positive=True)
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "failover.max_bytes", least=1))
        object.__setattr__(self, "drain_interval", interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportQueueConfig:
    """A queue on the disk, and how long a destination that fails is left alone.

    Sizes and durations as `FastQueueConfig` takes them.
    """

    path: str | Path = "./queue"
    """Folder of the queue on disk."""
    max_size: int | None = None
    """Most batches. Not set: 10 000 at first, and then what `adaptive_enabled` makes of it."""
    max_bytes: int | str = "1Gi"
    """Most bytes, as 1Gi."""
    full_behavior: FullBehaviorSetting = FullBehavior.DROP_OLDEST
    """drop_oldest, drop_newest or block."""
    block_timeout: float | str = 30.0
    """How long block waits for room."""
    inmemory_blocks: int = 2048
    """Batches in memory before the disk is used."""
    chunk_size: int | str = "512Mi"
    """Size of a file on disk, as 512Mi."""
    meta_sync_interval: float | str = 1.0
    """How often the queue's state is saved."""
    stale_flush: float | str = 30.0
    """How old a batch in memory may get before it goes to disk."""
    write_buffer_size: int | str = "256Ki"
    """Bytes that are written to disk at once."""
    compression: Literal["none", "snappy", "lz4", "zstd"] = "snappy"
    """On disk: none, snappy, lz4 or zstd."""
    durability: DurabilitySetting = Durability.MEMORY
    """What a pushed batch survives: memory, disk or fsync."""
    memory_percent: float = 0.10
    """Share of the process's memory that the queue may hold; 0: no bound but the others."""
    memory_limit_ratio: float = 0.85
    """Share of the container's (else the machine's) memory that the process counts as its own."""
    retry_interval: float | str = 5.0
    """Wait after the first failure."""
    max_retry_delay: float | str = 300.0
    """Longest wait after failures."""
    backoff: BackoffConfig = field(default_factory=BackoffConfig)
    circuit_breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        for name, kind in (("backoff", BackoffConfig), ("circuit_breaker", BreakerConfig)):
            check_export_section(self, name, kind)
        for name in ("memory_percent", "memory_limit_ratio"):
            check_number(getattr(self, name), name, 0.0, 1.0)
        if not self.memory_limit_ratio:
            raise ConfigError("must be > 0, got 0", field="memory_limit_ratio")
        if not isinstance(self.path, (str, os.PathLike)):
            raise ConfigError(f"must name a folder, got {self.path!r}", field="path")
        for name in ("retry_interval", "max_retry_delay"):
            object.__setattr__(self, name, parse_duration(getattr(self, name), name))
        self.new_backoff()  # refuses what makes no sense
        checked = FastQueueConfig(**self._of_the_queue())
        for name in ("max_bytes", "block_timeout", "full_behavior", "durability"):
            object.__setattr__(self, name, getattr(checked, name))

    def _of_the_queue(self) -> dict[str, Any]:
        """The durable queue's part of the settings."""
        own = {one.name for one in fields(self)}
        found = {one.name: getattr(self, one.name) for one in fields(FastQueueConfig) if one.name in own}
        return {**found, "max_size": self.first_max_size}

    @property
    def first_max_size(self) -> int:
        """The limit of batches that a queue begins with."""
        return _MAX_SIZE if self.max_size is None else self.max_size

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
        return FastQueueConfig(**self._of_the_queue(), inmemory_bytes=self.memory_budget(memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class SendQueueConfig(ExportQueueConfig):
    """Settings of one `SendQueue` and of the queue beneath it."""

    enabled: bool = True
    """False: a push sends at once, and raises what went wrong. Nothing is held but by the failover."""
    type: Literal["memory", "disk"] = "disk"
    """Where batches wait: memory or disk."""
    order: Literal["fifo", "freshest"] = "fifo"
    """fifo or freshest."""
    max_attempts: int | None = None
    """Sends of a batch before it is a dead letter."""
    adaptive_enabled: bool = True
    """Where `max_size` is not set, the limit of batches follows their mean size: the limit of bytes is what counts."""
    target_utilization: float = 0.85
    """Share of `max_bytes` that the adaptive limit of batches aims at."""
    always_queue: bool = True
    """False: a push first tries to send, on the caller's thread, and queues only what failed."""
    workers: int = 0
    """Workers that send; 0: two for each core."""
    max_concurrent_sends: int = 4
    """Sends that one sender of the pipeline split may have under way."""
    global_send_limit: int = 0
    """Sends under way in all; 0: eight for each core."""
    pipeline_split: PipelineSplitConfig = field(default_factory=PipelineSplitConfig)
    adaptive_workers: AdaptiveWorkersConfig = field(default_factory=AdaptiveWorkersConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)

    def __post_init__(self) -> None:
        for name in ("enabled", "adaptive_enabled", "always_queue"):
            check_flag(getattr(self, name), name)
        check_export_section(self, "pipeline_split", PipelineSplitConfig)
        check_export_section(self, "adaptive_workers", AdaptiveWorkersConfig)
        check_export_section(self, "failover", FailoverConfig)
        if self.type not in _QUEUE_TYPES:
            raise ConfigError(f"must be one of {', '.join(_QUEUE_TYPES)}, got {self.type!r}", field="type")
        for name, least in (("workers", 0), ("max_concurrent_sends", 1), ("global_send_limit", 0)):
            check_count(getattr(self, name), name, least)
        check_number(self.target_utilization, "target_utilization", 0.0, 1.0)
        if not self.target_utilization:
            raise ConfigError("must be > 0, got 0", field="target_utilization")
        if self.type == "memory" and self.order == "freshest":
            raise ConfigError("must be 'fifo' where type is 'memory', got 'freshest'", field="order")
        ExportQueueConfig.__post_init__(self)

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

    def memory_bytes(self, memory: int | None = None) -> int:
        """The limit of a queue that is in memory only: `max_bytes`, or less if the machine is small."""
        budget = self.memory_budget(memory)
        return int(self.max_bytes) if budget is None else max(1, min(int(self.max_bytes), budget))


def check_export_section(config: object, name: str, kind: type[Any]) -> None:
    """ConfigError unless the section is an instance of its class."""
    if not isinstance(getattr(config, name), kind):
        raise ConfigError(f"must be a {kind.__name__}, got {getattr(config, name)!r}", field=name)
