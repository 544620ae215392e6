"""Handlers that hand messages to the intake: JSON events and OTLP bodies, acknowledged only when they are safe."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.consume.consumer_options import Answer as BatchAnswer
from penstock.consume.into_queue import AGAIN
from penstock.consume.message import Message, Reject, Retry
from penstock.decode.outcome import Answer, Format, Status
from penstock.receive.bodies import Encoding
from penstock.receive.intake import Intake
from penstock.receive.waiting_requests import Request

log = logging.getLogger(__name__)

MOST = 64 << 20  # bytes of a message once decompressed
MOST_JSON = 16 << 20  # which takes ten times as long to read, and others wait meanwhile
_SAY_EVERY = 60.0
PROTOBUF, JSON = ("application/x-protobuf", "application/protobuf"), ("application/json", "")


def into_intake(intake: Intake, kind: Format | None = None, *, most: int = MOST) -> Callable[[Message], None]:
    """A handler that hands each message over and waits until it is safe.

    `kind` is what the bodies are; without it the content type says so: protobuf is OTLP, JSON (or none) is events. What
    can never be read, or has nothing that can be taken, is dead-lettered; what has no room is tried again for as long
    as it takes.
    """
    batch = batches_into_intake(intake, kind, most=most)

    def handle(message: Message) -> None:
        answers = batch([message])
        if answers and answers[0] is not None:
            raise answers[0]

    return handle


def batches_into_intake(
    intake: Intake, kind: Format | None = None, *, most: int = MOST
) -> Callable[[Sequence[Message]], BatchAnswer]:
    """The same for batches: all of them are under way at once, and each is answered for itself."""

    partly = _TakenInPart()

    def handle(messages: Sequence[Message]) -> BatchAnswer:
        futures = [_submitted(intake, message, kind, most) for message in messages]
        answers = [future.result() for future in futures]
        partly.note(answers)
        return [_outcome(answer) for answer in answers]

    return handle


class _TakenInPart:
    """Says once a minute how much of messages that were taken was refused; `penstock_receive_refused_total` has it all.

    Threads: any. Two at once may both say something, and then each says its own.
    """

    def __init__(self) -> None:
        self._messages = self._points = 0
        self._said_at = -_SAY_EVERY

    def note(self, answers: Sequence[Answer]) -> None:
        partly = [
            answer for answer in answers if answer.status is Status.TAKEN and answer.rejected and not answer.is_useless
        ]
        if not partly:
            return
        self._messages += len(partly)
        self._points += sum(answer.rejected for answer in partly)
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY:
            messages, points, self._messages, self._points, self._said_at = self._messages, self._points, 0, 0, now
            log.warning(
                "Messages were taken in part. messages=%d rejected=%d reason=%s", messages, points, partly[-1].message
            )


def _submitted(intake: Intake, message: Message, kind: Format | None, most: int) -> "Future[Answer]":
    """The answer to come."""
    future: Future[Answer] = Future()
    content_type = (message.properties.content_type or "").partition(";")[0].strip().lower()
    if kind is None:
        if content_type not in PROTOBUF + JSON:
            future.set_result(Answer(Status.BAD, f"content type {content_type!r} is neither protobuf nor JSON"))
            return future
        kind = Format.OTLP if content_type in PROTOBUF else Format.EVENTS
    try:
        encoding = Encoding((message.properties.content_encoding or "identity").lower())
    except ValueError as error:
        future.set_result(Answer(Status.BAD, str(error)))
        return future
    if kind in (Format.EVENTS, Format.OTLP_JSON):
        most = min(most, MOST_JSON)
    if not intake.submit(Request(kind, message.body, encoding, most, future, _deliver)):
        future.set_result(Answer(Status.BUSY, "too many requests wait for their answer"))
    return future


def _deliver(answers: list[tuple[Any, Answer]]) -> None:
    for future, answer in answers:
        future.set_result(answer)


def _outcome(answer: Answer) -> Retry | Reject | None:
    match answer.status:
        case Status.TAKEN if not answer.is_useless:
            return None
        case Status.TAKEN | Status.BAD | Status.TOO_LARGE:
            return Reject(answer.message)
        case _:
            return Retry(AGAIN, answer.message, counted=False)
