"""One batch to its destination: prepare, send, and settle its lease by what came of it."""

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from penstock.clock import Clock
from penstock.errors import (
    CircuitOpen,
    ExportError,
    PayloadTooLarge,
    PermanentExportError,
    QueueClosed,
    QueueError,
    TransientExportError,
)
from penstock.export.classify import of_exception
from penstock.export.exporter import Exporter, PartialSuccess, Prepared, check_result
from penstock.export.lease_source import Source
from penstock.export.scaler import Ewma
from penstock.export.send_gate import Gate, Permit
from penstock.export.stats import Tally
from penstock.spool import Lease

log = logging.getLogger(__name__)

_MOST_IN_PARTS = 100  # batches: more than workers leave behind in an outage
_LEFT_ALONE = "the destination keeps failing and is left alone for now"
REST = 1.0  # seconds before a batch is tried again after an unforeseen error, or that could not become a dead letter


class _Withheld(Exception):
    """The send did not begin: while it waited for its turn the gate was stopped, or the destination began to fail."""


class Job(NamedTuple):
    """A leased batch, ready to travel, or what keeps it from that for now: its send will meet it."""

    lease: Lease
    prepared: Prepared
    problem: TransientExportError | None = None


@dataclass(slots=True)
class _Progress:
    """How far a batch is that has to be sent in parts: those to come, in order, and those refused, with the reason."""

    waiting: deque[bytes]
    refused: list[tuple[bytes, str]] = field(default_factory=list)
    is_begun: bool = False
    """Whether the destination has taken a part."""


