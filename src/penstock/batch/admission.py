"""The producers' slow path, taken when there is no credit to pop: once in a thousand items, or when full."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from penstock.batch.config import BatchQueueConfig, BufferStrategy
from penstock.batch.drain import wake_owner
from penstock.batch.layout import PartitionLayout
from penstock.batch.partition import Lane
from penstock.batch.scheduler import drains_for
from penstock.batch.waiting import AsyncProduceWaiter, ThreadProduceWaiter
from penstock.clock import Clock
from penstock.errors import BlockTooLarge

log = logging.getLogger("penstock.batch")


class ProduceAdmission:
    """Lets items in, makes their producers wait, or turns them away.

    Threads: every method may be called from any thread.
    """

    def __init__(
        self, queue_name: str, config: BatchQueueConfig, layout: PartitionLayout, clock: Clock, served: object
    ) -> None:
        self.interrupted = False  # a producer may have been interrupted between taking a slot and using it
        self._queue_name = queue_name
        self._layout = layout
        self._clock = clock
        self._served = served
        self._byte_limit = config.buffer_bytes
        self._size_of = config.size_of
        self._patience = None if config.strategy is BufferStrategy.BLOCKING else 0.0
        self._warned = False

    def patience(self, timeout: float | None) -> float | None:
        """How long to wait for room: 0.0 is not at all, None for ever."""
        if timeout is not None:
            return max(0.0, timeout)
        return self._patience

    def deadline(self, patience: float | None) -> "ProduceDeadline":
        return ProduceDeadline(patience, self._clock)

    def admit(self, lane: Lane, items: Sequence[Any], timeout: float | None) -> int:
        """How many of `items` were accepted, always the first of them."""
        sizes = None if self._byte_limit is None else self._sizes(items, self._byte_limit)
        try:
            partition = lane.partition
            granted = partition.offer(lane, items, sizes, None)
            if partition.asleep:
                wake_owner(partition.asleep)
            if granted == len(items):
                return granted
            patience = self.patience(timeout)
            # A drain thread of this queue would wait for itself, or for one that waits for it.
            if patience != 0 and not partition.closed and not drains_for(self._served):
                granted += self._wait(lane, items[granted:], sizes and sizes[granted:], patience)
        except BaseException:
            self.interrupted = True
            raise
        if granted < len(items):
            self._refuse(lane, len(items) - granted)
        return granted

    async def admit_async(self, lane: Lane, items: Sequence[Any], patience: float | None) -> int:
        """The same for a coroutine."""
        sizes = None if self._byte_limit is None else self._sizes(items, self._byte_limit)
        partition = lane.partition
        try:
            granted = partition.offer(lane, items, sizes, None)
            if partition.asleep:
                wake_owner(partition.asleep)
            # A drain thread of this queue may run an event loop, and must not wait for itself either.
            if granted < len(items) and patience != 0 and not partition.closed and not drains_for(self._served):
                granted += await self._wait_async(lane, items[granted:], sizes and sizes[granted:], patience)
        except asyncio.CancelledError:
            raise  # it comes during the wait, and costs no slot
        except BaseException:
            self.interrupted = True
            raise
        if granted < len(items):
            self._refuse(lane, len(items) - granted)
        return granted

    def _wait(self, lane: Lane, items: Sequence[Any], sizes: Sequence[int] | None, patience: float | None) -> int:
        partition = lane.partition
        waiter = ThreadProduceWaiter(lane, items, sizes)
        try:
            if partition.offer(lane, items, sizes, waiter) < len(items) and not partition.closed:
                wake_owner(partition.asleep)
                self._warn_of_idle_threads()
                waiter.wait(patience)
        finally:
            granted = partition.withdraw(waiter)
            wake_owner(partition.asleep)
        return granted

    async def _wait_async(
        self, lane: Lane, items: Sequence[Any], sizes: Sequence[int] | None, patience: float | None
    ) -> int:
        partition = lane.partition
        waiter = AsyncProduceWaiter(lane, items, sizes)
        try:
            if partition.offer(lane, items, sizes, waiter) < len(items) and not partition.closed:
                wake_owner(partition.asleep)
                self._warn_of_idle_threads()
                await waiter.wait(patience)
        finally:
            granted = partition.withdraw(waiter)
            wake_owner(partition.asleep)
        return granted

    def _sizes(self, items: Sequence[Any], limit: int) -> list[int]:
        try:
            sizes = [self._size_of(item) for item in items]
        except TypeError as error:
            error.add_note("buffer_bytes counts items by size_of, which is len unless BatchQueueConfig says otherwise")
            raise
        if max(sizes) > limit:
            raise BlockTooLarge(f"an item of {max(sizes)} bytes never fits into buffer_bytes={limit}")
        return sizes

    def check_sizes(self, items: Sequence[Any]) -> None:
        """BlockTooLarge if one of them could never fit; asked before the first of them is taken."""
        if self._byte_limit is not None and items:
            self._sizes(items, self._byte_limit)

    def refuse_all(self, items: Sequence[Any]) -> None:
        """Count items that were not tried, since one before them was turned away."""
        for item in items:
            lane = self._layout.lane_for(item)
            lane.partition.count_untried(lane)

    def _refuse(self, lane: Lane, count: int) -> None:
        if lane.partition.refuse(lane, count):
            log.warning(
                "Queue started dropping. queue=%s partition=%d type=%s",
                self._queue_name, lane.partition.index, lane.registration.type,
            )  # fmt: skip
            self._warn_of_idle_threads()

    def _warn_of_idle_threads(self) -> None:
        """Types that all live in a few partitions leave the other threads idle: that must not pass in silence."""
        threads = len(self._layout.tasks)
        if self._warned or threads < 2:
            return
        self._warned = True
        busy = len({lane.partition.owner.index for lane in self._layout.lanes()})
        if busy < threads:
            log.warning(
                "A partition is full while threads have nothing to drain: there are fewer types than threads. "
                "PartitionSelector.round_robin() or by_key() would use them. queue=%s threads=%d used=%d",
                self._queue_name, threads, busy,
            )  # fmt: skip


class ProduceDeadline:
    """One timeout, spent by several waits."""

    __slots__ = ("_at", "_clock", "patience")

    def __init__(self, patience: float | None, clock: Clock) -> None:
        self.patience = patience
        self._clock = clock
        self._at = clock.monotonic() + patience if patience else None

    def left(self) -> float | None:
        """What remains of it, as `patience` says it."""
        return self.patience if self._at is None else max(0.0, self._at - self._clock.monotonic())
