"""What L1 holds between its two doors, and who waits for it. No threads and no I/O of its own.

    admit ──► in the queue ──► merged ──► cut ──► pushed, or refused

Requests that wait for an answer gather in a round. A round that is cut takes nobody in any more; once all of its chunks
are merged it is handed over as a whole, and its requests share the answer. Meanwhile the next round gathers. So a
request is never half in the durable queue, and a slow disk makes larger rounds instead of a longer line.

    gathering ──cut, when nothing is being pushed──► closed ──its last chunk is merged──► handed over

Chunks that nobody waits for belong to no round: their partials are kept until the durable queue takes them.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from penstock.clock import Clock
from penstock.model.point import Chunk

log = logging.getLogger(__name__)

DOORWAY_GRACE = 1.0  # it takes microseconds to pass; a thread that died in it must not stop `close`

Done = Callable[[BaseException | None], object]


class Round:
    """What is handed over at once: requests that share the answer, or partials that nobody waits for.

    Guarded by the lock of `Pending`.
    """

    __slots__ = ("chunks", "is_kept", "nbytes", "partials", "rows", "unmerged", "waiting")

    def __init__(self, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.waiting: set[Request] = set()
        self.unmerged = 0
        self.partials: list[pa.Table] = []
        self.chunks: list[Chunk] = []  # small ones, whose points are made partials all at once
        self.rows = 0
        self.nbytes = 0

    def add(self, partials: Sequence[pa.Table]) -> None:
        self.partials += partials
        self.rows += sum(table.num_rows for table in partials)
        self.nbytes += sum(table.nbytes for table in partials)


class Request:
    """One sender that waits; whoever takes it out of its round answers it, so it is answered once."""

    __slots__ = ("done", "round")

    def __init__(self, done: Done, round_: Round) -> None:
        self.done = done
        self.round = round_

    def answer(self, error: BaseException | None) -> None:
        try:
            self.done(error)
        except Exception:
            log.exception("A sender could not be answered.")


class Held:
    """A chunk on its way through the queue. Each handler of L1 has a subclass of its own to be dispatched by."""

    __slots__ = ("chunk", "nbytes", "request")

    def __init__(self, chunk: Chunk, nbytes: int, request: Request | None) -> None:
        self.chunk = chunk
        self.nbytes = nbytes
        self.request = request

    @property
    def round(self) -> Round | None:
        return None if self.request is None else self.request.round


class Pending:
    """The room that is left, the rounds, and the partials that nobody waits for.

    Bounds: at most `max_bytes` are held, in the queue and as partials, and `max_chunks` in the queue; except that a
        request larger than that is let in alone, because it would never fit otherwise.
    Threads: every method may be called from any thread; one thread at a time takes rounds and says what became of them.
    """

    def __init__(
        self, *, max_bytes: int, max_chunks: int, flush_interval: float, flush_rows: int, clock: Clock
    ) -> None:
        self._max_bytes = max_bytes
        self._max_chunks = max_chunks
        self._flush_interval = flush_interval
        self._flush_rows = flush_rows
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._doorway_empty = threading.Condition(self._lock)
        self._in_doorway = 0
        self._is_closed = False
        self._is_stopped = False
        self._chunks = 0
        self._gathering = Round()
        self._cut: Round | None = None
        self._kept = Round(is_kept=True)
        self._kept_due = 0.0
        self._is_refusing = False  # the durable queue refused what is kept: it gets time, not more of it
        self.held_bytes = 0
        self.turned_away = 0

    # In

    @contextmanager
    def doorway(self, sizes: list[int], timeout: float = 0.0) -> Iterator[list[int] | None]:
        """Room for one request's chunks, or None; whoever is in the doorway may still put them into the queue.

        Waits for the room up to `timeout` seconds.
        """
        admitted = self._admit(sum(sizes), len(sizes), timeout)
        try:
            yield sizes if admitted else None
        finally:
            if admitted:
                with self._lock:
                    self._in_doorway -= 1
                    self._doorway_empty.notify_all()

    def _admit(self, wanted: int, chunks: int, timeout: float) -> bool:
        def decided() -> bool:
            return self._is_closed or self._fits_locked(wanted, chunks)

        with self._lock:
            if timeout > 0:
                self._has_room.wait_for(decided, timeout)
            if self._is_closed or not decided():
                self.turned_away += 1
                return False
            self.held_bytes += wanted
            self._chunks += chunks
            self._in_doorway += 1
            return True

    def _fits_locked(self, wanted: int, chunks: int) -> bool:
        if self._chunks + chunks > self._max_chunks:
            return self._chunks == 0
        return self.held_bytes + wanted <= self._max_bytes or self.held_bytes == 0

    def enter(self, done: Done, chunks: int) -> Request:
        """Let a request of so many chunks wait in the round that gathers."""
        with self._lock:
            round_ = self._gathering
            if not round_.waiting:
                self._has_work.notify()
            request = Request(done, round_)
            round_.waiting.add(request)
            round_.unmerged += chunks
            return request

    def gathered(self, held: Sequence[Held], round_: Round | None) -> None:
        """The chunks, all of one round or of none, wait with the small ones of other metrics."""
        with self._lock:
            into = round_ or self._kept
            first = not into.nbytes
            into.chunks += [each.chunk for each in held]
            into.rows += sum(len(each.chunk) for each in held)
            into.nbytes += sum(each.nbytes for each in held)
            self._chunks -= len(held)
            if round_ is not None:
                self._count_down_locked(round_, len(held))
            else:
                self._kept_grew_locked(first=first)

    def merged(self, held: Sequence[Held], round_: Round | None, partials: Sequence[pa.Table]) -> None:
        """The chunks, all of one round or of none, have become these partials."""
        with self._lock:
            into = round_ or self._kept
            before = into.nbytes
            into.add(partials)
            self._leave_queue_locked(held, into.nbytes - before)
            if round_ is not None:
                self._count_down_locked(round_, len(held))
            elif partials:
                self._kept_grew_locked(first=not before)

    def failed(self, held: Held, error: BaseException) -> None:
        """The chunk could not be merged: its request hears of it now, the others of its round do not."""
        request = held.request
        with self._lock:
            self._leave_queue_locked([held], 0)
            if request is None:
                return
            waits = request in request.round.waiting
            request.round.waiting.discard(request)
            self._count_down_locked(request.round, 1)
        if waits:
            request.answer(error)

    def _leave_queue_locked(self, held: Sequence[Held], size: int) -> None:
        self._chunks -= len(held)
        self._add_bytes_locked(size - sum(each.nbytes for each in held))

    def _add_bytes_locked(self, change: int) -> None:
        self.held_bytes += change
        self._has_room.notify_all()

    def _count_down_locked(self, round_: Round, chunks: int) -> None:
        round_.unmerged -= chunks
        if not round_.unmerged and round_ is self._cut:
            self._has_work.notify()

    def _kept_grew_locked(self, *, first: bool) -> None:
        if first and not self._is_stopped:
            self._kept_due = self._clock.monotonic() + self._flush_interval
        if first or self._kept_is_due_locked():
            self._has_work.notify()

    # Out: whoever pushes

    def next_round(self) -> Round | None:
        """Wait for something to hand over; None once `stop` was called."""
        with self._lock:
            while not self._is_stopped:
                if (found := self._due_locked()) is not None:
                    return found
                self._has_work.wait(self._kept_due - self._clock.monotonic() if self._kept.nbytes else None)
            return None

    def due_round(self) -> Round | None:
        """What is to be handed over at this moment; None if nothing is."""
        with self._lock:
            return self._due_locked()

    def _due_locked(self) -> Round | None:
        if self._cut is None and self._gathering.waiting:
            self._cut, self._gathering = self._gathering, Round()
        if self._cut is not None and not self._cut.unmerged:
            whole, self._cut = self._cut, None
            return whole
        if self._kept.nbytes and self._kept_is_due_locked():
            kept, self._kept = self._kept, Round(is_kept=True)
            return kept
        return None

    def _kept_is_due_locked(self) -> bool:
        if self._clock.monotonic() >= self._kept_due:
            return True
        is_much = self._kept.rows >= self._flush_rows or self.held_bytes * 2 > self._max_bytes
        return is_much and not self._is_refusing

    def pushed(self, round_: Round) -> bool:
        """The durable queue has all of the round; True if it had refused the like before."""
        with self._lock:
            self._add_bytes_locked(-round_.nbytes)
            recovered = round_.is_kept and self._is_refusing
            if recovered:
                self._is_refusing = False
            waiting = self._dismiss_locked(round_)
        for request in waiting:
            request.answer(None)
        return recovered

    def refused(self, round_: Round, error: BaseException) -> None:
        """The durable queue has nothing of it. Whoever waits hears of it, and sends again."""
        with self._lock:
            self._add_bytes_locked(-round_.nbytes)
            waiting = self._dismiss_locked(round_)
        for request in waiting:
            request.answer(error)

    def keep(self, round_: Round, partials: Sequence[pa.Table], chunks: Sequence[Chunk] = ()) -> bool:
        """Of what nobody waits for, this much was refused and is to be pushed later; True if it is the first time."""
        with self._lock:
            self._put_back_locked(round_, partials, chunks)
            self._kept_due = self._clock.monotonic() + self._flush_interval
            began, self._is_refusing = not self._is_refusing, True
            return began

    def put_back(self, round_: Round, partials: pa.Table) -> bool:
        """Let partials that merging has made few gather more, if they are not due yet; False if they are."""
        with self._lock:
            held = self.held_bytes - round_.nbytes + partials.nbytes
            is_much = partials.num_rows * 2 > self._flush_rows or held * 2 > self._max_bytes
            if is_much or self._clock.monotonic() >= self._kept_due:
                return False
            self._put_back_locked(round_, [partials])
            return True

    def _put_back_locked(self, round_: Round, partials: Sequence[pa.Table], chunks: Sequence[Chunk] = ()) -> None:
        kept = self._kept
        before = kept.nbytes
        kept.add(partials)
        kept.chunks += chunks
        kept.rows += sum(map(len, chunks))
        kept.nbytes += sum(chunk.nbytes for chunk in chunks)
        self._add_bytes_locked(kept.nbytes - before - round_.nbytes)

    @staticmethod
    def _dismiss_locked(round_: Round) -> list[Request]:
        waiting = list(round_.waiting)
        round_.waiting.clear()
        return waiting

    # The end

    def close(self) -> None:
        """Admit nothing any more; who waits for room is turned away, who is in the doorway gets through."""
        with self._lock:
            self._is_closed = True
            self._has_room.notify_all()
            self._doorway_empty.wait_for(lambda: not self._in_doorway, DOORWAY_GRACE)

    def stop(self) -> None:
        """Let `next_round` return None; what is kept is due from now on."""
        with self._lock:
            self._is_stopped = True
            self._kept_due = 0.0
            self._has_work.notify_all()

    def last_rounds(self) -> list[Round]:
        """Everything that is left, whole or not, once the queue is drained and nobody calls `next_round`."""
        with self._lock:
            left = [round_ for round_ in (self._cut, self._gathering, self._kept) if round_ is not None]
            self._cut, self._gathering, self._kept = None, Round(), Round(is_kept=True)
            return [round_ for round_ in left if round_.waiting or round_.nbytes]
