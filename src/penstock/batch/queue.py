"""The batch queue: many producers, partitions that drain themselves, batches dispatched by type.

    produce ──► lane of the type ──► partition (bounded) ──► its owner's thread ──► handler.consume(batch)
                └ sticky: one type, one partition     └ woken by the first item; on_idle when nothing comes

Invariants
1. An item answered True is consumed exactly once, or handed to the error handler once.
2. With `type_hash` a handler never runs on two threads at once; items of one producer and one type keep their order.
3. Every partition has exactly one owner; a hand-over is complete when the old owner's present cycle is.
4. A partition never holds more than `buffer_size` items, or `buffer_bytes` bytes.
5. `on_idle` of a handler never runs together with its `consume`.
6. A closing queue answers every waiting producer False at once.
How 1 to 4 are kept without a lock per item is told in `partition`.
"""

import asyncio
import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Protocol, Self, TypeVar

from penstock.batch.admission import ProduceAdmission
from penstock.batch.balancer import Rebalancer
from penstock.batch.config import BatchQueueConfig, HandlerConsumer, check_handler
from penstock.batch.drain import DrainTask, call_on_idle, report_batch, wake_owner
from penstock.batch.layout import PartitionLayout
from penstock.batch.partition import Partition
from penstock.batch.producing import (
    batch_producer_of,
    produce_many_into,
    produce_without_route,
    produced_as_list,
    producer_of,
)
from penstock.batch.scheduler import OwnDrainTask, SharedDrainScheduler, SharedDrainTask, drains_for
from penstock.batch.stats import BatchQueueStats, batch_queue_snapshot
from penstock.clock import Clock, SystemClock
from penstock.errors import ConfigError, QueueClosed

log = logging.getLogger("penstock.batch")

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_A_TYPE = type  # where an argument has its name
INTERRUPTED_GRACE = 1.0  # how long `close` lets producers finish before it takes a slot for lost to an interrupt;
# one that was only slow would append after the last look: with 200 threads before it, each may have its 5 ms first


class Producer(Protocol[T_contra]):
    """What `BatchQueue.producer` gives: `produce` for one type."""

    def __call__(self, item: T_contra, timeout: float | None = None) -> bool: ...


class BatchProducer(Protocol[T_contra]):
    """What `BatchQueue.batch_producer` gives: `produce_many` for one type."""

    def __call__(self, items: Iterable[T_contra], timeout: float | None = None) -> int: ...


