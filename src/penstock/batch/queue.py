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
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from operator import countOf
from typing import Any, TypeVar

from penstock.batch.config import BatchQueueConfig, BufferStrategy, HandlerConsumer
from penstock.batch.drain import DrainTask, call_on_idle, report_batch, rouse
from penstock.batch.layout import Layout
from penstock.batch.lifecycle import LIVE_QUEUES
from penstock.batch.partition import Lane, Partition
from penstock.batch.scheduler import OwnTask, SharedScheduler, SharedTask, is_of_crew
from penstock.batch.stats import BatchQueueStats, snapshot
from penstock.batch.waiting import AsyncWaiter, ThreadWaiter
from penstock.clock import Clock, SystemClock
from penstock.errors import BlockTooLarge, ConfigError, QueueClosed

log = logging.getLogger("penstock.batch")

T = TypeVar("T")

INTERRUPTED_GRACE = 0.2  # how long `close` lets producers finish before it takes a slot for lost to an interrupt


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
        scheduler: SharedScheduler | None = None,
        clock: Clock | None = None,
    ) -> None:
        if config.shared_scheduler is not None and scheduler is None:
            raise ConfigError("a queue on a shared scheduler is created by a BatchQueueManager, who has the schedulers")
        self.name = name
        self.config = config
        self._clock = clock or SystemClock()
        self._scheduler = scheduler
        self._crew: object = scheduler or self
        self._tasks, partitions = self._resolve()
        self._layout = Layout(config, self._tasks, partitions)
        self._routes = self._layout.routes
        self._patience = None if config.strategy is BufferStrategy.BLOCKING else 0.0
        self._interrupted = False
        self._balance_at = self._clock.monotonic() + (config.balance_interval or math.inf)
        self._balanced: list[float] = []
        self._finished = threading.Event()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._closing = False
        self._loud = 0  # partitions that have not yet seen their last item
        self._abandoned = 0
        self._hinted = False
        self.rebalances = 0
        for task in self._tasks:
            if isinstance(task, SharedTask) and scheduler is not None:
                scheduler.add(task)
                scheduler.start()
            elif isinstance(task, OwnTask):
                task.start()
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
                "on_quiet": self._partition_is_quiet,
                "on_cycle": self._balance_if_due if balances else None,
            }
            arguments = (self.name, index, config, self._clock)
            if self._scheduler is None:
                tasks.append(OwnTask(*arguments, crew=self._crew, **named))
            else:
                tasks.append(SharedTask(*arguments, scheduler=self._scheduler, **named))
        return tuple(tasks), partitions

    # Handlers

    def add_handler(
        self, type: type[T], handler: HandlerConsumer[T] | Callable[[list[T]], object], weight: float = 1.0
    ) -> None:
        """Have batches of exactly this type consumed by `handler`, in place of any other.

        `weight` says how much the type adds to the number of adaptive partitions.
        """
        if not weight > 0:
            raise ConfigError(f"weight must be > 0, got {weight}")
        if self._closing:
            raise QueueClosed(f"queue {self.name!r} is closed")
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
            credits, items, asleep = self._routes[type(item)]
            credits.pop()
            items.append(item)
        except (KeyError, IndexError):
            return self._admit(self._layout.lane_for(item), (item,), timeout) == 1
        except BaseException:
            self._interrupted = True
            raise
        if asleep:
            rouse(asleep)
        return True

    def producer(self, type: type[T]) -> Callable[[T], bool]:
        """A `produce` for items of one type that has nothing to look up."""
        lane = self._layout.lane_of_type(type)
        if lane is None or self.config.buffer_bytes is not None:
            return self.produce
        credits, items, asleep = lane.route
        admit = self._admit

        def emit(item: T, timeout: float | None = None) -> bool:
            try:
                credits.pop()
                items.append(item)
            except IndexError:
                return admit(lane, (item,), timeout) == 1
            except BaseException:
                self._interrupted = True
                raise
            if asleep:
                rouse(asleep)
            return True

        return emit

    def produce_many(self, items: Iterable[object], timeout: float | None = None) -> int:
        """Put `items` in; how many were accepted.

        Where a full partition is waited for, those are the first so many; otherwise each one that found room.
        """
        batch = items if isinstance(items, (list, tuple)) else list(items)
        if not batch:
            return 0
        kind = type(batch[0])
        lane = self._layout.lane_of_type(kind) if countOf(map(type, batch), kind) == len(batch) else None
        if lane is not None:
            return self._admit(lane, batch, timeout)
        return self._produce_mixed(batch, timeout)

    def _produce_mixed(self, batch: Sequence[object], timeout: float | None) -> int:
        patience = self._patience if timeout is None else timeout
        deadline = None if not patience else self._clock.monotonic() + patience
        routes, lane_for = self._routes, self._layout.lane_for
        accepted = 0
        for item in batch:
            try:
                credits, items, asleep = routes[type(item)]
                credits.pop()
                items.append(item)
            except (KeyError, IndexError):
                left = patience if deadline is None else max(0.0, deadline - self._clock.monotonic())
                if self._admit(lane_for(item), (item,), left):
                    accepted += 1
                elif patience != 0:
                    self._refuse(lane_for(item), 0)
                    break
            except BaseException:
                self._interrupted = True
                raise
            else:
                accepted += 1
                if asleep:
                    rouse(asleep)
        return accepted

    async def produce_async(self, item: object, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as `produce`
        """`produce` for a coroutine: it awaits room, and the event loop goes on meanwhile."""
        return await self.produce_many_async((item,), timeout) == 1

    async def produce_many_async(
        self,
        items: Iterable[object],
        timeout: float | None = None,  # noqa: ASYNC109 - as `produce_many`
    ) -> int:
        """`produce_many` for a coroutine."""
        accepted = 0
        patience = self._patience if timeout is None else timeout
        deadline = None if not patience else self._clock.monotonic() + patience
        for lane, group in self._groups(items):
            sizes = self._sizes(group)
            granted = self._offer(lane, group, sizes)
            if granted < len(group) and patience != 0 and not lane.partition.closed:
                left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
                granted += await self._wait_async(lane, group[granted:], sizes and sizes[granted:], left)
            accepted += granted
            if granted < len(group):
                self._refuse(lane, len(group) - granted)
                if patience != 0:
                    break
        return accepted

    async def _wait_async(
        self, lane: Lane, items: Sequence[object], sizes: Sequence[int] | None, patience: float | None
    ) -> int:
        waiter = AsyncWaiter(lane, items, sizes)
        try:
            if lane.partition.offer(lane, items, sizes, waiter) < len(items) and not lane.partition.closed:
                rouse(lane.partition.asleep)
                async with asyncio.timeout(patience):
                    await waiter.future
        except TimeoutError:
            pass
        finally:
            granted = lane.partition.withdraw(waiter)
            rouse(lane.partition.asleep)
        return granted

    def _groups(self, items: Iterable[object]) -> Iterable[tuple[Lane, list[object]]]:
        """Runs of items that go to the same lane."""
        run: list[object] = []
        current: Lane | None = None
        for item in items:
            lane = self._layout.lane_for(item)
            if current is not None and lane is not current:
                yield current, run
                run = []
            current = lane
            run.append(item)
        if current is not None:
            yield current, run

    def _admit(self, lane: Lane, items: Sequence[object], timeout: float | None) -> int:
        """Take the lock and see; wait in line if that is wanted. How many were accepted, always the first of them."""
        sizes = self._sizes(items)
        try:
            granted = self._offer(lane, items, sizes)
            if granted == len(items):
                return granted
            patience = self._patience if timeout is None else timeout
            if patience != 0 and not lane.partition.closed and not is_of_crew(self._crew):
                granted += self._wait(lane, items[granted:], sizes and sizes[granted:], patience)
        except BaseException:
            self._interrupted = True
            raise
        if granted < len(items):
            self._refuse(lane, len(items) - granted)
        return granted

    def _offer(self, lane: Lane, items: Sequence[object], sizes: Sequence[int] | None) -> int:
        partition = lane.partition
        granted = partition.offer(lane, items, sizes, None)
        if granted and partition.asleep:
            rouse(partition.asleep)
        return granted

    def _wait(self, lane: Lane, items: Sequence[object], sizes: Sequence[int] | None, timeout: float | None) -> int:
        partition = lane.partition
        waiter = ThreadWaiter(lane, items, sizes)
        try:
            if partition.offer(lane, items, sizes, waiter) < len(items) and not partition.closed:
                rouse(partition.asleep)
                self._hint_at_idle_threads()
                waiter.wait(timeout)
        finally:
            granted = partition.withdraw(waiter)
            rouse(partition.asleep)
        return granted

    def _sizes(self, items: Sequence[object]) -> list[int] | None:
        limit = self.config.buffer_bytes
        if limit is None:
            return None
        sizes = [self.config.size_of(item) for item in items]
        if max(sizes) > limit:
            raise BlockTooLarge(f"an item of {max(sizes)} bytes never fits into buffer_bytes={limit}")
        return sizes

    def _refuse(self, lane: Lane, count: int) -> None:
        if lane.partition.refuse(lane, count):
            log.warning(
                "Queue started dropping. queue=%s partition=%d type=%s",
                self.name, lane.partition.index, lane.registration.type,
            )  # fmt: skip
            self._hint_at_idle_threads()

    def _hint_at_idle_threads(self) -> None:
        """Types that all live in a few partitions leave the other threads idle: that must not pass in silence."""
        if self._hinted or len(self._tasks) < 2:
            return
        with self._lock:
            hinted, self._hinted = self._hinted, True
        busy = {lane.partition.owner.index for lane in self._layout.lanes()}
        if not hinted and len(busy) < len(self._tasks):
            log.warning(
                "A partition is full while threads have nothing to drain: there are fewer types than threads. "
                "PartitionSelector.round_robin() or by_key() would use them. queue=%s threads=%d used=%d",
                self.name, len(self._tasks), len(busy),
            )  # fmt: skip

    # Balancing

    def _balance_if_due(self, now: float) -> None:
        """Called by the drain threads after a cycle: whoever comes first when it is time does it."""
        if now < self._balance_at:
            return
        with self._lock:
            if now < self._balance_at:
                return
            self._balance_at = now + (self.config.balance_interval or math.inf)
        self.rebalance()

    def rebalance(self) -> bool:
        """Have the balancer look at what came since the last time; True if partitions changed threads."""
        balancer = self.config.balancer
        if balancer is None or self._closing:
            return False
        by_items = balancer.measure == "items"
        totals, owners = self._layout.loads(_items_of if by_items else _seconds_of)
        before = self._balanced + [0.0] * (len(totals) - len(self._balanced))
        self._balanced = totals
        try:
            assigned = balancer.assign([now - was for now, was in zip(totals, before)], owners, len(self._tasks))
            moved = assigned is not None and self._layout.reassign(assigned)
        except Exception:
            log.exception("Balancer failed. queue=%s", self.name)
            return False
        self.rebalances += moved
        return moved

    # Statistics

    @property
    def running(self) -> bool:
        """Whether it takes items."""
        return not self._closing

    def stats(self) -> BatchQueueStats:
        """What it holds and what became of the rest, at this moment."""
        return snapshot(self.name, self._layout, self.rebalances)

    # Closing

    def stop_accepting(self) -> None:
        """Answer every `produce` False from now on, also those that wait; what is held is still consumed."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            partitions = self._layout.partitions
            self._loud = len(partitions)
        for partition in partitions:
            for waiter in partition.close_gate():
                waiter.wake()
        for partition in partitions:
            rouse(partition.asleep)  # its owner will see that it is closed

    def close(self, timeout: float | None = None) -> bool:
        """Take nothing more, have everything held consumed, call every `on_idle` once more, end the threads.

        False if that took longer than `timeout` (by default `shutdown_timeout`) seconds; what was not consumed by
        then went to the error handler. In a drain thread of this queue it does not wait, and answers False.
        """
        deadline = self._clock.monotonic() + (self.config.shutdown_timeout if timeout is None else timeout)
        self.stop_accepting()
        if is_of_crew(self._crew):
            return False
        if self._interrupted:
            self._finished.wait(min(INTERRUPTED_GRACE, max(0.0, deadline - self._clock.monotonic())))
            self._forgive()
        if not self._finished.wait(max(0.0, deadline - self._clock.monotonic())):
            self._abandon()
            return False
        for task in self._tasks:
            if isinstance(task, OwnTask) and task.thread is not None:
                task.thread.join(max(0.0, deadline - self._clock.monotonic()))
        return self._abandoned == 0

    def _partition_is_quiet(self, partition: Partition) -> None:
        with self._lock:
            self._loud -= 1
            if self._loud:
                return
        # Every token is in our hands: no handler runs any more.
        for registration in list(self._layout.registrations.values()):
            call_on_idle(registration, self.name)
        for task in self._tasks:
            if isinstance(task, OwnTask):
                task.stop()
            elif isinstance(task, SharedTask) and self._scheduler is not None:
                self._scheduler.remove(task)
        LIVE_QUEUES.discard(self)
        self._finished.set()

    def _forgive(self) -> None:
        for partition in self._layout.partitions:
            partition.forgive()
            rouse(partition.asleep)

    def _abandon(self) -> None:
        """Hand what is still held to the error handler: it is the last who can do something about it."""
        error = QueueClosed(f"queue {self.name!r} was closed before these items were consumed")
        for lane in self._layout.lanes():
            batch, _, _ = lane.partition.take(lane, None)
            if batch:
                with self._lock:
                    lane.abandoned += len(batch)
                    self._abandoned += len(batch)
                report_batch(self.config.error_handler, self.name, batch, error)
            rouse(lane.partition.asleep)
        log.error("Queue did not drain in time. queue=%s abandoned=%d", self.name, self._abandoned)

    def reset_after_fork(self) -> None:
        """Start over in the child of a fork, with nothing held and no thread until the first item."""
        self._lock = threading.Lock()
        self._layout.reset()
        if self._closing:
            self._finished.set()  # the parent sees it through
        else:
            self._finished = threading.Event()
            self._balanced = []

    def __repr__(self) -> str:
        return f"<BatchQueue {self.name!r} {'running' if self.running else 'closed'}>"


def _items_of(partition: Partition) -> float:
    return float(sum(lane.taken for lane in partition.lanes))


def _seconds_of(partition: Partition) -> float:
    return partition.seconds
