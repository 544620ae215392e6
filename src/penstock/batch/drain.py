"""Draining: what a task does with the partitions it owns, and the threads that run tasks.

A task drains its partitions one cycle after another, never two at once. Partitions reach it through `ready`, each with
its token, so a partition is in one task's hands at a time, whoever owns it. An owner that was changed meanwhile passes
the partition on when it comes to it, at the latest after the cycle it is in.

Idle calls need no tokens: they are made by whoever has the task's turn, and who drains has it too. What is left is a
partition that changes owners. It is sent to the new one, who calls none of its handlers before it has arrived: so the
old one is done with it. And the old one, or the rounds for it, may be calling them just then: who calls first writes
down what, then looks before each call whether that is still what it should; who moves a partition first changes the
latter, then the owner; and the new owner looks at what the others have written down, and sends the partition there and
back if it finds its handlers. In any interleaving one of them sees the other.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from penstock.batch.config import BatchQueueConfig, ErrorHandler
from penstock.batch.idle_calls import NO_CALLS, IdleCalls, log_idle_failure, of_absent
from penstock.batch.idle_exclusion import Gate
from penstock.batch.idle_pace import IdlePace
from penstock.batch.partition import Lane, Partition, Registration
from penstock.batch.rounds import IDLE_ROUNDS, SLOW_CALLS, Round, TaskCalls
from penstock.clock import Clock
from penstock.errors import NoHandler

log = logging.getLogger("penstock.batch")

SIZE_CLASSES = (1, 10, 100, 1_000, 10_000)  # batches are counted by size: up to 1, up to 10, …, more
SHORTEST_ON_ROUNDS = 0.01  # seconds between idle calls that the rounds keep up with
TRUSTED = 100  # quick passes in a row after which it may come back: the machine may have been slow, not the handlers
PATIENCE = 100  # pauses without a call after which a thread makes its calls itself again: the rounds hang


class DrainTask:
    """Drains the partitions it owns and hands their items to the handlers.

    Threads: `inbox`, `submit`, `nudge`, `resume` and `under_way` from any thread, the rest from who has the turn.
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
        self.crew: object = None
        # Set by the layout: the tasks of the queue, and whom to tell that a new partition has reached us.
        self.siblings: Sequence[DrainTask] = (self,)
        self.on_arrival: Callable[[Partition], bool] = lambda partition: True
        self.partitions: tuple[Partition, ...] = ()  # replaced under the queue's lock
        self.idle_calls: IdleCalls = NO_CALLS  # replaced likewise
        self.idling: IdleCalls | None = None  # those that we are making
        self.may_join = False  # the rounds: where there are several threads
        self.round: Round | None = None  # belongs to the rounds, as does the turn while there is one
        self.round_calls: TaskCalls | None = None  # likewise
        self.quick_passes = TRUSTED
        self.longest_pause = config.max_idle
        self.turn = threading.Lock()  # who has it runs the task
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

    @property
    def calls_idle(self) -> bool:
        return self.idle_calls is not NO_CALLS

    @property
    def on_rounds(self) -> bool:
        return self.round is not None

    @property
    def takes_part(self) -> bool:
        """Whether it may leave its idle calls to the rounds."""
        return self.may_join and self.quick_passes >= TRUSTED

    def inbox(self) -> "SimpleQueue[Partition | None]":
        """Where partitions are put, with their token, to be drained."""
        return self.ready

    def submit(self, partition: Partition) -> None:
        """Have `partition`, whose token the caller has, drained."""
        self.inbox().put(partition)

    def run(self, partition: Partition) -> None:
        """Drain what came through the inbox."""
        self.cycle(partition)

    def nudge(self) -> None:
        """Have the thread look at its settings again."""
        self.ready.put(None)

    def reset(self) -> None:
        """Forget what was ready: we are the child of a fork."""
        self.ready = SimpleQueue()
        self.turn = threading.Lock()
        self.idling = None
        self.round = self.round_calls = None
        self.drained = 0
        self.seconds = 0.0
        self.batches = [0] * len(self.batches)

    # One cycle

    def cycle(self, first: Partition) -> None:
        """Drain and dispatch what is ready, then let go of it."""
        if self._merges:
            mine = self._all_ready(first)
        elif (first.owner is self and first.has_arrived) or self._is_mine(first):
            mine = [first]
        else:
            return
        if not mine:
            return
        had_data = False
        started = self._clock.monotonic()
        try:
            had_data = self._drain_together(mine) if len(mine) > 1 else self._drain_alone(mine[0])
        finally:
            now = self._clock.monotonic()
            self.seconds += now - started
            for partition in mine:
                partition.seconds += (now - started) / len(mine)
                self._release(partition)
        if self.idle_calls is not NO_CALLS:
            if self.pace.is_late(now):
                self.idle(now, absent_only=True)
            if had_data:
                self.pace.had_data(now)
        if self._on_cycle is not None:
            self._on_cycle(now)

    def _all_ready(self, first: Partition) -> list[Partition]:
        mine = []
        partition: Partition | None = first
        try:
            while True:
                if partition is not None and self._is_mine(partition):
                    mine.append(partition)
                partition = self.ready.get_nowait()
        except Empty:
            return mine

    def _is_mine(self, partition: Partition) -> bool:
        """Whether we may drain it; else it goes to who owns it, or who still calls its handlers, who sends it back."""
        if partition.owner is not self:
            partition.owner.submit(partition)
            return False
        if partition.has_arrived:
            return True
        for task in self.siblings:
            calls = task.under_way()
            if calls is not None and any(lane.partition is partition for lane in calls[1]):
                task.submit(partition)
                return False
        if self.on_arrival(partition):
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
            self._on_quiet(partition)  # and the token stays with us: nobody will need it
            return
        partition.asleep.append(partition)
        # Only now is it certain that a producer (or `close`, or a new owner) that came after our look saw the token.
        if partition.has_items() or partition.closed != was_closed or partition.owner is not self:
            rouse(partition.asleep)

    def _dispatch(self, registration: Registration, batch: list[Any], parts: Sequence[tuple[Lane, int]]) -> None:
        """Have the batch consumed, of which each lane brought its part; or have the error handler get it."""
        self.drained += len(batch)
        self.batches[bisect_left(SIZE_CLASSES, len(batch))] += 1
        consume = registration.consume
        if consume is None:
            for lane, count in parts:
                lane.unregistered += count
            self._nobody_for(registration, batch)
        elif (error := _error_of(consume, batch, registration.gate)) is None:
            for lane, count in parts:
                lane.consumed += count
        else:
            for lane, count in parts:
                lane.errors += count
            self._failed(registration, batch, error)

    def _nobody_for(self, registration: Registration, batch: list[Any]) -> None:
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

    def idle(self, now: float, *, absent_only: bool = False) -> None:
        """Call `on_idle` of the handlers; while some get data, only of those that got none since the last time."""
        self._make_idle_calls(absent_only)
        self.quick_passes = self.quick_passes + 1 if self._clock.monotonic() - now < SLOW_CALLS else 0
        self.pace.was_called(now)

    def _make_idle_calls(self, absent_only: bool) -> None:
        self.idling = calls = self.idle_calls
        try:
            for on_idle in calls[0] if not absent_only else of_absent(calls):
                if self.idle_calls is not calls:
                    break  # handlers or owners have changed: the rest has its turn the next time
                try:
                    on_idle()
                except BaseException:  # noqa: BLE001 - whatever a handler raises, the drain thread must go on
                    log_idle_failure(self.queue_name, calls, on_idle)
        finally:
            self.idling = None

    def until_idle(self) -> float:
        """Seconds until the handlers are to be called."""
        return self.pace.due - self._clock.monotonic()

    def until_own_idle(self) -> float:
        """Seconds until we call them ourselves, also if it was left to the rounds: somebody may hang there."""
        on = self.round
        return self.until_idle() if on is None else on.due + PATIENCE * on.pause - self._clock.monotonic()

    def come_back_if_forgotten(self) -> None:
        """Leave the rounds if they should have called long ago."""
        if self.on_rounds and self.until_own_idle() <= 0:
            self.quick_passes = 0  # so that we do not go there again at once
            IDLE_ROUNDS.leave(self)

    def idle_if_due(self) -> None:
        """Call the handlers if it is time."""
        if self.until_idle() <= 0:
            self.idle(self._clock.monotonic())

    def resume(self) -> None:
        """Go on by ourselves: the rounds have given the turn back, and nobody else may know."""
        self.nudge()

    def under_way(self) -> IdleCalls | None:
        """The idle calls that are being made, by us or on the rounds, who may also be just passing them by."""
        return self.idling or IDLE_ROUNDS.under_way(self)

    def replace_idle_calls(self, calls: IdleCalls) -> None:
        """Make these from now on; of the former none is begun any more."""
        self.idle_calls = calls
        if self.on_rounds:
            IDLE_ROUNDS.renew(self)

    def see_to_idle_calls(self) -> float | None:
        """Seconds until they are due if we make them, or None if there are none: how long to wait for data."""
        if not self.calls_idle:
            return None
        if self.takes_part and not self.on_rounds and self.pace.is_steady():
            IDLE_ROUNDS.join(self)
        return min(max(0.0, self.until_own_idle()), threading.TIMEOUT_MAX)


def rouse(asleep: list[Partition]) -> None:
    """Have the partition drained whose token this is, unless somebody else gets there first.

    The token goes from one place to the other within one call into C: a signal handler that raises (Ctrl-C) between
    two calls would otherwise leave it nowhere, and the partition without anybody who drains it.
    """
    try:
        inbox = asleep[0].owner.inbox()
        any(map(inbox.put, iter(asleep.pop, None)))
    except IndexError:
        pass  # the token is gone, by us or by somebody else


def _error_of(consume: Callable[[list[Any]], object], batch: list[Any], gate: Gate | None) -> BaseException | None:
    """What `consume` raised, if anything."""
    if gate is not None:
        gate.enter()
    try:
        consume(batch)
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises, the drain thread must go on
        return error
    finally:
        if gate is not None:
            gate.leave()
    return None


def report_batch(handler: ErrorHandler | None, queue_name: str, batch: list[Any], error: BaseException) -> None:
    """Give the batch to the error handler, who may fail in turn."""
    if handler is None:
        return
    try:
        handler(batch, error)
    except BaseException:  # whatever it raises, the drain thread must go on
        log.exception("Error handler failed. queue=%s items=%d", queue_name, len(batch))
