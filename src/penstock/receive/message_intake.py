"""Handlers that submit messages of a broker to the intake: they are acknowledged only when they are safe."""

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
from penstock.receive.request_group import ReceivedRequest

log = logging.getLogger(__name__)

MOST = 64 << 20  # bytes of a message once decompressed
MOST_JSON = 16 << 20  # JSON takes ten times as long to read, while other requests wait
_LOG_EVERY = 60.0  # seconds
PROTOBUF, JSON = ("application/x-protobuf", "application/protobuf"), ("application/json", "")


def into_intake(intake: Intake, kind: Format | None = None, *, most: int = MOST) -> Callable[[Message], None]:
    """Returns a handler that submits each message and waits until it is safe.

    `kind` is the format of the bodies; without it the content type says so: protobuf is OTLP, JSON (or none) is events.
    A message that can never be read, or of which nothing can be taken, is dead-lettered. One for which there is no room
    is tried again for as long as it takes.
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
    """Does the same for batches: all messages are submitted at once, and each is answered for itself."""
    partial_successes = _PartialSuccessLog()

    def handle(messages: Sequence[Message]) -> BatchAnswer:
        futures = [_submit(intake, message, kind, most) for message in messages]
        answers = [future.result() for future in futures]
        partial_successes.log_rejected(answers)
        return [_outcome(answer) for answer in answers]

    return handle


class _PartialSuccessLog:
    """Logs once a minute how many points of taken messages were rejected; `penstock_receive_refused_total` has all.

    Threads: any. Two at once may both write a line, each with its own counts.
    """

    def __init__(self) -> None:
        self._messages = self._points = 0
        self._logged_at = -_LOG_EVERY

    def log_rejected(self, answers: Sequence[Answer]) -> None:
        partly = [
            answer for answer in answers if answer.status is Status.TAKEN and answer.rejected and not answer.is_useless
        ]
        if not partly:
            return
        self._messages += len(partly)
        self._points += sum(answer.rejected for answer in partly)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY:
            messages, points, self._messages, self._points, self._logged_at = self._messages, self._points, 0, 0, now
            log.warning(
                "Messages were taken in part. messages=%d rejected=%d reason=%s", messages, points, partly[-1].message
            )


def _submit(intake: Intake, message: Message, kind: Format | None, most: int) -> "Future[Answer]":
    """Returns the answer to come."""
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
    intake.submit(ReceivedRequest(kind, message.body, encoding, most, future, _deliver))
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
