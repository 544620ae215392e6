"""One worker's batches, one behind the other: each is leased as another is acked, and several may be under way.

    begin ─► begin ─► … as many as are wanted ─► settle the first ─► begin the next in its place ─► settle …

A destination that answers at once is kept waiting by whoever waits for its answer: while that comes, the next batch can
go out. In one thread, because threads of one interpreter would take turns, and handing over costs more than it brings.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

from penstock.clock import Clock
from penstock.errors import QueueClosed
from penstock.export.batch_delivery import REST, Delivery, Job
from penstock.export.exporter import Finish, check_result
from penstock.export.lease_source import Source
from penstock.export.send_gate import Gate, Permit
from penstock.export.stats import Sent
from penstock.spool import Lease


class _Flight(NamedTuple):
    """A batch that was sent, and whose answer is still to come."""

    lease: Lease
    finish: Finish
    began: float


class Row:
    """Sends from one batch on, for as long as all is well and it is wanted.

    Order: as leased. Batches are settled in the order in which they went out; one that fails keeps its place in the
        queue and ends the row, and what was sent behind it is still settled.
    Loss: none. Whatever ends it, every batch that was leased is acked, nacked or a dead letter, or its queue is closed;
        and every place at the gate was given back once.
    Threads: it is one worker's own.
    Blocks: `send`, for the destination and for a place at the gate.
    """

    def __init__(
        self, source: Source, delivery: Delivery, gate: Gate, sent: Sent, wanted: Callable[[float], int], clock: Clock
    ) -> None:
        """`wanted` is told when a batch was taken, and says how many may be under way from then on; 0: no more.

        Those of others count as well, as far as another is begun beside its own.
        """
        self._source = source
        self._delivery = delivery
        self._gate = gate
        self._sent = sent
        self._wanted = wanted
        self._monotonic = clock.monotonic
        self._flights: deque[_Flight] = deque()
        self._reset()

    def _reset(self) -> None:
        self._width = 1
        self._ends = False  # nothing more is begun
        self._last: Job | None = None  # to be sent alone, after the others

    def send(self, job: Job, permit: Permit) -> None:
        """Send this batch and those that follow. The permit is back afterwards."""
        if self._delivery.goes_alone(job.lease):
            self._send_alone(job, permit)
            return
        if not self._gate.begin(permit):
            self._delivery.unsent(job.lease)
            return
        self._reset()
        at_hand: Job | None = job  # who has one has a place for it
        problem: BaseException | None = None
        while at_hand is not None or self._flights:
            try:
                at_hand = self._settle(permit) if at_hand is None else self._begin(at_hand, permit)
            except BaseException as error:  # noqa: BLE001 - nobody foresaw it: what is under way is settled first
                at_hand, self._ends = None, True
                problem = problem or error
        last, self._last = self._last, None
        if last is not None:
            self._send_last(last, permit)
        if problem is not None:
            raise problem

    def _begin(self, job: Job, permit: Permit) -> Job | None:
        """Send it; the next one, if another is to be under way beside it."""
        began = self._monotonic()
        try:
            if job.problem is not None:
                raise job.problem
            finish = self._delivery.begin_send(job.prepared)
        except BaseException as error:  # noqa: BLE001 - it is settled when its turn comes
            finish = partial(_fail, error)
        self._flights.append(_Flight(job.lease, finish, began))
        if len(self._flights) >= self._width or not self._gate.begin_at_once(permit, self._width):
            return None
        return self._next(permit, self._lease)

    def _settle(self, permit: Permit) -> Job | None:
        """Wait for the answer to the first of those under way; the next one, if one is to follow in its place."""
        lease, finish, began = self._flights.popleft()
        has_place = True
        try:
            try:
                result = finish()
                if result is not None:
                    check_result(result)
            except Exception as error:  # noqa: BLE001 - exporters are other people's code: decide by what it is
                self._ends, has_place = True, False
                self._delivery.failed(lease, permit, error)
                return None
            now = self._monotonic()
            self._delivery.took(result, now - began)
            self._sent.batches += 1
            self._sent.bytes += len(lease.data)
            self._width = self._wanted(now)
            goes_on = not self._ends and len(self._flights) < self._width and self._gate.goes_on(permit)
            has_place = False
            if goes_on:
                return self._next(permit, partial(self._exchange, lease))
            self._gate.succeeded(permit)
            self._delivery.done(lease)
            return None
        except QueueClosed:
            self._delivery.closed_too_soon(lease)
            return None
        except BaseException:
            self._delivery.give_back(lease, REST)
            raise
        finally:
            if has_place:
                self._gate.abandoned(permit)

    def _next(self, permit: Permit, lease: Callable[[], Lease | None]) -> Job | None:
        """The next batch, ready for the place that is kept for it; None if there is none, and the place given back."""
        job = None
        try:
            leased = lease()
            job = self._delivery.prepare(leased) if leased is not None else None
            if job is not None and self._delivery.goes_alone(job.lease):
                self._last, self._ends, job = job, True, None
        finally:
            if job is None:
                self._gate.abandoned(permit)
        return job

    def _exchange(self, lease: Lease) -> Lease | None:
        # A queue does not exchange while one that failed waits for its time, but leases others.
        return self._source.exchange(lease) or self._lease()

    def _lease(self) -> Lease | None:
        try:
            leases = self._source.lease(1)
        except QueueClosed:
            return None  # those under way find out by themselves
        return leases[0] if leases else None

    def _send_last(self, job: Job, permit: Permit) -> None:
        """One that goes alone, after the others are settled; not if the destination is to be left alone by now."""
        if self._gate.is_current(permit):
            self._send_alone(job, permit)
        else:
            self._delivery.unsent(job.lease)

    def _send_alone(self, job: Job, permit: Permit) -> None:
        if self._delivery.send_one(job, permit):
            self._wanted(self._monotonic())


def _fail(error: BaseException) -> NoReturn:
    raise error
