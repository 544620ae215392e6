"""The RabbitMQ receiver: the consumer pool in front of the intake. Messages are acknowledged only when they are safe.

broker ─► a batch of messages ─► intake ─► answers ─┬─ taken: ack
                                                    ├─ nothing of it can be taken: dead letter, with the reason
                                                    └─ no room, closing: again later, for as long as it takes
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from penstock.broker import Tls
from penstock.consume.consumer_options import Answer as BatchAnswer
from penstock.consume.declarations import Declarations
from penstock.consume.into_queue import RETRY_DELAY
from penstock.consume.message import Message, Reject, Retry
from penstock.consume.registry import ConsumerRegistry
from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format
from penstock.errors import BrokerError
from penstock.receive.bodies import Encoding
from penstock.receive.config import RabbitReceiverConfig
from penstock.receive.intake import Intake
from penstock.receive.request_group import ReceivedRequest
from penstock.telemetry import Buckets, Sample

log = logging.getLogger(__name__)

_STOP = 10.0  # seconds for messages that are begun: they take milliseconds, unless the disk hangs
_MAX_BODY = 64 << 20  # bytes of a message once decompressed
_MAX_JSON = 16 << 20  # JSON takes ten times as long to read, while other requests wait
_LOG_EVERY = 60.0  # seconds
_PROTOBUF, _JSON = ("application/x-protobuf", "application/protobuf"), ("application/json", "")


class RabbitReceiver:
    """Consumes its queues until `close`.

    Loss: none. A message is acknowledged only when the intake has said that it is safe; until then the broker has it.
    Threads: every method may be called from any thread.
    """

    port = 0  # it listens nowhere

    def __init__(self, config: RabbitReceiverConfig, intake: Intake) -> None:
        declarations = Declarations()
        if config.dead_letter_exchange:
            declarations.exchange(config.dead_letter_exchange, passive=True)
        for queue in config.queue:
            declarations.queue(queue, durable=True, passive=not config.declare)
            declarations.consumer(
                queue=queue,
                handler=intake_handler(intake, None if config.format == "auto" else Format(config.format)),
                workers=config.workers,
                prefetch_count=config.prefetch_count,
                exclusive=config.exclusive,
                batch_size=config.batch_size,
                batch_timeout=float(config.batch_timeout),
                dead_letter=config.dead_letter_exchange or None,
            )
        for problem in config.problems():
            raise problem
        tls = None
        if config.tls is not None:
            files = config.tls
            tls = Tls(ca_file=_text(files.ca_file), cert_file=_text(files.cert_file), key_file=_text(files.key_file))
        self._registry = ConsumerRegistry(config.url, declarations, password_file=_text(config.password_file), tls=tls)

    def start(self) -> Self:
        """Consumes; BrokerError if the broker cannot be reached or refuses. A connection lost later is made again."""
        try:
            self._registry.start()
        except BrokerError as error:
            raise BrokerError(f"receivers.amqp cannot consume from {error}") from error
        return self

    def stop_accepting(self) -> None:
        """Gives back messages that were not begun, finishes the others: the intake must still answer."""
        self._registry.stop(_STOP)

    def close(self, timeout: float = 30.0) -> None:
        self._registry.stop(timeout)

    def check_secrets(self) -> None:
        """Nothing to do, as for `reload`."""

    def reload(self) -> None:
        """Nothing to do: password and certificates are read at every connect."""

    def dead_threads(self) -> list[str]:
        """None: its I/O thread begins anew after whatever fails, and a lost connection is made again."""
        return []

    def samples(self) -> Iterable[Sample | Buckets]:
        """For `Telemetry.watch`."""
        return self._registry.samples()


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def intake_handler(intake: Intake, kind: Format | None = None) -> Callable[[Sequence[Message]], BatchAnswer]:
    """Returns a handler that submits a batch of messages and waits until they are safe; each has its own answer.

    `kind` is the format of the bodies; without it the content type says so: protobuf is OTLP, JSON (or none) is events.
    A message that can never be read, or of which nothing can be taken, is dead-lettered. One for which there is no room
    is tried again for as long as it takes.
    """
    partial_successes = _PartialSuccessLog()

    def handle(messages: Sequence[Message]) -> BatchAnswer:
        futures = [_submit(intake, message, kind) for message in messages]
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

    def log_rejected(self, answers: Sequence[DecodeAnswer]) -> None:
        partly = [
            answer
            for answer in answers
            if answer.status is DecodeStatus.TAKEN and answer.rejected and not answer.is_useless
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


def _submit(intake: Intake, message: Message, kind: Format | None) -> "Future[DecodeAnswer]":
    """Returns the answer to come."""
    future: Future[DecodeAnswer] = Future()
    content_type = (message.properties.content_type or "").partition(";")[0].strip().lower()
    if kind is None:
        if content_type not in _PROTOBUF + _JSON:
            future.set_result(
                DecodeAnswer(DecodeStatus.BAD, f"content type {content_type!r} is neither protobuf nor JSON")
            )
            return future
        kind = Format.OTLP if content_type in _PROTOBUF else Format.EVENTS
    try:
        encoding = Encoding((message.properties.content_encoding or "identity").lower())
    except ValueError as error:
        future.set_result(DecodeAnswer(DecodeStatus.BAD, str(error)))
        return future
    sender = message.properties.user_id or message.properties.app_id or "RabbitMQ"
    most = _MAX_JSON if kind in (Format.EVENTS, Format.OTLP_JSON) else _MAX_BODY
    intake.submit(ReceivedRequest(kind, message.body, encoding, most, future, _deliver, sender))
    return future


def _deliver(answers: list[tuple[Any, DecodeAnswer]]) -> None:
    for future, answer in answers:
        future.set_result(answer)


def _outcome(answer: DecodeAnswer) -> Retry | Reject | None:
    match answer.status:
        case DecodeStatus.TAKEN if not answer.is_useless:
            return None
        case DecodeStatus.TAKEN | DecodeStatus.BAD | DecodeStatus.TOO_LARGE:
            return Reject(answer.message)
        case _:
            return Retry(RETRY_DELAY, answer.message, counted=False)
