"""What travels between the I/O thread and the workers: deliveries one way, outcomes the other."""

import traceback
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.consume.message import Message, Reject, Retry

if TYPE_CHECKING:
    from penstock.consume.routes import ConsumerRoute


@dataclass(slots=True, eq=False)
class Generation:
    """One life of a consumer's channel. Delivery tags mean nothing beyond it."""

    lost: bool = False  # set by the I/O thread; workers read it to leave alone what the broker sends anew anyway


@dataclass(slots=True, eq=False)
class Delivery:
    """One message as it came over one channel."""

    tag: int
    generation: Generation
    message: Message
    route: "ConsumerRoute"
    received: float
    outcome: "HandlerOutcome | None" = None  # how its last attempt ended; None: it was handled
    retries: int = 0  # made by the worker itself, see `PoolSettings.in_place`


Job = list[Delivery]  # the messages of a batch, or a single one


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
Outcomes = list[HandlerOutcome | None] | None  # one for each message of a job; None: all of them were handled


def handler_argument_of_messages(job: Job) -> Message | list[Message]:
    """What the handler of a job is called with."""
    return [delivery.message for delivery in job] if job[0].route.batch_size else job[0].message


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


def outcomes_of_answer(answer: object, argument: Message | list[Message]) -> Outcomes:
    """What a handler's return value means. A batch handler may answer for each message."""
    if isinstance(answer, Awaitable):  # it would be acknowledged unrun
        if isinstance(answer, Coroutine):
            answer.close()
        raise TypeError("the handler returned a coroutine that is never awaited: declare it with `async def`")
    if answer is None or not isinstance(argument, list):
        return None
    if not isinstance(answer, Sequence) or len(answer) != len(argument):
        raise TypeError(f"a batch handler returns None or one entry for each of its {len(argument)} messages")
    for entry in answer:
        if entry is not None and not isinstance(entry, BaseException):
            raise TypeError(f"a batch handler answers None, Retry or Reject for a message, got {entry!r}")
    return [None if entry is None else outcome_of_error(entry) for entry in answer]


def outcomes_of_failure(error: BaseException, argument: Message | list[Message]) -> Outcomes:
    """A handler that raises has failed at every message that it was called with."""
    return [outcome_of_error(error)] * (len(argument) if isinstance(argument, list) else 1)


def note_outcomes(job: Job, outcomes: Outcomes) -> None:
    """Note how an attempt ended with each of its messages."""
    for place, delivery in enumerate(job):
        delivery.outcome = outcomes[place] if outcomes is not None else None
