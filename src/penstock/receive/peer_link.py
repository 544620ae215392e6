"""The link to another receiving process: what it was handed over, and what it answers to that."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format
from penstock.receive.peer_wire import handover_message, read_answer, write_to_peer

PATIENCE = 10.0  # seconds for an answer: as long as SDKs wait for ours
_WATCH = 0.25  # seconds between two looks at what is waited for

OnAnswer = Callable[[Mapping[int, DecodeAnswer]], None]


@dataclass(frozen=True, slots=True)
class _Handover:
    """Bodies that were handed over and are not answered yet."""

    places: list[int]
    on_answer: OnAnswer
    size: int
    points: int
    deadline: float

    def answer_all(self, answer: DecodeAnswer) -> None:
        self.on_answer(dict.fromkeys(self.places, answer))


class PeerLink:
    """Hands over to one process; `Peers` says when it is connected.

    Threads: `submit` may be called from any thread, the others on the loop.
    """

    def __init__(self, process: int, loop: asyncio.AbstractEventLoop, max_held: int, clock: Clock) -> None:
        self.process = process
        self._loop = loop
        self._clock = clock
        self._max_held = max_held
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.answers: Counter[DecodeStatus] = Counter()
        self.points = 0
        self.bytes = 0
        self._writer: asyncio.StreamWriter | None = None  # None: not connected
        self._number = 0
        self._unanswered: dict[int, _Handover] = {}
        self._held = 0

    def submit(
        self,
        kind: Format,
        parts: Mapping[int, bytes],
        points: int,
        on_answer: OnAnswer,
        senders: Sequence[str] = (),
    ) -> None:
        """Hands bodies over; `on_answer` is called once, from any thread, with all that was not simply taken."""
        bodies = list(parts.values())
        size = sum(map(len, bodies))
        handover = _Handover(list(parts), on_answer, size, points, self._clock.monotonic() + PATIENCE)
        refusal = None
        with self._lock:
            writer = self._writer
            if writer is None:
                refusal = self._absent()
            elif self._held > 0 and self._held + size > self._max_held:  # one larger than all that may wait goes alone
                refusal = DecodeAnswer(
                    DecodeStatus.BUSY, f"process {self.process} keeps a stream of this and is slow: send it again"
                )
            if refusal is not None:
                self.answers[refusal.status] += len(bodies)
            else:
                self._number += 1
                number = self._number
                self._unanswered[number] = handover
                self._held += size
        if refusal is not None or writer is None:
            handover.answer_all(refusal or self._absent())
            return
        try:
            self._loop.call_soon_threadsafe(write_to_peer, writer, handover_message(number, kind, bodies, senders))
        except RuntimeError:  # the loop has closed
            self.on_lost()

    def _absent(self) -> DecodeAnswer:
        return DecodeAnswer(
            DecodeStatus.BROKEN, f"process {self.process} keeps a stream of this and is not there: send it again"
        )

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def on_connected(self, writer: asyncio.StreamWriter) -> None:
        with self._lock:
            self._writer = writer

    def on_lost(self) -> None:
        """Gives up what is not answered yet: its senders send it again."""
        with self._lock:
            self._writer = None
            given_up, self._unanswered, self._held = list(self._unanswered.values()), {}, 0
            self.answers[DecodeStatus.BROKEN] += sum(len(handover.places) for handover in given_up)
        for handover in given_up:
            handover.answer_all(self._absent())

    async def read_answers(self, reader: asyncio.StreamReader) -> None:
        """Reads answers until the process is gone, or does not answer any more."""
        watch = asyncio.create_task(self._watch(reader))
        try:
            while True:
                number, answers = await read_answer(reader)
                with self._lock:
                    handover = self._unanswered.pop(number, None)
                    if handover is None:
                        raise ValueError(f"an answer to message {number}, which was not sent")
                    self._count_locked(handover, answers)
                handover.on_answer({handover.places[place]: answer for place, answer in answers.items()})
        finally:
            watch.cancel()

    def _count_locked(self, handover: _Handover, answers: Mapping[int, DecodeAnswer]) -> None:
        self._held -= handover.size
        self.answers.update(answer.status for answer in answers.values())
        self.answers[DecodeStatus.TAKEN] += len(handover.places) - len(answers)
        self.bytes += handover.size
        if not any(answer.status in (DecodeStatus.BUSY, DecodeStatus.BROKEN) for answer in answers.values()):
            self.points += handover.points

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        while True:
            await asyncio.sleep(_WATCH)
            with self._lock:
                oldest = next(iter(self._unanswered.values()), None)
            if oldest is not None and self._clock.monotonic() > oldest.deadline:
                reader.set_exception(TimeoutError(f"no answer for {PATIENCE:.0f} s"))
                return
