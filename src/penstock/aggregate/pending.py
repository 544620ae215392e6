"""The points that L1 holds between admission and push, and the submissions that wait for them. No threads, no I/O.

    admit ──► collecting ──seal, when no round is sealed──► sealed ──its last queued chunk is merged──► pushed

Submissions that wait for an answer collect in a push round. A sealed round takes no further submission. It is pushed
as a whole, and its submissions share the answer, while the next round collects. So a submission is never in the durable
queue in part, and a slow disk makes larger rounds instead of a longer queue.

Points without a waiting submission collect in a round of their own, and are kept until the durable queue takes them.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.clock import Clock
from penstock.model.definition import Definition
from penstock.model.point import Chunk

log = logging.getLogger(__name__)

Done = Callable[[BaseException | None], object]


@dataclass(slots=True, eq=False)
class Submission:
    """Chunks that are admitted together, and the sender's callback; without one, no answer is awaited."""

    done: Done | None
    received: list[tuple[str, int, int]] = field(default_factory=list)  # metric, points, those that are no numbers
    plain: list[Chunk] = field(default_factory=list)  # merged with those of all metrics when the round is pushed
    queued: list["QueuedChunk"] = field(default_factory=list)  # merged by the handler of their metric
    round: "PushRound | None" = None  # None if no answer is awaited
    requests: bytes = b""  # the digests of the requests that the chunks are of

    def answer(self, error: BaseException | None) -> None:
        assert self.done is not None
        try:
            self.done(error)
        except Exception:
            log.exception("A sender could not be answered.")


@dataclass(slots=True, eq=False)
class QueuedChunk:
    """A chunk of a defined metric in the batch queue, with the definitions of its admission.

    Each metric has a subclass of its own, which the queue dispatches by.
    """

    chunk: Chunk
    definitions: tuple[Definition, ...]
    submission: Submission


@dataclass(slots=True, eq=False)
class PushRound:
    """Points that are pushed together. Guarded by the lock of `PendingPoints` until it is taken to be pushed."""

    is_awaited: bool
    waiting: set[Submission] = field(default_factory=set)  # one that leaves is answered, so each is once
    unmerged: int = 0  # queued chunks of its submissions
    chunks: list[Chunk] = field(default_factory=list)
    partials: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0


