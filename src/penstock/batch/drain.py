"""Draining: what a task does with the partitions that it owns.

A task runs one cycle after another, never two at once. Partitions reach it through its inbox, each with its token. The
token of a partition is the right to call its handlers, `consume` and `on_idle` alike, and at most one task holds it. A
task that receives a partition of another owner passes it on. A partition that changes owners during a cycle is passed
on after that cycle.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from penstock.batch.config import BatchQueueConfig, ErrorHandler
from penstock.batch.idle import IdleExclusion, IdlePace
from penstock.batch.partition import Lane, Partition, Registration
from penstock.clock import Clock
from penstock.errors import NoHandler

log = logging.getLogger("penstock.batch")

SIZE_CLASSES = (1, 10, 100, 1_000, 10_000)  # batches are counted by size: up to 1, up to 10, …, more


class DrainTask:
    """Drains the partitions it owns and hands their items to the handlers.

    Threads: `inbox`, `submit` and `nudge` from any thread, the rest from the thread that runs the task.
    """

    def __init__(
        self,
        queue_name: str,
        index: int,
        config: BatchQueueConfig,
        clock: Clock,
        *,
        merges: bool,
        on_quiet: Callable[[Partition], None],
        on_cycle: Callable[[float], None] | None,
    ) -> None:
        self.index = index
        self.partitions: tuple[Partition, ...] = ()  # replaced under the layout's lock
        self.idle_partitions: tuple[Partition, ...] = ()  # those with an `on_idle` to call; replaced likewise
        self.drained = 0
        self.seconds = 0.0
        self.batches = [0] * (len(SIZE_CLASSES) + 1)
        self.ready: SimpleQueue[Partition | None] = SimpleQueue()
        self.pace = IdlePace(config.min_idle, config.max_idle, clock.monotonic())
        self.queue_name = queue_name
        self._clock = clock
        self._max_batch = config.max_batch
        self._error_handler: ErrorHandler | None = config.error_handler
        self._merges = merges
        self._on_quiet = on_quiet
        self._on_cycle = on_cycle

    def inbox(self) -> "SimpleQueue[Partition | None]":
        """Where partitions are put, with their token, to be drained."""
        return self.ready

    def submit(self, partition: Partition) -> None:
        """Have `partition` drained; the caller hands over its token."""
        self.inbox().put(partition)

    def run(self, partition: Partition) -> None:
        """Drain what came through the inbox."""
        self.cycle(partition)

    def nudge(self) -> None:
        """Have the thread look at its settings again."""
        self.ready.put(None)

    def reset(self) -> None:
        """Forget what was ready, in the child of a fork."""
        self.ready = SimpleQueue()
        self.drained = 0
        self.seconds = 0.0
        self.batches = [0] * len(self.batches)

    # One cycle

    def cycle(self, first: Partition) -> None:
        """Drain and dispatch what is ready, then let go of it."""
        mine = self._all_ready(first) if self._merges else [first] if self._owns_or_forwards(first) else []
        if not mine:
            return
        started = self._clock.monotonic()
        try:
            had_data = self._drain_together(mine) if len(mine) > 1 else self._drain_alone(mine[0])
            now = self._clock.monotonic()
            self.seconds += now - started
            for partition in mine:
                partition.seconds += (now - started) / len(mine)
            if self.idle_partitions:
                self._idle_beside_data(mine, now)
                if had_data:
                    self.pace.had_data(now)
        finally:
            for partition in mine:
                self._release(partition)
        if self._on_cycle is not None:
            self._on_cycle(now)

    def _all_ready(self, first: Partition) -> list[Partition]:
        mine = []
        partition: Partition | None = first
        try:
            while True:
                if partition is not None and self._owns_or_forwards(partition):
                    mine.append(partition)
                partition = self.ready.get_nowait()
        except Empty:
            return mine

    def _owns_or_forwards(self, partition: Partition) -> bool:
        """Whether this task owns it; otherwise the partition is passed on to its owner."""
        if partition.owner is self:
            return True
        partition.owner.submit(partition)
        return False

    def _drain_alone(self, partition: Partition) -> bool:
        had_data = False
        for lane in partition.lanes:
            if lane.items:
                had_data = True
                batch = self._take(lane, self._max_batch)
                self._dispatch(lane.registration, batch, ((lane, len(batch)),))
        return had_data

    def _drain_together(self, partitions: list[Partition]) -> bool:
        """One batch per handler of what all the partitions hold."""
        gathered: dict[Registration, tuple[list[Any], list[tuple[Lane, int]]]] = {}
        for partition in partitions:
            for lane in partition.lanes:
                if lane.items:
                    batch, parts = gathered.setdefault(lane.registration, ([], []))
                    left = None if self._max_batch is None else self._max_batch - len(batch)
                    if left != 0:
                        taken = self._take(lane, left)
                        batch += taken
                        parts.append((lane, len(taken)))
        for registration, (batch, parts) in gathered.items():
            self._dispatch(registration, batch, parts)
        return bool(gathered)

    def _take(self, lane: Lane, limit: int | None) -> list[Any]:
        batch, woken, recovered = lane.partition.take(lane, limit)
        if woken:
            for waiter in woken:
                waiter.wake()
        if recovered:
            log.info("Partition has room again. queue=%s partition=%d", self.queue_name, lane.partition.index)
        return batch

    def _release(self, partition: Partition) -> None:
        """Put the token back, unless there is more to drain, another owner, or the partition has seen its last item."""
        if partition.has_items() or partition.owner is not self:
            partition.owner.submit(partition)
            return
        was_closed = partition.closed
        if was_closed and partition.is_quiet():
            self._on_quiet(partition)  # and the task keeps the token: it is not needed again
            return
        self._put_token_back(partition, was_closed)

    def _put_token_back(self, partition: Partition, was_closed: bool) -> None:
        partition.asleep.append(partition)
        # Only now is it certain that a producer (or `close`, or a new owner) that came after our look saw the token.
        if partition.has_items() or partition.closed != was_closed or partition.owner is not self:
            wake_owner(partition.asleep)

    def _dispatch(self, registration: Registration, batch: list[Any], parts: Sequence[tuple[Lane, int]]) -> None:
        """Have the batch consumed, of which each lane brought its part; or have the error handler get it."""
        self.drained += len(batch)
        self.batches[bisect_left(SIZE_CLASSES, len(batch))] += 1
        consume = registration.consume
        if consume is None:
            for lane, count in parts:
                lane.unregistered += count
            self._report_unhandled(registration, batch)
        elif (error := _consume_and_catch(consume, batch, registration.exclusion)) is None:
            for lane, count in parts:
                lane.consumed += count
        else:
            for lane, count in parts:
                lane.errors += count
            self._failed(registration, batch, error)

    def _report_unhandled(self, registration: Registration, batch: list[Any]) -> None:
        if not registration.unregistered_logged:
            registration.unregistered_logged = True
            log.warning("Dropping items without a handler. queue=%s type=%s", self.queue_name, registration.type)
        error = NoHandler(f"no handler for {registration.type.__qualname__} in queue {self.queue_name!r}")
        report_batch(self._error_handler, self.queue_name, batch, error)

    def _failed(self, registration: Registration, batch: list[Any], error: BaseException) -> None:
        if self._error_handler is None:
            log.error(
                "Handler failed. queue=%s type=%s items=%d",
                self.queue_name, registration.type, len(batch), exc_info=error,
            )  # fmt: skip
        report_batch(self._error_handler, self.queue_name, batch, error)

    # Idle

    def idle_timeout(self) -> float | None:
        """Seconds until the next idle calls are due, None if there are none to make: how long to wait for data."""
        if not self.idle_partitions:
            return None
        return min(max(0.0, self.pace.due - self._clock.monotonic()), threading.TIMEOUT_MAX)

    def idle_if_due(self) -> None:
        """Call `on_idle` of every handler if it is time."""
        now = self._clock.monotonic()
        if now >= self.pace.due:
            self.make_idle_calls(now)

    def _idle_beside_data(self, mine: list[Partition], now: float) -> None:
        """Call `on_idle` of handlers that get no data although others keep the task busy."""
        if self.pace.is_late(now):
            self.make_idle_calls(now, absent_only=True)
        for partition in mine:
            if partition.owes_idle_calls:
                self._call_idle_handlers(partition, absent_only=True)

    def make_idle_calls(self, now: float, *, absent_only: bool = False) -> None:
        for partition in self.idle_partitions:
            try:
                partition.asleep.pop()
            except IndexError:
                partition.owes_idle_calls = True  # it is ready or being drained: its next cycle makes the calls
                continue
            try:
                self._call_idle_handlers(partition, absent_only)
            finally:
                self._put_token_back(partition, was_closed=False)
        self.pace.was_called(now)

    def _call_idle_handlers(self, partition: Partition, absent_only: bool) -> None:
        """Call `on_idle` of the partition's handlers, or only of those without new data. The task holds its token."""
        partition.owes_idle_calls = False
        for lane in partition.idle_lanes:
            was_absent, lane.idle_mark = lane.idle_mark == lane.taken and not lane.items, lane.taken
            if was_absent or not absent_only:
                call_on_idle(lane.registration, self.queue_name)


