"""Requests on their way to an answer: one alone, a group that is decoded together, the parts of it that are not safe.

received request ─► request group ─► pending parts: bodies at the relay, points at L1 ─► an answer to each request
                          └ other processes answer for what they own of it
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.decode.decoder import Decoded
from penstock.decode.outcome import MAX_REASONS, DecodeAnswer, DecodeStatus, Format
from penstock.decode.stream_owners import HandoverBodies
from penstock.errors import BlockTooLarge, PayloadTooLarge, PermanentExportError
from penstock.receive.bodies import Encoding, TooLarge, decompress_body
from penstock.receive.sink import DoneByPlace

Deliver = Callable[[list[tuple[Any, DecodeAnswer]]], None]


@dataclass(slots=True, eq=False)
class ReceivedRequest:
    """A body that waits for its answer: `deliver` is called once, with `reply_to` and the answer, from any thread."""

    kind: Format
    body: bytes
    encoding: Encoding
    max_decompressed: int  # bytes
    reply_to: object
    deliver: Deliver
    sender: str = ""  # its token's name, else its address
    is_from_peer: bool = False  # by another process, which answers the sender
    turns_of: Hashable = None  # with which others it shares its turns: a sender or a connection
    key: str = ""  # the sender's own name for the request: `Idempotency-Key`
    digest: bytes = b""  # by which it is known when it comes again; empty: it is not
    turn: tuple[float, int] = (0.0, 0)  # see `fair_turns`

    def decompressed(self) -> bytes | DecodeAnswer:
        """Returns the body as it was, or the answer to one that cannot be had."""
        try:
            return decompress_body(self.body, self.encoding, self.max_decompressed)
        except TooLarge as error:
            return DecodeAnswer(DecodeStatus.TOO_LARGE, str(error))
        except ValueError as error:
            return DecodeAnswer(DecodeStatus.BAD, str(error))
        except MemoryError:
            return DecodeAnswer(DecodeStatus.BROKEN, "no memory: send it again")


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Requests of one format, what was decoded of them, and what other processes own of them."""

    kind: Format
    requests: Sequence[ReceivedRequest]
    bodies: Sequence[bytes]
    is_relayed: bool
    decoded: Decoded | None = None  # None while it is decoded, and if that failed
    peer_bodies: HandoverBodies = field(default_factory=dict)
    awaited: int = 0  # processes that have not answered for their parts yet
    peer_answers: list[Mapping[int, DecodeAnswer]] = field(default_factory=list)  # but for parts that were simply taken

    @property
    def size(self) -> int:
        return sum(map(len, self.bodies))

    @property
    def readable(self) -> list[int]:
        """The places of the requests that can be read."""
        assert self.decoded is not None
        return [place for place in range(len(self.requests)) if place not in self.decoded.outcomes.errors]

    @property
    def divided(self) -> set[int]:
        """The places of the requests of which other processes own a part."""
        return {place for parts in self.peer_bodies.values() for place in parts}

    @property
    def peer_refusal(self) -> DecodeAnswer | None:
        """Why the group cannot be taken now, if another process has not taken its part."""
        answers = (answer for answers in self.peer_answers for answer in answers.values())
        return next((answer for answer in answers if answer.status in (DecodeStatus.BUSY, DecodeStatus.BROKEN)), None)

    def answers(self, places: Sequence[int]) -> list[tuple[ReceivedRequest, DecodeAnswer]]:
        """Returns the answers to these requests once all of them are safe."""
        return [(self.requests[place], self._answer(place)) for place in places]

    def _answer(self, place: int) -> DecodeAnswer:
        assert self.decoded is not None
        answer = self.decoded.outcomes.answer(place)
        parts = sum(place in parts for parts in self.peer_bodies.values())
        if parts:
            answer = self._joint_answer(place, parts, answer)
        if answer.is_useless and self.is_relayed and not self.requests[place].is_from_peer:
            return replace(answer, is_useless=False)
        return answer

    def _joint_answer(self, place: int, parts: int, own: DecodeAnswer) -> DecodeAnswer:
        assert self.decoded is not None
        others = [answers[place] for answers in self.peer_answers if place in answers]
        for answer in others:
            if answer.status is not DecodeStatus.TAKEN:  # that part can never be taken
                return answer
        every = (own, *others)
        reasons = tuple(dict.fromkeys(reason for answer in every for reason in answer.reasons))[:MAX_REASONS]
        is_useless = sum(answer.is_useless for answer in others) == parts and place not in self.decoded.outcomes.taken
        rejected = sum(answer.rejected for answer in every)
        return DecodeAnswer(DecodeStatus.TAKEN, "; ".join(reasons), rejected, reasons, is_useless)


Finish = Callable[[list[tuple[ReceivedRequest, DecodeAnswer]]], None]


class PendingRequestParts:
    """Counts the parts of a group that are not safe yet; answers all of its requests when the last one is.

    Threads: every method may be called from any thread. `finish` is called exactly once, on the last part's thread.
    """

    def __init__(self, answers: Sequence[tuple[ReceivedRequest, DecodeAnswer]], finish: Finish) -> None:
        self._answers = answers
        self._finish = finish
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._parts = 1  # until `seal`: a part that ends at once must not end the group
        self._refusal: DecodeAnswer | None = None
        self._error: BaseException | None = None
        self._errors: dict[int, BaseException] = {}  # of single requests

    def add(self) -> DoneByPlace:
        """Adds a part; returns what to call when it is safe, or will not be: none of it, or not for some requests."""
        with self._lock:
            self._parts += 1
        return self._end_part

    def refuse_last(self, answer: DecodeAnswer) -> None:
        """Removes the last part, which was not taken: all requests get this answer, whatever becomes of the others."""
        with self._lock:
            self._refusal = answer
            self._parts -= 1

    def seal(self) -> None:
        """Says that there are no more parts to come."""
        self._end_part(None)

    def _end_part(self, error: BaseException | Mapping[int, BaseException] | None) -> None:
        with self._lock:
            if isinstance(error, Mapping):
                self._errors.update(error)
            else:
                self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
        # An error of the whole group goes first: its requests are sent again, and a single error then shows again.
        for_all = _error_answer(self._error) if self._error is not None else self._refusal
        for_one = {place: _error_answer(error) for place, error in self._errors.items()}
        answers = [
            (request, for_all or for_one.get(place, answer)) for place, (request, answer) in enumerate(self._answers)
        ]
        self._finish(answers)


def _error_answer(error: BaseException) -> DecodeAnswer:
    """Returns the answer to an error: only what can never be taken must not be sent again, by the error's type."""
    match error:
        case BlockTooLarge() | PayloadTooLarge():
            return DecodeAnswer(DecodeStatus.TOO_LARGE, f"too large to be handed on: {error}")
        case PermanentExportError():
            return DecodeAnswer(DecodeStatus.BAD, f"the destination will never take it: {error}")
        case _:
            return DecodeAnswer(DecodeStatus.BROKEN, f"{type(error).__name__}: {error}")
