"""The registry: queues by name, and the schedulers that several of them share."""

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields

from penstock.batch.config import BatchQueueConfig
from penstock.batch.policies import ThreadPolicy
from penstock.batch.queue import BatchQueue
from penstock.batch.scheduler import SharedDrainScheduler
from penstock.clock import Clock, SystemClock
from penstock.errors import ConfigError, QueueConflict, QueueExists
from penstock.telemetry import Sample

log = logging.getLogger("penstock.batch")


class BatchQueueManager:
    """Queues by name, shared by all code that knows the name. `penstock.queues` is the one of the process.

    Shared schedulers are made on first use and end with `shutdown_all`, never with one of their queues.
    Threads: every method may be called from any thread.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._queues: dict[str, BatchQueue] = {}
        self._schedulers: dict[str, SharedDrainScheduler] = {}
        _managers.add(self)

    def create(self, name: str, config: BatchQueueConfig) -> BatchQueue:
        """A new queue; QueueExists if the name is taken."""
        with self._lock:
            if self._running_locked(name):
                raise QueueExists(f"a queue named {name!r} exists already: get_or_create would share it")
            return self._create_locked(name, config)

    def get_or_create(self, name: str, config: BatchQueueConfig) -> BatchQueue:
        """The queue of that name, made if there is none.

        QueueConflict if it dispatches in the other mode (one consumer, or handlers by type); other differences to
        `config` are logged, and the first one's settings stay.
        """
        with self._lock:
            existing = self._running_locked(name)
            if existing is None:
                return self._create_locked(name, config)
            if not isinstance(config, BatchQueueConfig):
                raise ConfigError(f"config must be a BatchQueueConfig, got {config!r}")
        if (existing.config.consumer is None) != (config.consumer is None):
            raise QueueConflict(
                f"queue {name!r} {'dispatches to handlers by type' if config.consumer else 'has one consumer'}, "
                f"and the new configuration asks for the other"
            )
        for field in fields(config):
            has, asked = getattr(existing.config, field.name), getattr(config, field.name)
            if has != asked:
                log.warning(
                    "Queue exists with another setting. queue=%s setting=%s has=%s asked=%s",
                    name,
                    field.name,
                    has,
                    asked,
                )
        return existing

    def _running_locked(self, name: str) -> BatchQueue | None:
        """A queue that was closed by hand leaves its name to the next."""
        queue = self._queues.get(name)
        return queue if queue is not None and queue.running else None

    def _create_locked(self, name: str, config: BatchQueueConfig) -> BatchQueue:
        scheduler = None
        if isinstance(config, BatchQueueConfig) and config.shared_scheduler is not None:
            scheduler = self._scheduler_locked(*config.shared_scheduler)
        queue = BatchQueue(name, config, scheduler=scheduler, clock=self._clock)
        self._queues[name] = queue
        return queue

    def _scheduler_locked(self, name: str, policy: ThreadPolicy) -> SharedDrainScheduler:
        scheduler = self._schedulers.get(name)
        if scheduler is None:
            scheduler = self._schedulers[name] = SharedDrainScheduler(name, policy, self._clock)
        elif scheduler.policy != policy:
            log.warning(
                "Scheduler exists with another policy. scheduler=%s threads=%s asked=%s", name, scheduler.policy, policy
            )
        return scheduler

    def get(self, name: str) -> BatchQueue | None:
        """The queue of that name."""
        with self._lock:
            return self._queues.get(name)

    def names(self) -> list[str]:
        """All of them, in the order of their creation."""
        with self._lock:
            return list(self._queues)

    def shutdown(self, name: str, timeout: float | None = None) -> bool:
        """Close the queue of that name and forget it; what `BatchQueue.close` says, True if there is none."""
        with self._lock:
            queue = self._queues.pop(name, None)
        return queue is None or queue.close(timeout)

    def shutdown_all(self, timeout: float | None = None) -> bool:
        """Close every queue, then end the shared schedulers; True if all was consumed.

        First no queue accepts anything any more, then each is drained; `timeout` is for all of them together, and by
        default the longest of theirs.
        """
        with self._lock:
            queues, self._queues = list(self._queues.values()), {}
            schedulers, self._schedulers = list(self._schedulers.values()), {}
        for queue in queues:
            queue.stop_accepting()
        if timeout is None:
            timeout = max((queue.config.shutdown_timeout for queue in queues), default=0.0)
        deadline = self._clock.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        drained = [queue.close(max(0.0, deadline - self._clock.monotonic())) for queue in queues]
        for scheduler in schedulers:
            scheduler.stop(max(0.1, deadline - self._clock.monotonic()))
        return all(drained)

    def samples(self) -> Iterator[Sample]:
        """The metrics of every queue: hand it to `Telemetry.watch`."""
        with self._lock:
            queues = list(self._queues.values())
        for queue in queues:
            yield from queue.stats().samples()

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        for scheduler in self._schedulers.values():
            scheduler.reset()


_managers: "weakref.WeakSet[BatchQueueManager]" = weakref.WeakSet()


def _reset_in_child() -> None:
    for manager in list(_managers):
        manager._reset_after_fork()


os.register_at_fork(after_in_child=_reset_in_child)

queues = BatchQueueManager()
"""The process-wide registry."""
