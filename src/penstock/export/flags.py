"""Every setting of the queue as a command-line flag: its name, where it goes in the configuration, what it does.

`penstock` builds its options from this table, so that a flag, a key and a setting cannot drift apart.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

_YES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `key` is its place in `exporter.queue`, dots between sections."""

    name: str
    key: str
    kind: type[int] | type[float] | type[bool] | type[str]  # str: also sizes and durations, which the config parses
    help: str

    def parse(self, text: str) -> object:
        """The value as the configuration takes it."""
        if self.kind is bool:
            if text.lower() not in _YES:
                raise ConfigError(f"--{self.name} must be true or false, got {text!r}")
            return _YES[text.lower()]
        try:
            return self.kind(text)
        except ValueError:
            raise ConfigError(f"--{self.name} must be a number, got {text!r}") from None


FLAGS = (
    Flag("queue-enabled", "enabled", bool, "Hold batches in a queue; false: send at once or fail."),
    Flag("queue-type", "type", str, "Where batches wait: memory or disk."),
    Flag("queue-path", "path", str, "Folder of the queue on disk."),
    Flag("queue-max-size", "max_size", int, "Most batches, where the limit does not adapt."),
    Flag("queue-max-bytes", "max_bytes", str, "Most bytes, as 1Gi."),
    Flag("queue-full-behavior", "full_behavior", str, "drop_oldest, drop_newest or block."),
    Flag("queue-block-timeout", "block_timeout", str, "How long block waits for room."),
    Flag("queue-always-queue", "always_queue", bool, "Queue every batch; false: try to send it first."),
    Flag("queue-workers", "workers", int, "Workers that send; 0: two for each core."),
    Flag("queue-inmemory-blocks", "inmemory_blocks", int, "Batches in memory before the disk is used."),
    Flag("queue-chunk-size", "chunk_size", str, "Size of a file on disk, as 512Mi."),
    Flag("queue-meta-sync", "meta_sync_interval", str, "How often the queue's state is saved."),
    Flag("queue-stale-flush", "stale_flush", str, "How old a batch in memory may get before it goes to disk."),
    Flag("queue-write-buffer-size", "write_buffer_size", str, "Bytes that are written to disk at once."),
    Flag("queue-compression", "compression", str, "On disk: none, snappy, lz4 or zstd."),
    Flag("queue-durability", "durability", str, "What a pushed batch survives: memory, disk or fsync."),
    Flag("queue-order", "order", str, "fifo or freshest."),
    Flag("queue-max-attempts", "max_attempts", int, "Sends of a batch before it is a dead letter."),
    Flag("queue-retry-interval", "retry_interval", str, "Wait after the first failure."),
    Flag("queue-max-retry-delay", "max_retry_delay", str, "Longest wait after failures."),
    Flag("queue-backoff-enabled", "backoff.enabled", bool, "Wait longer after each failure in a row."),
    Flag("queue-backoff-multiplier", "backoff.multiplier", float, "By what factor."),
    Flag("queue-backoff-jitter", "backoff.jitter", float, "Share of a wait that chance may take off."),
    Flag("queue-circuit-breaker-enabled", "circuit_breaker.enabled", bool, "Leave a failing destination alone."),
    Flag("queue-circuit-breaker-threshold", "circuit_breaker.threshold", int, "After so many failures in a row."),
    Flag("queue-circuit-breaker-reset-timeout", "circuit_breaker.reset_timeout", str, "For so long before a probe."),
    Flag("queue-memory-percent", "memory_percent", float, "Share of the process's memory for the queue."),
    Flag("memory-limit-ratio", "memory_limit_ratio", float, "Share of the container's memory for the process."),
    Flag("queue-adaptive-enabled", "adaptive_enabled", bool, "Let the limit of batches follow their size."),
    Flag("queue-target-utilization", "target_utilization", float, "Share of the bytes that it aims at."),
    Flag("queue-pipeline-split-enabled", "pipeline_split.enabled", bool, "Compress and send on separate threads."),
    Flag("queue-pipeline-split-preparers", "pipeline_split.preparer_count", int, "Threads that compress; 0: cores."),
    Flag("queue-pipeline-split-senders", "pipeline_split.sender_count", int, "Senders; 0: two for each core."),
    Flag("queue-pipeline-split-channel-size", "pipeline_split.channel_size", int, "Batches between the two."),
    Flag("queue-max-concurrent-sends", "max_concurrent_sends", int, "Sends under way per sender."),
    Flag("queue-global-send-limit", "global_send_limit", int, "Sends under way in all; 0: eight for each core."),
    Flag("queue-adaptive-workers-enabled", "adaptive_workers.enabled", bool, "As many workers as are worth it."),
    Flag("queue-adaptive-workers-min", "adaptive_workers.min_workers", int, "At least so many."),
    Flag("queue-adaptive-workers-max", "adaptive_workers.max_workers", int, "At most; 0: four for each core."),
    Flag("queue-failover-enabled", "failover.enabled", bool, "Keep in memory what the disk refuses."),
    Flag("queue-failover-max-size", "failover.max_size", int, "Most batches of these."),
    Flag("queue-failover-max-bytes", "failover.max_bytes", str, "Most bytes of these."),
    Flag("queue-failover-drain-interval", "failover.drain_interval", str, "How often some of these are sent."),
    Flag("queue-failover-drain-batch", "failover.drain_batch", int, "How many at a time."),
)


def merged(mapping: Mapping[str, Any], given: Iterable[tuple[Flag, str]]) -> dict[str, Any]:
    """`exporter.queue` from a file with the flags that were given on top of it, for `SendQueueConfig.from_mapping`."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}
    for flag, text in given:
        section, _, name = flag.key.rpartition(".")
        target = result
        if section:
            target = result[section] = result.get(section) or {}
            if not isinstance(target, dict):
                raise ConfigError(f"exporter.queue.{section} must be a mapping, got {target!r}")
        target[name] = flag.parse(text)
    return result
