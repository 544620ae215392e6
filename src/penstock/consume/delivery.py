"""What travels between the I/O thread and the workers: deliveries one way, outcomes the other."""

import traceback
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.consume.message import Message, Reject, Retry

if TYPE_CHECKING:
    from penstock.consume.routes import Route


class Generation:
    """One life of a consumer's channel. Delivery tags mean nothing beyond it."""

    __slots__ = ("lost", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lost = False  # set by the I/O thread; workers read it to leave alone what the broker sends anew anyway


class Delivery:
    """One message as it came over one channel."""

    __slots__ = ("generation", "message", "received", "retries", "route", "tag")

    def __init__(self, tag: int, generation: Generation, message: Message, route: "Route", received: float) -> None:
        self.tag = tag
        self.generation = generation
        self.message = message
        self.route = route
        self.received = received
        self.retries = 0  # made by the worker itself, see `in_place`


Job = Delivery | list[Delivery]  # one message, or a batch


class Verdict(Enum):
    """What becomes of a message that was not simply handled."""

    RETURN = auto()  # back to the queue as it was: it was not tried, or the outcome is unknown
    RETRY = auto()
    REJECT = auto()


@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """How a message ended that was not simply handled."""

    verdict: Verdict
    reason: str = ""
    delay: float | None = None
    counted: bool = True
    trace: str = ""  # text, since it may come from another process


RETURNED = HandlerOutcome(Verdict.RETURN)
# None: handled. A list: one outcome for each message of a batch.
Outcomes = HandlerOutcome | list[HandlerOutcome | None] | None


def outcome_of_error(error: BaseException) -> HandlerOutcome:
    """What a handler's exception means. It is the handler's own, and may fail at whatever it is asked."""
    try:
        if isinstance(error, Retry):
            return HandlerOutcome(Verdict.RETRY, _writable(str(error)), error.delay, error.counted)
        if isinstance(error, Reject):
            return HandlerOutcome(Verdict.REJECT, _writable(str(error)))
        reason = _writable(f"{type(error).__name__}: {error}")
    except Exception as trouble:  # noqa: BLE001 - a worker that ends here leaves its message in the air
        reason = f"{type(error).__name__}, which cannot be shown: {type(trouble).__name__}"
    return HandlerOutcome(Verdict.RETRY, reason, trace=_writable("".join(traceback.format_exception(error))))


def _writable(text: str) -> str:
    """The same with half a character spelled out: a dead letter with one could never be published."""
    return text.encode("utf-8", "backslashreplace").decode()


def outcome_of_answer(answer: object) -> Outcomes:
    """What a handler's return value means: that it is done. A coroutine is none, and would be acknowledged unrun."""
    if isinstance(answer, Awaitable):
        if isinstance(answer, Coroutine):
            answer.close()
        raise TypeError("the handler returned a coroutine that is never awaited: declare it with `async def`")
    return None


def outcomes_of_answers(answers: object, size: int) -> Outcomes:
    """What a batch handler's return value means: nothing, or one entry per message."""
    if answers is None:
        return None
    outcome_of_answer(answers)
    if not isinstance(answers, Sequence) or len(answers) != size:
        raise TypeError(f"a batch handler returns None or one entry for each of its {size} messages")
    for entry in answers:
        if entry is not None and not isinstance(entry, BaseException):
            raise TypeError(f"a batch handler answers None, Retry or Reject for a message, got {entry!r}")
    return [None if entry is None else outcome_of_error(entry) for entry in answers]


def outcome_per_delivery(job: list[Delivery], outcomes: Outcomes) -> list[HandlerOutcome | None]:
    """One outcome per delivery of a batch."""
    return outcomes if isinstance(outcomes, list) else [outcomes] * len(job)