def call_on_idle(registration: Registration, queue_name: str) -> None:
    """Call `on_idle` of a handler once, unless another thread is in its `consume`; an error is logged."""
    on_idle, exclusion = registration.on_idle, registration.exclusion
    if on_idle is None or (exclusion is not None and not exclusion.try_alone()):
        return
    try:
        on_idle()
    except BaseException:  # whatever a handler raises, the drain thread must go on
        log.exception("on_idle failed. queue=%s type=%s", queue_name, registration.type)
    finally:
        if exclusion is not None:
            exclusion.leave_alone()


def wake_owner(asleep: list[Partition]) -> None:
    """Submit the partition in `asleep` to its owner, unless another thread takes the token first.

    The token goes from one place to the other within one call into C: a signal handler that raises (Ctrl-C) between
    two calls would otherwise leave it nowhere, and the partition without a thread that drains it.
    """
    try:
        inbox = asleep[0].owner.inbox()
        any(map(inbox.put, iter(asleep.pop, None)))
    except IndexError:
        pass  # the token is gone, taken by this thread or another


def _consume_and_catch(
    consume: Callable[[list[Any]], object], batch: list[Any], exclusion: IdleExclusion | None
) -> BaseException | None:
    """What `consume` raised, if anything."""
    if exclusion is not None:
        exclusion.enter()
    try:
        consume(batch)
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises, the drain thread must go on
        return error
    finally:
        if exclusion is not None:
            exclusion.leave()
    return None


def report_batch(handler: ErrorHandler | None, queue_name: str, batch: list[Any], error: BaseException) -> None:
    """Give the batch to the error handler, which may fail in turn."""
    if handler is None:
        return
    try:
        handler(batch, error)
    except BaseException:  # whatever it raises, the drain thread must go on
        log.exception("Error handler failed. queue=%s items=%d", queue_name, len(batch))