class Delivery:
    """Sends batches of one source to one exporter.

    Order: a batch that failed keeps its place: it is nacked, never pushed again.
    Loss: none. A batch is acked when the destination has all of it, and a dead letter when it will never take it.
    Threads: every method may be called from any thread.
    """

    def __init__(self, source: Source, exporter: Exporter, gate: Gate, tally: Tally, clock: Clock) -> None:
        self._source = source
        self._exporter = exporter
        self._gate = gate
        self._tally = tally
        self._clock = clock
        self.latency = Ewma()
        self._progress: dict[int, _Progress] = {}  # by sequence; only the thread that has the lease touches its entry
        # Those that come again as what they were; guarded as `_progress` is.
        self._excused: dict[int, None] = {}
        self._partial_message = ""
        self._last_reason = ""

    def prepare(self, lease: Lease) -> Job | None:
        """The batch ready to travel; None if it cannot be prepared, and is a dead letter by now."""
        try:
            try:
                return Job(lease, self._exporter.prepare(lease.data))
            except TransientExportError as error:
                return Job(lease, Prepared(b""), error)
            except Exception as error:  # noqa: BLE001 - preparing does no I/O: whatever it raises, it will raise again
                self._tally.failed(of_exception(error).error_class, is_retry=lease.attempts > 1)
                self._reject(lease, f"cannot be prepared: {of_exception(error)}")
                return None
        except BaseException:  # unforeseen: the pool logs it, and the batch comes again
            self.give_back(lease, REST)
            raise

    def send_one(self, job: Job, permit: Permit) -> bool:
        """Send the batch and settle its lease; whether the destination took it. The permit is back afterwards."""
        try:
            is_taken = self._send(job, permit)
            if is_taken:
                self.done(job.lease)
        except BaseException:  # unforeseen: the pool logs it, and the batch comes again
            self.give_back(job.lease, REST)
            raise
        return is_taken

    def _send(self, job: Job, permit: Permit) -> bool:
        """Whether the destination took it: then `done` is to follow. If not, the lease is settled."""
        lease = job.lease
        is_retry = self._is_retry(lease)
        if is_retry:
            self._tally.add(retries=1)
        progress = self._progress.pop(lease.sequence, None)
        if progress is not None:
            return self._send_parts(lease, progress, permit)
        try:
            if job.problem is not None:
                self._meet(job.problem, permit, is_retry)
            self._transmit(job.prepared, permit, is_retry)
        except ExportError as error:
            return self._failed(lease, permit, error)
        except _Withheld:
            self.unsent(lease)
            return False
        self._tally.sent(len(lease.data), is_retry=is_retry)
        return True

    def send_now(self, batch: bytes) -> None:
        """Send on the caller's thread, without a queue. Raises an ExportError if the destination does not have it."""
        permit = self._gate.enter(0.0)
        if permit is None:
            raise CircuitOpen(_LEFT_ALONE)
        try:
            self._transmit(self._prepare_alone(batch, permit), permit, is_retry=False)
        except TransientExportError as error:
            self._gate.failed(permit, error, 1)
            raise
        except _Withheld:
            if self._gate.is_stopped:
                raise QueueClosed("the send queue is closed") from None
            raise CircuitOpen(_LEFT_ALONE) from None
        self._tally.sent(len(batch), is_retry=False)

    def _is_retry(self, lease: Lease) -> bool:
        return lease.attempts > 1 or lease.sequence in self._excused

    # -- one send ----------------------------------------------------------------------------------------------------

    def _transmit(self, prepared: Prepared, permit: Permit, is_retry: bool) -> None:
        """One send. Raises an ExportError of ours; all but a transient one have told the gate. Or _Withheld: the permit
        is back."""
        if not self._gate.begin(permit):
            raise _Withheld
        try:
            began = self._clock.monotonic()
            result = self._exporter.send(prepared)
            check_result(result)
            self.latency.add(self._clock.monotonic() - began)
        except Exception as error:
            raise self._failure(error, permit, is_retry=is_retry) from error
        except BaseException:
            self._gate.abandoned(permit)
            raise
        self._gate.succeeded(permit)
        if result is not None:
            self._note_partial(result)

    def _meet(self, problem: TransientExportError, permit: Permit, is_retry: bool) -> NoReturn:
        """Have a send fail before it begins: to the gate it is one like any other."""
        if not self._gate.begin(permit):
            raise _Withheld
        raise self._failure(problem, permit, is_retry=is_retry)

    def _failure(self, error: Exception, permit: Permit, *, is_retry: bool) -> ExportError:
        """What a send ended with, as one of ours; all but a transient one have told the gate."""
        failure = of_exception(error)
        self._tally.failed(failure.error_class, is_retry=is_retry)
        if not isinstance(failure, TransientExportError):
            self._gate.refused(permit, failure)
        return failure

    # -- too large ---------------------------------------------------------------------------------------------------

    def _split(self, batch: bytes) -> list[bytes] | None:
        try:
            parts = self._exporter.split(batch) or []
            is_smaller = len(parts) > 1 and max(map(len, parts)) < len(batch)  # else it would go on for ever
        except Exception:
            text = "Batch is too large, and splitting it failed. queue=%s bytes=%d"
            log.exception(text, self._gate.queue, len(batch))
            return None
        if not is_smaller:
            return None
        self._tally.add(splits=1)
        return parts

    def _send_parts(self, lease: Lease, progress: _Progress, permit: Permit | None = None) -> bool:
        """Send what is still to come, in order. What the destination has taken is not sent again after a failure.

        A part that fails until all attempts are used up is set aside; those behind it have as many again.
        """
        if not progress.waiting and permit is not None:
            self._gate.release(permit)
        while progress.waiting:
            part = progress.waiting[0]
            current, permit = permit or self._gate.enter_again(), None
            if current is None:
                self._put_back(lease, progress)
                return False
            try:
                self._transmit(self._prepare_alone(part, current), current, self._is_retry(lease))
            except PayloadTooLarge as error:
                smaller = self._split(part)
                progress.waiting.popleft()
                if smaller is None:
                    progress.refused.append((part, str(error)))
                else:
                    progress.waiting.extendleft(reversed(smaller))
                continue
            except PermanentExportError as error:
                progress.refused.append((part, str(error)))
            except TransientExportError as error:
                delay = self._gate.failed(current, error, lease.attempts)
                if self._is_spent(lease, error):
                    progress.refused.append((progress.waiting.popleft(), _spent(error)))
                    lease = lease._replace(attempts=0)
                    if not progress.waiting:
                        break
                self._remember(lease, progress)
                self._again(lease, error, delay)
                return False
            except _Withheld:
                self._put_back(lease, progress)
                return False
            else:
                progress.is_begun = True
            progress.waiting.popleft()
        return self._settle_parts(lease, progress)

    def _prepare_alone(self, batch: bytes, permit: Permit) -> Prepared:
        """What has no lease of its own, ready to travel. If it cannot be, the permit is back: nothing was sent."""
        try:
            return self._exporter.prepare(batch)
        except TransientExportError as error:
            self._meet(error, permit, is_retry=False)
        except BaseException as error:
            self._gate.release(permit)
            if not isinstance(error, Exception):
                raise
            failure = of_exception(error)
            self._tally.failed(failure.error_class, is_retry=False)
            raise PermanentExportError(f"cannot be prepared: {failure}", failure.error_class) from error

    def _put_back(self, lease: Lease, progress: _Progress) -> None:
        """What is to come of it does not leave now. That it comes again has nothing to do with it."""
        self._remember(lease, progress)
        self.unsent(lease)

    def _remember(self, lease: Lease, progress: _Progress) -> None:
        """For the next attempt. A batch that the queue has evicted never comes back for its entry."""
        self._progress[lease.sequence] = progress
        if len(self._progress) > _MOST_IN_PARTS:
            self._progress.pop(min(self._progress), None)

    def _settle_parts(self, lease: Lease, progress: _Progress) -> bool:
        """Only the parts that were refused are dead letters. If these cannot be kept, the batch comes again."""
        refused = progress.refused
        if not progress.is_begun:
            self._reject(lease, refused[0][1])
            return False
        try:
            while refused:
                part, reason = refused[0]
                self._source.bury(part, reason)
                self._note_dead_letter(lease, reason)
                del refused[0]
        except QueueError as error:
            log.warning("Dead letter cannot be written, the batch stays. queue=%s error=%s", self._gate.queue, error)
            self._remember(lease, progress)
            self.give_back(lease, REST)
            return False
        self._tally.sent(len(lease.data), is_retry=self._is_retry(lease))
        return True

    # -- settling ----------------------------------------------------------------------------------------------------

    def done(self, lease: Lease) -> None:
        """The destination has it."""
        self._excused.pop(lease.sequence, None)
        try:
            self._source.ack(lease)
        except QueueClosed:
            text = "Queue was closed before a send was acknowledged: it will be sent again. queue=%s sequence=%d"
            log.warning(text, self._gate.queue, lease.sequence)

    def _failed(self, lease: Lease, permit: Permit, error: ExportError) -> bool:
        """Settle a lease whose batch was not taken; True if its halves were, so that `done` is to follow."""
        if isinstance(error, TransientExportError):
            self._back_off(lease, permit, error)
            return False
        parts = self._split(lease.data) if isinstance(error, PayloadTooLarge) else None
        if parts is None:
            self._reject(lease, str(error))
            return False
        return self._send_parts(lease, _Progress(deque(parts)))

    def _back_off(self, lease: Lease, permit: Permit, error: TransientExportError) -> None:
        delay = self._gate.failed(permit, error, lease.attempts)
        if self._is_spent(lease, error):
            self._reject(lease, _spent(error))
        else:
            self._again(lease, error, delay)

    def _again(self, lease: Lease, error: TransientExportError, delay: float) -> None:
        """Have it sent again. What any other would have met as well does not count against its attempts."""
        if self._source.max_attempts is not None and not self._gate.blames_batch(error):
            self._excused[lease.sequence] = None
            if len(self._excused) > _MOST_IN_PARTS:  # those that the queue has evicted
                self._excused.pop(min(self._excused), None)
            lease = lease._replace(attempts=lease.attempts - 1)
        self.give_back(lease, delay)

    def _is_spent(self, lease: Lease, error: TransientExportError) -> bool:
        """Whether that was the last attempt, and the batch itself may have made it fail: an outage never counts."""
        return self._source.is_last_attempt(lease) and self._gate.blames_batch(error)

    def give_back(self, lease: Lease, delay: float = 0.0) -> None:
        try:
            self._source.nack(lease, delay, keep=True)
        except QueueClosed:
            pass  # it was never acked: it comes again when the queue is opened

    def unsent(self, lease: Lease) -> None:
        """Nothing of it has left: it comes again at once, and as what it was, since that was no attempt."""
        self.give_back(lease._replace(attempts=lease.attempts - 1))

    def _reject(self, lease: Lease, reason: str) -> None:
        self._excused.pop(lease.sequence, None)
        try:
            self._source.reject(lease, reason)
        except QueueClosed:
            return
        self._note_dead_letter(lease, reason)

    def _note_dead_letter(self, lease: Lease, reason: str) -> None:
        if reason != self._last_reason:  # a destination that refuses everything is one line, and a count
            self._last_reason = reason
            log_dead_letter(self._gate.queue, lease, reason)

    def _note_partial(self, result: PartialSuccess) -> None:
        self._tally.add(partial_rejected=result.rejected)
        if result.message != self._partial_message:
            self._partial_message = result.message
            what = "refused part of a batch" if result.rejected else "took a batch and warns"
            said = (what, self._gate.queue, result.rejected, result.message)
            log.warning("Destination %s. queue=%s rejected=%d reason=%s", *said)


def _spent(error: TransientExportError) -> str:
    return f"too many attempts, the last: {error}"


def log_dead_letter(queue: str, lease: Lease, reason: str) -> None:
    """Said by those who settle leases, in the same words."""
    text = "Batch became a dead letter. queue=%s sequence=%d attempts=%d bytes=%d reason=%s"
    log.warning(text, queue, lease.sequence, lease.attempts, len(lease.data), reason)