class BatchQueue:
    """A partitioned queue that drains itself.

    Order: items of one producer and one type arrive as they were produced (with `type_hash`).
    Loss: none of what was answered True, unless a handler outlasts the timeout of `close`; the rest is then handed to
        the error handler. What is held is lost with the process.
    Threads: every method may be called from any thread, but not from signal handlers or `__del__`.
    Blocks: `produce` of a BLOCKING queue waits for room, except in a drain thread of this queue, which would wait for
        itself: there it answers False. `close` waits for the handlers.
    Fork: a child starts with an empty queue of its own; what is held stays the parent's.
    """

    def __init__(
        self,
        name: str,
        config: BatchQueueConfig,
        *,
        scheduler: SharedDrainScheduler | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a queue's name must be a text, got {name!r}")
        if not isinstance(config, BatchQueueConfig):
            raise ConfigError(f"config must be a BatchQueueConfig, got {config!r}")
        if config.shared_scheduler is not None and scheduler is None:
            raise ConfigError(
                "a queue on a shared scheduler is created by a BatchQueueManager, which has the schedulers"
            )
        self.name = name
        self.config = config
        self._clock = clock or SystemClock()
        self._scheduler = scheduler
        self._served: object = scheduler or self
        self._tasks, partitions = self._resolve()
        self._layout = PartitionLayout(config, self._tasks, partitions)
        self._routes = self._layout.routes
        self._admission = ProduceAdmission(name, config, self._layout, self._clock, self._served)
        self._rebalancer = Rebalancer(name, config, self._layout, self._clock)
        self._finished = threading.Event()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._closing = False
        self._unfinished = 0  # partitions that have not yet seen their last item
        self._abandoned = 0
        try:
            for task in self._tasks:
                if isinstance(task, SharedDrainTask) and scheduler is not None:
                    scheduler.start()
                    scheduler.add(task)
                elif isinstance(task, OwnDrainTask):
                    task.start()
        except BaseException:  # no more threads: the started ones must end
            self._end_tasks()
            raise
        LIVE_QUEUES.add(self)

    def _resolve(self) -> tuple[tuple[DrainTask, ...], int]:
        config = self.config
        threads = 1 if config.threads is None else config.threads.resolve()
        partitions = config.partitions.resolve(threads)
        if partitions < threads:
            log.warning(
                "Fewer partitions than threads, using fewer threads. queue=%s partitions=%d threads=%d",
                self.name, partitions, threads,
            )  # fmt: skip
            threads = partitions
        balances = config.balancer is not None and threads > 1
        merges = config.resolved_selector.kind != "type_hash"
        tasks: list[DrainTask] = []
        for index in range(threads):
            named: dict[str, Any] = {
                "merges": merges,
                "on_quiet": self._on_partition_quiet,
                "on_cycle": (lambda now: self._rebalancer.rebalance_if_due(now)) if balances else None,
            }
            arguments = (self.name, index, config, self._clock)
            if self._scheduler is None:
                tasks.append(OwnDrainTask(*arguments, served=self._served, **named))
            else:
                tasks.append(SharedDrainTask(*arguments, scheduler=self._scheduler, **named))
        return tuple(tasks), partitions

    # Handlers

    def add_handler(
        self, type: type[T], handler: HandlerConsumer[T] | Callable[[list[T]], object], weight: float = 1.0
    ) -> None:
        """Have batches of exactly this type consumed by `handler`, in place of any other.

        `weight` says how much the type adds to the number of adaptive partitions.
        """
        if not isinstance(type, _A_TYPE):
            raise ConfigError(f"type must be a class, the exact one of the items, got {type!r}")
        check_handler("handler", handler)
        if not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(f"weight must be a number > 0, got {weight!r}")
        if self.config.consumer is not None:
            log.warning("The consumer takes every type: handler ignored. queue=%s type=%s", self.name, type)
            return
        self._layout.register(type, handler, weight)

    def remove_handler(self, type: type) -> bool:
        """Consume no more of this type; a batch that is being consumed is finished. False if there was no handler.

        What is held of the type is handed to the error handler, like all that comes without a handler.
        """
        return self.config.consumer is None and self._layout.unregister(type)

    # Producers

    def produce(self, item: object, timeout: float | None = None) -> bool:
        """Put `item` in; True if it will be consumed, False if it will not.

        Without `timeout` a full partition is met as the strategy says; with it, by waiting so many seconds.
        """
        try:
            credits, items = self._routes[type(item)]
            asleep = credits.pop()
            items.append(item)
        except (KeyError, IndexError):
            return produce_without_route(self._layout, self._admission, item, timeout)
        except BaseException:
            self._admission.interrupted = True
            raise
        if asleep:
            wake_owner(asleep)
        return True

    def produce_many(self, items: Iterable[object], timeout: float | None = None) -> int:
        """Put `items` in; how many were accepted.

        Where a full partition is waited for, those are the first so many; otherwise each one that found room.
        """
        return produce_many_into(self._layout, self._admission, items, timeout)

    def producer(self, type: type[T]) -> Producer[T]:
        """A `produce` for items of one type that has nothing to look up."""
        lane = self._layout.lane_of_type(type)
        if lane is None or self.config.buffer_bytes is not None:
            return self.produce
        return producer_of(lane, self._admission)

    def batch_producer(self, type: type[T]) -> BatchProducer[T]:
        """A `produce_many` for items of one type, which takes their type on trust: what is of another type goes to the
        same handler.
        """
        lane = self._layout.lane_of_type(type)
        if lane is None or self.config.buffer_bytes is not None:
            return self.produce_many
        return batch_producer_of(lane, self._admission)

    async def produce_async(self, item: object, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as `produce`
        """`produce` for a coroutine: it awaits room, and the event loop goes on."""
        patience = self._admission.patience(timeout)
        return await self._admission.admit_async(self._layout.lane_for(item), (item,), patience) == 1

    async def produce_many_async(
        self,
        items: Iterable[object],
        timeout: float | None = None,  # noqa: ASYNC109 - as `produce_many`
    ) -> int:
        """`produce_many` for a coroutine."""
        deadline = self._admission.deadline(self._admission.patience(timeout))
        accepted, tried, everything = 0, 0, produced_as_list(items)
        self._admission.check_sizes(everything)
        for lane, run in groupby(everything, self._layout.lane_for):
            batch = list(run)
            granted = await self._admission.admit_async(lane, batch, deadline.left())
            accepted += granted
            tried += len(batch)
            if granted < len(batch) and deadline.patience != 0:
                self._admission.refuse_all(everything[tried:])
                break
        return accepted

    def rebalance(self) -> bool:
        """Have the balancer look at what came since the last time; True if partitions changed threads."""
        return not self._closing and self._rebalancer.rebalance(self._clock.monotonic())

    # Statistics

    @property
    def running(self) -> bool:
        """Whether it takes items."""
        return not self._closing

    def stats(self) -> BatchQueueStats:
        """What it holds and what became of the rest, at this moment."""
        return batch_queue_snapshot(self.name, self._layout, self._rebalancer.moves)

    # Closing

    def stop_accepting(self) -> None:
        """Answer every `produce` False from now on, also one that waits; what is held is still consumed."""
        with self._lock:
            if not self._closing:
                self._unfinished = self._layout.freeze()
                self._closing = True
        # Also when it is closing already: the first call may have been interrupted.
        for partition in self._layout.partitions:
            partition.close()
        for partition in self._layout.partitions:
            wake_owner(partition.asleep)  # its owner will see that it is closed

    def close(self, timeout: float | None = None) -> bool:
        """Take nothing more, have everything held consumed, call every `on_idle` a last time, end the threads.

        The last `on_idle` of a handler comes after its last batch; regular calls may still come before it.
        False if that took longer than `timeout` (by default `shutdown_timeout`) seconds; what was not consumed by
        then went to the error handler. In a drain thread of this queue it does not wait, and answers False.
        """
        patience = self.config.shutdown_timeout if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        deadline = self._clock.monotonic() + patience
        self.stop_accepting()
        if drains_for(self._served):
            return False
        if self._admission.interrupted:
            self._finished.wait(min(INTERRUPTED_GRACE, max(0.0, deadline - self._clock.monotonic())))
            self._reclaim_lost_slots()
        if not self._finished.wait(max(0.0, deadline - self._clock.monotonic())):
            self._abandon()
            return False
        for task in self._tasks:
            if isinstance(task, OwnDrainTask) and task.thread is not None:
                task.thread.join(max(0.0, deadline - self._clock.monotonic()))
        return self._abandoned == 0

    def _on_partition_quiet(self, partition: Partition) -> None:
        with self._lock:
            self._unfinished -= 1
            if self._unfinished:
                return
        # No token is left: no handler is called any more.
        for registration in list(self._layout.registrations.values()):
            call_on_idle(registration, self.name)
        self._end_tasks()
        LIVE_QUEUES.discard(self)
        self._finished.set()

    def _end_tasks(self) -> None:
        for task in self._tasks:
            if isinstance(task, OwnDrainTask):
                task.stop()
            elif isinstance(task, SharedDrainTask) and self._scheduler is not None:
                self._scheduler.remove(task)

    def _reclaim_lost_slots(self) -> None:
        for partition in self._layout.partitions:
            partition.reclaim_lost_slots()
            wake_owner(partition.asleep)

    def _abandon(self) -> None:
        """Hand what is still held to the error handler: no other component can still use it."""
        error = QueueClosed(f"queue {self.name!r} was closed before these items were consumed")
        for lane in self._layout.lanes():
            batch, _, _ = lane.partition.take(lane, None)
            if batch:
                with self._lock:
                    lane.abandoned += len(batch)
                    self._abandoned += len(batch)
                report_batch(self.config.error_handler, self.name, batch, error)
            wake_owner(lane.partition.asleep)
        log.error("Queue did not drain in time. queue=%s abandoned=%d", self.name, self._abandoned)

    def reset_after_fork(self) -> None:
        """Start over in the child of a fork, with nothing held and no thread until the first item."""
        self._lock = threading.Lock()
        self._layout.reset()
        self._rebalancer.reset()
        self._finished = threading.Event()
        if self._closing:
            self._finished.set()  # the parent sees it through

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<BatchQueue {self.name!r} {'running' if self.running else 'closed'}>"


LIVE_QUEUES: "weakref.WeakSet[BatchQueue]" = weakref.WeakSet()
"""Every queue that has not finished closing."""


def _close_all_at_exit() -> None:
    """Have what is held consumed before the drain threads are frozen; all queues at once, each within its timeout."""
    queues = list(LIVE_QUEUES)
    for queue in queues:
        queue.stop_accepting()
    started = time.monotonic()
    for queue in queues:
        queue.close(max(0.0, started + queue.config.shutdown_timeout - time.monotonic()))


def _reset_all_in_child() -> None:
    for queue in list(LIVE_QUEUES):
        queue.reset_after_fork()


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=_reset_all_in_child)
