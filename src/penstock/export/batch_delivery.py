"""One batch to its destination: prepare, send, and settle its lease by the outcome.

prepare ─► send ─┬─ taken ──────────────────────► ack
                 ├─ too large ─► split, send the parts in order
                 ├─ refused ────────────────────► dead letter
                 └─ failed ─────────────────────► nack: it keeps its place and comes again
"""

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.clock import Clock
from penstock.errors import (
    CircuitOpen,
    PayloadTooLarge,
    PermanentExportError,
    QueueClosed,
    QueueError,
    TransientExportError,
)
from penstock.export.classify import of_exception
from penstock.export.exporter import Exporter, PartialSuccess, Prepared, check_send_result
from penstock.export.leased_memory import LeaseSource
from penstock.export.scaler import Ewma
from penstock.export.send_gate import SendGate, SendPermit
from penstock.export.stats import ExportCounters
from penstock.spool import Lease

log = logging.getLogger(__name__)

_MAX_UNFINISHED = 100  # batches: more than there are workers, each with one that failed
ERROR_PAUSE = 1.0  # seconds until the next attempt, after an unforeseen error or a dead letter that was not written


@dataclass(slots=True)
class _Unfinished:
    """The state of a batch beyond what its lease says: the parts that are still to be sent, in order."""

    waiting: deque[bytes] = field(default_factory=deque)
    refused: list[tuple[bytes, str]] = field(default_factory=list)  # parts, each with the reason
    is_split: bool = False
    is_partly_taken: bool = False
    is_excused: bool = False  # an attempt failed that its lease does not count


