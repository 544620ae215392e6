"""What a send queue makes of its configuration, its queue and its exporter before it starts."""

from dataclasses import replace

from penstock.clock import Clock
from penstock.errors import ConfigError
from penstock.export.config import SendQueueConfig
from penstock.export.exporter import Exporter, GroupExporter
from penstock.export.leased_memory import SendMemory
from penstock.spool import Durability, FastQueue, FullBehavior, MemoryQueue


def checked_send_settings(
    config: SendQueueConfig, queue: FastQueue | MemoryQueue, exporter: Exporter | GroupExporter
) -> SendQueueConfig:
    """The configuration with the queue's order, and one worker for an exporter that wants its batches in order.

    ConfigError for what would fail with the first batch, or turn all of them into dead letters.
    """
    if not isinstance(queue, (FastQueue, MemoryQueue)):
        raise ConfigError(f"queue must be a FastQueue or a MemoryQueue, got {queue!r}")
    _check_exporter(exporter)
    if isinstance(queue, FastQueue):
        config = replace(config, order=queue.config.order)
    elif config.order == "freshest":
        raise ConfigError("order must be 'fifo' for a queue in memory, got 'freshest'")
    if isinstance(exporter, GroupExporter):
        if config.order == "freshest":
            raise ConfigError("order must be 'fifo' for an exporter that needs blocks in order, got 'freshest'")
        if not config.always_queue or not config.enabled:
            raise ConfigError("an exporter that needs blocks in order always queues: enabled and always_queue")
        if not isinstance(queue, FastQueue):
            raise ConfigError("type must be 'disk' for an exporter that needs blocks in order, got 'memory'")
    if not exporter_wants_order(exporter):
        return config
    return replace(
        config,
        workers=config.workers or 1,
        # Several at a time would overtake one another, and what is prepared ahead would pass a batch that failed.
        pipeline_split=replace(config.pipeline_split, enabled=False),
        adaptive_workers=replace(config.adaptive_workers, enabled=False),
    )


def memory_is_enough_to_send(config: SendQueueConfig, queue: FastQueue | MemoryQueue) -> bool:
    """Whether a batch in memory is as safe as a success promises. A queue in memory keeps what failed by itself."""
    if isinstance(queue, FastQueue):
        return queue.config.durability is Durability.MEMORY
    return config.durability is Durability.MEMORY and not config.enabled


def _check_exporter(exporter: object) -> None:
    if isinstance(exporter, type):
        raise ConfigError(f"exporter must be an exporter, got the class: write {exporter.__name__}(...)")
    if isinstance(exporter, GroupExporter):
        return
    missing = [name for name in ("prepare", "send", "split", "close") if not callable(getattr(exporter, name, None))]
    if missing:
        raise ConfigError(f"exporter {type(exporter).__name__} has no {', '.join(missing)}: see penstock.Exporter")
    if not isinstance(getattr(exporter, "in_order", None), bool):
        raise ConfigError(
            f"exporter {type(exporter).__name__} must have in_order, True or False: see penstock.Exporter"
        )


def exporter_wants_order(exporter: Exporter | GroupExporter) -> bool:
    return isinstance(exporter, GroupExporter) or exporter.in_order


def send_settings_with_leases(queue: MemoryQueue, config: SendQueueConfig, clock: Clock) -> SendMemory:
    timeout = float(config.block_timeout)
    return SendMemory(queue, FullBehavior(config.full_behavior), timeout, max_attempts=config.max_attempts, clock=clock)
