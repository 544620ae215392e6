"""The send queues of one process, as its configuration describes them: one for each destination, one for segments."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.clock import Clock, SystemClock
from penstock.config.tree import SegmentQueueSection, ServiceConfig
from penstock.errors import PenstockError, QueueLocked
from penstock.export.breaker import CircuitState
from penstock.export.config import SendQueueConfig
from penstock.export.paced_exporter import PacedExporter
from penstock.export.send_queue import SendQueue
from penstock.service.relay_pipeline import make_stage_exporter
from penstock.spool import FastQueue
from penstock.telemetry import Sample

if TYPE_CHECKING:
    from penstock.export.exporters.segment_exporter import SegmentExporter

log = logging.getLogger(__name__)
CLOSING_RESERVE = 0.5  # seconds of the deadline that are kept for closing what was drained
LOCK_PATIENCE = 5.0  # seconds for processes of the last run, which let go within two
T = TypeVar("T")
SEGMENTS = "rollup"  # what the queue before segments is called


def open_stage_relay_queue(config: ServiceConfig, name: str, *, is_orphan: bool = False) -> SendQueue:
    """The queue before that destination, not yet started. `is_orphan`: the one on the disk, though switched off."""
    section = config.relays()[name]
    settings = section.queue
    if is_orphan:
        settings = replace(settings, enabled=True, type="disk")
    elif not settings.enabled:  # nothing is held; what its folder holds from before is an orphan queue
        settings = replace(settings, type="memory", order="fifo")
    if settings.type == "disk":
        settings = replace(settings, path=make_private_folder(config.queue_path(name)))
    return open_stage_queue_when_free(lambda: SendQueue.open(make_stage_exporter(section), settings))


@dataclass(frozen=True, slots=True)
class SegmentStageQueue:
    """The queue before segments, not yet started: what is pushed to `queue` is sealed at the pace of `pace`."""

    sender: SendQueue
    queue: FastQueue
    pace: PacedExporter
    exporter: "SegmentExporter"

    @classmethod
    def open(cls, config: ServiceConfig) -> "SegmentStageQueue":
        from penstock.export.exporters.segment_exporter import (
            SegmentExporter,  # brings pyarrow, which a relay does without
        )

        segments = config.segments
        folder = make_private_folder(config.resolved(segments.location))
        exporter = SegmentExporter(
            folder, writer=segments.writer, max_blocks=segments.max_blocks, max_bytes=segments.max_bytes
        )
        pace = PacedExporter(exporter, float(segments.interval))
        path = make_private_folder(config.resolved(segments.queue.path))
        queue = open_stage_queue_when_free(lambda: FastQueue(path, segments.queue.queue_config()))
        try:
            settings = _send_queue_config(segments.queue)
            sender = open_stage_queue_when_free(lambda: SendQueue(queue, pace, settings, owns_queue=True))
        except BaseException:
            queue.close()
            raise
        return cls(sender, queue, pace, exporter)

    def samples(self) -> Iterator[Sample]:
        """Samples of the exporter; those of the queue come from `sender`."""
        yield from self.exporter.samples()


def _send_queue_config(config: SegmentQueueSection) -> SendQueueConfig:
    return SendQueueConfig(**{one.name: getattr(config, one.name) for one in fields(config)})


def open_stage_queue_when_free(opened: Callable[[], T]) -> T:
    """Open a queue. One that another process holds is waited for: the last run's processes may still be ending.

    QueueLocked, with what can be done about it, if that takes longer than `LOCK_PATIENCE`.
    """
    pause, clock, is_told = threading.Event(), SystemClock(), False
    deadline = clock.monotonic() + LOCK_PATIENCE
    while True:
        try:
            return opened()
        except QueueLocked as error:
            if clock.monotonic() > deadline:
                text = f"{error}; if another penstock runs here, give this one its own --data-dir"
                raise QueueLocked(text) from error
            if not is_told:
                log.warning(
                    "Waiting for a queue that another process holds. seconds=%.0f reason=%s", LOCK_PATIENCE, error
                )
            is_told = True
            pause.wait(0.1)


def wait_until_stages_drained(senders: Mapping[str, SendQueue], deadline: float, clock: Clock) -> list[str]:
    """Wait while the queues empty, until shortly before the deadline; returns what could not be sent in time.

    A destination with an open circuit or in back-off is not waited for: its batches stay for the next start.
    """
    pause = threading.Event()
    while deadline - clock.monotonic() > CLOSING_RESERVE:
        if not stages_are_draining(senders.values()):
            return []
        pause.wait(0.01)
    return [
        f"queue {name} holds {len(sender)} batches, the next start goes on with them"
        for name, sender in senders.items()
        if _queue_is_draining(sender)
    ]


def stages_are_draining(senders: Iterable[SendQueue]) -> bool:
    """Whether any of them has batches and a destination that takes them."""
    return any(_queue_is_draining(sender) for sender in senders)


def _queue_is_draining(sender: SendQueue) -> bool:
    if not len(sender):
        return False
    stats = sender.stats()
    return stats.circuit is CircuitState.CLOSED and not stats.backoff


def config_for_process(config: ServiceConfig, index: int) -> ServiceConfig:
    """The configuration of one of several processes. All but the first have paths with their number."""
    if not index:
        return config
    queue = replace(config.segments.queue, path=path_for_process(config.segments.queue.path, index))
    named = {
        name: replace(one, queue=replace(one.queue, path=path_for_process(_named_path(config, name), index)))
        for name, one in config.exporters.items()
    }
    relay = replace(config.exporter.queue, path=path_for_process(config.exporter.queue.path, index))
    return replace(
        config,
        segments=replace(config.segments, writer=f"{config.segments.writer}.{index}", queue=queue),
        exporter=replace(config.exporter, queue=relay),
        exporters=named,
    )


def _named_path(config: ServiceConfig, name: str) -> str:
    own = str(config.exporters[name].queue.path)
    return own if Path(own) != Path(type(config.exporter.queue)().path) else f"./queue-{name}"


def path_for_process(path: str | Path, index: int) -> str:
    """The folder of that process: `queue`, `queue.1`, `queue.2` …"""
    return f"{str(path).rstrip('/')}.{index}" if index else str(path)


def make_private_folder(folder: Path) -> Path:
    """Make the folder if it is missing, readable by its owner only; returns it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise PenstockError(f"{folder}: {error.strerror}; name a folder that is yours with data_dir") from error
    return folder
