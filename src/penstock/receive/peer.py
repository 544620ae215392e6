"""Another receiving process: what it is handed, and what it says to that."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.decode.outcome import Answer, Format, Status
from penstock.receive.peer_wire import message, read_answer, write

PATIENCE = 10.0  # seconds for an answer: as long as SDKs wait for ours
_WATCH = 0.25  # seconds between two looks at what is waited for

Heard = Callable[[Mapping[int, Answer]], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What was handed over and is not answered yet."""

    places: list[int]
    heard: Heard
    size: int
    points: int
    deadline: float

    def told(self, answer: Answer) -> None:
        self.heard(dict.fromkeys(self.places, answer))


class Peer:
    """One of the others, as seen by who hands over to it; whoever connects says when it is there and when not.

    Threads: `submit` may be called from any thread, the others on the loop.
    """

    def __init__(self, home: int, loop: asyncio.AbstractEventLoop, max_held: int, clock: Clock) -> None:
        self.home = home
        self._loop = loop
        self._clock = clock
        self._max_held = max_held
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.answers: Counter[Status] = Counter()
        self.points = 0
        self.bytes = 0
        self._writer: asyncio.StreamWriter | None = None  # None: it is not there
        self._number = 0
        self._waiting: dict[int, _Waiting] = {}
        self._held = 0

    def submit(self, kind: Format, parts: Mapping[int, bytes], points: int, heard: Heard) -> None:
        """Hand it bodies; `heard` is called once, from any thread, with what was not simply taken."""
        bodies = list(parts.values())
        size = sum(map(len, bodies))
        deadline = self._clock.monotonic() + PATIENCE
        waiting = _Waiting(list(parts), heard, size, points, deadline)
        with self._lock:
            # A part that is larger than all that may wait goes alone: it would be refused for ever.
            writer, is_full = self._writer, self._held > 0 and self._held + size > self._max_held
            if writer is not None and not is_full:
                self._number += 1
                number = self._number
                self._waiting[number] = waiting
                self._held += size
            else:
                self.answers[Status.BROKEN if writer is None else Status.BUSY] += len(bodies)
        if writer is None or is_full:
            waiting.told(self._absent() if writer is None else self._full())
            return
        try:
            self._loop.call_soon_threadsafe(write, writer, message(number, kind, bodies))
        except RuntimeError:  # closed meanwhile
            self.lost()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def connected(self, writer: asyncio.StreamWriter) -> None:
        with self._lock:
            self._writer = writer

    def lost(self) -> None:
        """Nobody answers for what it was handed: its senders come again."""
        with self._lock:
            self._writer = None
            given_up, self._waiting, self._held = list(self._waiting.values()), {}, 0
            self.answers[Status.BROKEN] += sum(len(waiting.places) for waiting in given_up)
        for waiting in given_up:
            waiting.told(self._absent())

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Hear its answers until it is gone, or does not answer any more."""
        watch = asyncio.create_task(self._watch(reader))
        try:
            while True:
                number, answers = await read_answer(reader)
                with self._lock:
                    waiting = self._waiting.pop(number, None)
                    if waiting is None:
                        raise ValueError(f"an answer to {number}, which nobody asked")
                    self._count_locked(waiting, answers)
                waiting.heard({waiting.places[place]: answer for place, answer in answers.items()})
        finally:
            watch.cancel()

    def _count_locked(self, waiting: _Waiting, answers: Mapping[int, Answer]) -> None:
        self._held -= waiting.size
        self.answers.update(answer.status for answer in answers.values())
        self.answers[Status.TAKEN] += len(waiting.places) - len(answers)
        self.bytes += waiting.size
        if not any(answer.status in (Status.BUSY, Status.BROKEN) for answer in answers.values()):
            self.points += waiting.points

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        while True:
            await asyncio.sleep(_WATCH)
            with self._lock:
                oldest = next(iter(self._waiting.values()), None)
            if oldest is not None and self._clock.monotonic() > oldest.deadline:
                reader.set_exception(TimeoutError(f"no answer for {PATIENCE:.0f} s"))
                return

    def _absent(self) -> Answer:
        return Answer(Status.BROKEN, f"process {self.home} keeps a stream of this and is not there: send it again")

    def _full(self) -> Answer:
        return Answer(Status.BUSY, f"process {self.home} keeps a stream of this and is slow: send it again")
