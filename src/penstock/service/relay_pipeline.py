"""The relay pipeline: pushes each request, decompressed, to the queue of every destination that takes its format."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from penstock.config.destinations import ExporterSection
from penstock.errors import BlockTooLarge, ConfigError, QueueFull
from penstock.export.exporter import Exporter
from penstock.export.send_queue import SendQueue
from penstock.service.doctor import require_extra
from penstock.spool import Durability, FullBehavior

if TYPE_CHECKING:
    from penstock.decode.outcome import Format
    from penstock.export.exporters.otlp_http_exporter import Signal
    from penstock.receive.sink import DoneByPlace

log = logging.getLogger(__name__)
_PUSHERS = 16  # threads that wait for the disk: together they share one sync


def make_stage_exporter(config: ExporterSection, signal: "Signal" = "metrics") -> Exporter:
    """The exporter that a section describes. `signal`: what OTLP bodies are."""
    if config.kind is None:
        raise ConfigError(f"must say what the destination speaks, got {config.type!r}", field="exporter.type")
    if config.kind.extra:
        require_extra(*config.kind.extra)
    return config.kind.make(config, signal)


class RelayPipeline:
    """Hands each request to all destinations of its format: a `RawSink`.

    Loss: none of what `done(None)` was said for, as far as each queue's durability and `full_behavior` say.
    Delivery: at least once. If one destination's queue takes a request and another's refuses it, the answer asks the
        sender to send it again, and the first destination gets it twice.
    Threads: every method may be called from any thread.
    Blocks: never; a push that may block runs on a thread of the pipeline.
    """

    def __init__(self, senders: Mapping[str, tuple[SendQueue, Iterable[str]]]) -> None:
        self._senders: dict[str, list[SendQueue]] = {}
        for sender, formats in senders.values():
            for name in formats:
                self._senders.setdefault(name, []).append(sender)
        waits = any(_may_wait(sender) for sender, _ in senders.values())
        self._pool = ThreadPoolExecutor(_PUSHERS, "penstock-relay") if waits else None

    def takes(self, kind: "Format") -> bool:
        """Whether a destination understands that format."""
        return kind.value in self._senders

    def submit_raw(self, kind: "Format", bodies: Sequence[bytes], done: "DoneByPlace") -> bool:
        """As `RawSink` says: False if the first queue has no room for the first of them."""
        senders = self._senders.get(kind.value, ())
        pushes = [(place, sender, body) for place, body in enumerate(bodies) for sender in senders]
        if self._pool is not None and pushes:
            together = _PushGroup(len(pushes), done)
            for push in pushes:
                self._pool.submit(together.push, *push)
            return True
        errors: dict[int, BaseException] = {}
        for number, (place, sender, body) in enumerate(pushes):
            try:
                sender.push(body)
            except BlockTooLarge as error:
                errors.setdefault(place, error)
            except Exception as error:  # noqa: BLE001 - every failure is answered to the sender
                if number == 0 and isinstance(error, QueueFull):
                    return False
                errors = {**dict.fromkeys(range(place, len(bodies)), error), **errors}  # none passes it
                break
        done(errors or None)
        return True

    def close(self) -> None:
        """Refuse new requests. Pushes under way are answered by their queue."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class _PushGroup:
    """Pushes on several threads with one answer when all are done: the first error of each body, or None."""

    def __init__(self, count: int, done: "DoneByPlace") -> None:
        self._done = done
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._left = count
        self._errors: dict[int, BaseException] = {}

    def push(self, place: int, sender: SendQueue, body: bytes) -> None:
        error: BaseException | None = None
        try:
            sender.push(body)
        except Exception as refused:  # noqa: BLE001 - every failure is answered to the sender
            error = refused
        with self._lock:
            self._left -= 1
            if error is not None:
                self._errors.setdefault(place, error)
            is_last = not self._left
        if is_last:
            self._done(self._errors or None)


def _may_wait(sender: SendQueue) -> bool:
    config = sender.config
    return (
        config.durability is Durability.FSYNC
        or config.full_behavior is FullBehavior.BLOCK
        or not config.always_queue
        or not config.enabled
    )