class PendingPoints:
    """The room that is left, and the push rounds.

    Bounds: at most `max_bytes` are held and `max_chunks` are queued. A larger submission is admitted alone, because it
        would never fit otherwise.
    Threads: every method may be called from any thread; one thread at a time takes rounds and ends them. Senders are
        answered without the lock.
    """

    def __init__(self, *, max_bytes: int, max_chunks: int, flush_interval: float, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._max_chunks = max_chunks
        self._flush_interval = flush_interval
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._all_merged = threading.Condition(self._lock)
        self._is_closed = False
        self._is_stopped = False
        self._unmerged = 0  # queued chunks
        self._collecting = PushRound(is_awaited=True)
        self._sealed: PushRound | None = None
        self._unawaited = PushRound(is_awaited=False)
        self._unawaited_due = 0.0
        self._is_refusing = False  # the durable queue refused unawaited points: the next try is after the interval
        self.held_bytes = 0
        self.turned_away = 0

    # In

    def admit(self, submission: Submission, timeout: float = 0.0) -> bool:
        """Hold all chunks of the submission, or none if there is no room within `timeout` seconds.

        The caller then puts the queued ones into the batch queue.
        """
        with self._lock:
            if timeout > 0:
                self._has_room.wait_for(lambda: self._is_closed or self._fits_locked(submission), timeout)
            if self._is_closed or not self._fits_locked(submission):
                self.turned_away += 1
                return False
            self._unmerged += len(submission.queued)
            self.held_bytes += _nbytes(queued.chunk for queued in submission.queued)
            if submission.done is None:
                self._add_locked(self._unawaited, chunks=submission.plain)
                return True
            submission.round = round_ = self._collecting
            if not round_.waiting:
                self._has_work.notify()
            round_.waiting.add(submission)
            round_.unmerged += len(submission.queued)
            self._add_locked(round_, chunks=submission.plain)
            return True

    def _fits_locked(self, submission: Submission) -> bool:
        if submission.queued and self._unmerged + len(submission.queued) > self._max_chunks:
            return self._unmerged == 0
        wanted = _nbytes(submission.plain) + _nbytes(queued.chunk for queued in submission.queued)
        return self.held_bytes + wanted <= self._max_bytes or self.held_bytes == 0

    def _add_locked(
        self, round_: PushRound, *, chunks: Sequence[Chunk] = (), partials: Sequence[pa.Table] = ()
    ) -> None:
        was_empty, size = not round_.nbytes, _nbytes(chunks) + _nbytes(partials)
        round_.chunks += chunks
        round_.partials += partials
        round_.nbytes += size
        self.held_bytes += size
        if round_ is not self._unawaited or not round_.nbytes:
            return
        if was_empty and not self._is_stopped:
            self._unawaited_due = self._clock.monotonic() + self._flush_interval
        if was_empty or self._unawaited_is_due_locked():
            self._has_work.notify()

    def add_partials(self, queued: Sequence[QueuedChunk], round_: PushRound | None, partials: list[pa.Table]) -> None:
        """Queued chunks, all of one round or of no submission that waits, have become these partials."""
        with self._lock:
            self._add_locked(round_ or self._unawaited, partials=partials)
            self._leave_queue_locked(queued, round_)

    def fail_queued(self, queued: QueuedChunk, error: BaseException) -> None:
        """A queued chunk could not be merged. Its submission is answered at once; the others of its round go on."""
        submission = queued.submission
        with self._lock:
            self._leave_queue_locked([queued], submission.round)
            is_waiting = submission.round is not None and submission in submission.round.waiting
            if submission.round is not None:
                submission.round.waiting.discard(submission)
        if is_waiting:
            submission.answer(error)

    def _leave_queue_locked(self, queued: Sequence[QueuedChunk], round_: PushRound | None) -> None:
        self._release_locked(_nbytes(each.chunk for each in queued))
        self._unmerged -= len(queued)
        if not self._unmerged:
            self._all_merged.notify_all()
        if round_ is not None:
            round_.unmerged -= len(queued)
            if not round_.unmerged and round_ is self._sealed:
                self._has_work.notify()

    def _release_locked(self, nbytes: int) -> None:
        self.held_bytes -= nbytes
        self._has_room.notify_all()

    # Out

    def next_round(self) -> PushRound | None:
        """Wait for a round that is to be pushed; None once `stop` was called."""
        with self._lock:
            while not self._is_stopped:
                if (due := self._due_locked()) is not None:
                    return due
                wait = self._unawaited_due - self._clock.monotonic() if self._unawaited.nbytes else None
                self._has_work.wait(wait)
            return None

    def _due_locked(self) -> PushRound | None:
        if self._sealed is None and self._collecting.waiting:
            self._sealed, self._collecting = self._collecting, PushRound(is_awaited=True)
        if self._sealed is not None and not self._sealed.unmerged:
            whole, self._sealed = self._sealed, None
            return whole
        if self._unawaited.nbytes and self._unawaited_is_due_locked():
            due, self._unawaited = self._unawaited, PushRound(is_awaited=False)
            return due
        return None

    def _unawaited_is_due_locked(self) -> bool:
        if self._clock.monotonic() >= self._unawaited_due:
            return True
        return self.held_bytes * 2 > self._max_bytes and not self._is_refusing

    def end_round(self, round_: PushRound, error: BaseException | None = None) -> bool:
        """The durable queue has all of the round, or with an error nothing: its submissions are answered so.

        True if the queue had refused unawaited points before and now has them.
        """
        with self._lock:
            self._release_locked(round_.nbytes)
            recovered = not round_.is_awaited and self._is_refusing
            if recovered:
                self._is_refusing = False
            waiting = list(round_.waiting)
            round_.waiting.clear()
        for submission in waiting:
            submission.answer(error)
        return recovered

    def keep(self, round_: PushRound) -> bool:
        """The durable queue refused the round, and no submission waits for it: it is pushed later. True at first."""
        with self._lock:
            self._release_locked(round_.nbytes)
            self._add_locked(self._unawaited, chunks=round_.chunks, partials=round_.partials)
            self._unawaited_due = self._clock.monotonic() + self._flush_interval
            began, self._is_refusing = not self._is_refusing, True
            return began

    # The end

    def close(self) -> None:
        """Admit nothing more, callers that wait for room included."""
        with self._lock:
            self._is_closed = True
            self._has_room.notify_all()

    def wait_until_merged(self, timeout: float) -> bool:
        """Whether all queued chunks have been merged, or have failed, within `timeout` seconds."""
        with self._lock:
            return self._all_merged.wait_for(lambda: not self._unmerged, timeout)

    def stop(self) -> None:
        """Let `next_round` return None."""
        with self._lock:
            self._is_stopped = True
            self._has_work.notify_all()

    def last_rounds(self) -> list[PushRound]:
        """Everything that is left, merged or not, after `stop`."""
        with self._lock:
            left = [round_ for round_ in (self._sealed, self._collecting, self._unawaited) if round_ is not None]
            self._sealed, self._collecting = None, PushRound(is_awaited=True)
            self._unawaited = PushRound(is_awaited=False)
            return [round_ for round_ in left if round_.waiting or round_.nbytes]


def _nbytes(pieces: Iterable[Chunk | pa.Table]) -> int:
    return sum(piece.nbytes for piece in pieces)