class ExportDelivery:
    """Sends batches of one source to one exporter.

    Order: a batch that failed keeps its place: it is nacked, never pushed again.
    Loss: none. A batch is acked when the destination has all of it, and a dead letter when it will never take it.
    Threads: every method may be called from any thread.
    """

    def __init__(
        self, source: LeaseSource, exporter: Exporter, gate: SendGate, counters: ExportCounters, clock: Clock
    ) -> None:
        self._source = source
        self._exporter = exporter
        self._gate = gate
        self._counters = counters
        self._clock = clock
        self.latency = Ewma()
        self._unfinished: dict[int, _Unfinished] = {}  # by sequence; only the lease's holder touches its entry
        self._partial_message = ""
        self._last_reason = ""

    def prepare(self, lease: Lease) -> Prepared | None:
        """Returns the batch ready to travel; None if it cannot be prepared: its send will meet the error again."""
        try:
            return self._exporter.prepare(lease.data)
        except BaseException:  # noqa: BLE001 - `send` prepares it again, and settles it by what that raises
            return None

    def send(self, lease: Lease, prepared: Prepared | None = None) -> None:
        """Send the batch and settle its lease. A batch that is not prepared yet is prepared first."""
        try:
            self._send(lease, prepared)
        except BaseException:  # unforeseen: the pool logs it, and the batch comes again
            self.give_back(lease, ERROR_PAUSE)
            raise

    def send_direct(self, data: bytes) -> None:
        """Send on the caller's thread, without a queue. Raises an ExportError if the destination does not have it."""
        permit = self._gate.begin()
        if permit is None:
            if self._gate.is_stopped:
                raise QueueClosed("the send queue is closed")
            raise CircuitOpen("the destination keeps failing and is left alone for now")
        try:
            self._transmit(data, None, permit, is_retry=False)
        except TransientExportError as error:
            self._gate.failed(permit, error, 1)
            raise
        self._counters.sent(len(data), is_retry=False)

    def give_back(self, lease: Lease, delay: float = 0.0) -> None:
        with suppress(QueueClosed):  # it was never acked: it comes again when the queue is opened
            self._source.nack(lease, delay, keep=True)

    def give_back_unsent(self, lease: Lease) -> None:
        """Give back a batch of which nothing was sent. It comes again at once, and this is no attempt."""
        self.give_back(lease._replace(attempts=lease.attempts - 1))

    # -- one batch, in one part or in several ------------------------------------------------------------------------

    def _send(self, lease: Lease, prepared: Prepared | None) -> None:
        state = self._unfinished.pop(lease.sequence, None) or _Unfinished()
        if not state.is_split:
            state.waiting.append(lease.data)
        is_retry, is_begun = state.is_excused or lease.attempts > 1, False
        while state.waiting:
            permit = self._gate.begin(is_continued=is_begun)
            if permit is None:
                self._remember(lease, state)
                self.give_back_unsent(lease)
                return
            if is_retry and not is_begun:
                self._counters.add(retries=1)
            is_begun = True
            part = state.waiting[0]
            try:
                self._transmit(part, None if state.is_split else prepared, permit, is_retry=is_retry)
            except PayloadTooLarge as error:
                smaller = self._split(part)
                state.waiting.popleft()
                if smaller is None:
                    state.refused.append((part, str(error)))
                else:
                    state.waiting.extendleft(reversed(smaller))
                    state.is_split = True
            except PermanentExportError as error:
                state.refused.append((state.waiting.popleft(), str(error)))
            except TransientExportError as error:
                if self._wait_for_retry(lease, state, error, self._gate.failed(permit, error, lease.attempts)):
                    return
            else:
                state.is_partly_taken = True
                state.waiting.popleft()
        self._settle(lease, state, is_retry=is_retry)

    def _transmit(self, part: bytes, prepared: Prepared | None, permit: SendPermit, *, is_retry: bool) -> None:
        """One send. Raises an ExportError; after a transient one the caller still has to give the permit back."""
        try:
            if prepared is None:
                prepared = self._prepare(part)
            began = self._clock.monotonic()
            result = self._exporter.send(prepared)
            check_send_result(result)
            self.latency.add(self._clock.monotonic() - began)
        except Exception as error:
            failure = of_exception(error)
            self._counters.failed(failure.error_class, is_retry=is_retry)
            if prepared is None and isinstance(failure, PermanentExportError):
                self._gate.abandoned(permit)  # the destination was not asked
            elif isinstance(failure, PermanentExportError):
                self._gate.refused(permit, failure)
            raise failure from error
        except BaseException:
            self._gate.abandoned(permit)
            raise
        self._gate.succeeded(permit)
        if result is not None:
            self._note_partial(result)

    def _prepare(self, part: bytes) -> Prepared:
        """Raises TransientExportError as the exporter did, and PermanentExportError for whatever else it raised."""
        try:
            return self._exporter.prepare(part)
        except TransientExportError:
            raise
        except Exception as error:  # preparing does no I/O: whatever it raises, it will raise again
            failure = of_exception(error)
            raise PermanentExportError(f"cannot be prepared: {failure}", failure.error_class) from error

    def _split(self, part: bytes) -> list[bytes] | None:
        try:
            parts = self._exporter.split(part) or []
            is_smaller = len(parts) > 1 and max(map(len, parts)) < len(part)  # else splitting would never end
        except Exception:
            text = "Batch is too large, and splitting it failed. queue=%s bytes=%d"
            log.exception(text, self._gate.queue, len(part))
            return None
        if not is_smaller:
            return None
        self._counters.add(splits=1)
        return parts

    def _wait_for_retry(self, lease: Lease, state: _Unfinished, error: TransientExportError, delay: float) -> bool:
        """Give the batch back for another attempt; False if the part has had all of them and was the last one.

        Only failures that may be the batch's own count: an outage never does. A part that fails until all attempts are
        used up is set aside; those behind it have as many again.
        """
        if not self._gate.counts_as_attempt(error):
            if self._source.max_attempts is not None:
                state.is_excused = True
                lease = lease._replace(attempts=lease.attempts - 1)
        elif self._source.is_last_attempt(lease):
            state.refused.append((state.waiting.popleft(), f"too many attempts, the last: {error}"))
            if not state.waiting:
                return False
            lease = lease._replace(attempts=0)
        self._remember(lease, state)
        self.give_back(lease, delay)
        return True

    def _remember(self, lease: Lease, state: _Unfinished) -> None:
        """Keep the state for the next attempt, where the lease alone does not tell it."""
        if not state.is_split:
            state.waiting.clear()  # the lease brings it again
        if state.is_split or state.is_excused:
            self._unfinished[lease.sequence] = state
        if len(self._unfinished) > _MAX_UNFINISHED:  # an evicted batch never fetches its state
            self._unfinished.pop(min(self._unfinished), None)

    # -- settling ----------------------------------------------------------------------------------------------------

    def _settle(self, lease: Lease, state: _Unfinished, *, is_retry: bool) -> None:
        """Ack the lease. Refused parts are dead letters; a batch of which no part was taken is a dead letter whole."""
        if not state.is_partly_taken:
            reason = state.refused[0][1]
            with suppress(QueueClosed):
                self._source.reject(lease, reason)
                self._note_dead_letter(lease, reason)
            return
        try:
            while state.refused:
                part, reason = state.refused[0]
                self._source.bury(part, reason)
                self._note_dead_letter(lease, reason)
                del state.refused[0]
        except QueueError as error:
            log.warning("Dead letter cannot be written, the batch stays. queue=%s error=%s", self._gate.queue, error)
            self._remember(lease, state)
            self.give_back(lease, ERROR_PAUSE)
            return
        self._counters.sent(len(lease.data), is_retry=is_retry)
        try:
            self._source.ack(lease)
        except QueueClosed:
            text = "Queue was closed before a send was acknowledged: it will be sent again. queue=%s sequence=%d"
            log.warning(text, self._gate.queue, lease.sequence)

    def _note_dead_letter(self, lease: Lease, reason: str) -> None:
        if reason != self._last_reason:  # one line for a destination that refuses everything
            self._last_reason = reason
            log_export_dead_letter(self._gate.queue, lease, reason)

    def _note_partial(self, result: PartialSuccess) -> None:
        self._counters.add(partial_rejected=result.rejected)
        if result.message != self._partial_message:
            self._partial_message = result.message
            said = (self._gate.queue, result.rejected, result.message)
            if result.rejected:
                log.warning("Destination refused part of a batch. queue=%s rejected=%d reason=%s", *said)
            else:
                log.warning("Destination took a batch and warns. queue=%s rejected=%d reason=%s", *said)


def log_export_dead_letter(queue: str, lease: Lease, reason: str) -> None:
    text = "Batch became a dead letter. queue=%s sequence=%d attempts=%d bytes=%d reason=%s"
    log.warning(text, queue, lease.sequence, lease.attempts, len(lease.data), reason)
