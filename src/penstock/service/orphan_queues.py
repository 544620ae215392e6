"""Orphan queues: they hold acknowledged requests and no process serves them. Found at the start, then drained.

They are left when `processes` is lowered (`queue.2`, `queue.3` …), a queue (`queue.enabled`, `queue.type`) or a
pipeline is switched off, or a destination is taken out of the configuration. A queue whose destination is
still configured is sent there; the others are named in the status until an operator acts.
"""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.clock import Clock, SystemClock
from penstock.config.tree import ServiceConfig
from penstock.errors import PenstockError, QueueError
from penstock.export.send_queue import SendQueue
from penstock.service.queues import (
    SEGMENTS,
    SegmentStageQueue,
    config_for_process,
    open_stage_relay_queue,
    path_for_process,
    stages_are_draining,
    wait_until_stages_drained,
)
from penstock.spool.examine import overview_of_spool
from penstock.telemetry import Telemetry

log = logging.getLogger(__name__)
ORDER_PATIENCE = 10.0  # seconds that receivers wait for old samples of destinations that want them in order
NO_DESTINATION = (
    "its destination is not in the configuration any more, or its pipeline is off. Put it back until the queue is "
    "empty, or send it elsewhere with penstock relay"
)
_LOOK_AGAIN = 0.1  # seconds between two looks whether a queue is empty


@dataclass(frozen=True, slots=True)
class OrphanQueue:
    """A folder with blocks that no process of ours has. `name` is its destination's, None if there is none."""

    path: Path
    blocks: int
    name: str | None = None
    index: int = 0
    is_off: bool = False  # the queue is, not its process

    @property
    def described(self) -> str:
        process = f" of process {self.index}" if self.index or not self.is_off else ""
        why = "switched off (queue.enabled, queue.type)" if self.is_off else "not started any more"
        return f"queue {self.name}{process}, which is {why}, is being drained"


class OrphanQueues:
    """Drains the queues of processes that are not started any more, and those that are switched off.

    Loss: none, and no segment twice: blocks are sealed under the name of the process that took them in.
    Threads: one of its own watches. `start` and `close` once, from one thread; the others from any.
    """

    def __init__(self, config: ServiceConfig, telemetry: Telemetry, *, clock: Clock | None = None) -> None:
        self._config = config
        self._telemetry = telemetry
        self._clock: Clock = clock or SystemClock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="penstock-orphan-queues", daemon=True)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._draining: dict[Path, tuple[OrphanQueue, SendQueue]] = {}
        self._stuck: dict[Path, str] = {}

    def start(self) -> None:
        """Begin to drain the orphan queues. A queue that cannot be opened is named and does not stop the start."""
        for orphan in find_orphan_queues(self._config):
            if orphan.name is None:
                self._give_up(orphan, NO_DESTINATION)
                continue
            try:
                sender = self._open(orphan.name, orphan.index)
            except (PenstockError, OSError) as error:
                self._give_up(orphan, str(error))
                continue
            what = "that is switched off" if orphan.is_off else "of a process that is not started any more"
            text = f"Draining a queue {what}. queue=%s process=%d path=%s blocks=%d"
            log.warning(text, orphan.name, orphan.index, orphan.path, orphan.blocks)
            with self._lock:
                self._draining[orphan.path] = (orphan, sender)
        if self._draining:
            self._watcher.start()

    def _give_up(self, orphan: OrphanQueue, reason: str) -> None:
        log.warning(
            "A queue is left with blocks in it. path=%s blocks=%d reason=%s", orphan.path, orphan.blocks, reason
        )
        with self._lock:
            self._stuck[orphan.path] = f"{orphan.blocks} blocks wait in {orphan.path}: {reason}"

    def _open(self, name: str, index: int) -> SendQueue:
        config = config_for_process(self._config, index)
        process = str(index)
        if name == SEGMENTS:
            segments = SegmentStageQueue.open(config)
            segments.pace.skip_pauses()
            self._telemetry.watch(segments.samples, process=process)
            sender = segments.sender
        else:
            sender = open_stage_relay_queue(config, name, is_orphan=True)
        self._telemetry.watch(sender.samples, queue=name, process=process)
        return sender.start()

    def wait_for_ordered_destinations(self) -> None:
        """Give old samples a head start: a destination that wants them in order would refuse them after new ones."""
        deadline = self._clock.monotonic() + ORDER_PATIENCE
        ordered = [sender for orphan, sender in self._open_queues() if self._is_ordered(orphan)]
        pause = threading.Event()
        while stages_are_draining(ordered) and self._clock.monotonic() < deadline:
            pause.wait(0.01)

    def _is_ordered(self, orphan: OrphanQueue) -> bool:
        section = self._config.relays().get(orphan.name or "")
        return section is not None and section.keeps_order

    def _open_queues(self) -> list[tuple[OrphanQueue, SendQueue]]:
        with self._lock:
            return list(self._draining.values())

    def _watch(self) -> None:
        while (open_queues := self._open_queues()) and not self._closing.wait(_LOOK_AGAIN):
            for orphan, sender in open_queues:
                if not len(sender):
                    self._close_one(orphan, sender, 5.0)

    def _close_one(self, orphan: OrphanQueue, sender: SendQueue, timeout: float) -> str | None:
        """What went wrong, if anything."""
        with self._lock:
            self._draining.pop(orphan.path, None)
        try:
            sender.close(timeout)
        except (PenstockError, OSError) as error:
            log.error("A left queue did not close in good order. path=%s reason=%s", orphan.path, error)
            return f"{orphan.path}: {error}"
        if waiting := len(sender):
            log.warning("A left queue is not empty yet, the next start goes on. path=%s left=%d", orphan.path, waiting)
        else:
            refused = sender.stats().queue.dead_lettered
            log.info("A left queue is drained. path=%s blocks=%d dead_letters=%d", orphan.path, orphan.blocks, refused)
        return None

    def close(self, deadline: float) -> list[str]:
        """Empty them as far as the time allows; what was not done. The next start goes on with what they hold."""
        self._closing.set()
        if self._watcher.ident is not None:
            self._watcher.join(max(0.0, deadline - self._clock.monotonic()))
        late = wait_until_stages_drained(
            {f"{orphan.path}": sender for orphan, sender in self._open_queues()}, deadline, self._clock
        )
        ended = [
            self._close_one(orphan, sender, max(0.0, deadline - self._clock.monotonic()))
            for orphan, sender in self._open_queues()
        ]
        return late + [problem for problem in ended if problem is not None]

    def notes(self) -> list[str]:
        """What is being drained, and what cannot be."""
        with self._lock:
            draining, stuck = list(self._draining.values()), list(self._stuck.values())
        return stuck + [
            f"{orphan.described}: {len(sender)} of {orphan.blocks} blocks are left in {orphan.path}"
            for orphan, sender in draining
        ]


def find_orphan_queues(config: ServiceConfig) -> list[OrphanQueue]:
    """Queues with blocks in them that no process of this configuration opens, each with where it goes."""
    relays = config.relays()
    off = {name for name, one in relays.items() if one.queue.type != "disk" or not one.queue.enabled}
    homes = {SEGMENTS: config.resolved(config.segments.queue.path)} if config.pipelines.rollup else {}
    homes |= {name: config.queue_path(name) for name in relays}
    used = [path for name, path in homes.items() if name not in off]
    served = {Path(path_for_process(path, index)) for path in used for index in range(config.processes)}
    seen: dict[Path, OrphanQueue] = {}
    for name, path in homes.items():
        for index, folder in _folders_of_processes(path):
            is_claimed = folder in seen  # by two queues of which neither is in use: the owner of its blocks is unknown
            seen[folder] = OrphanQueue(folder, 0) if is_claimed else OrphanQueue(folder, 0, name, index, name in off)
    unserved = {config.resolved(config.segments.queue.path), config.resolved(config.exporter.queue.path)}
    for path in (*unserved, *(one for one in _inside(config.resolved(".")) if one.name.startswith("queue-"))):
        for _, folder in _folders_of_processes(path):
            seen.setdefault(folder, OrphanQueue(folder, 0))
    return [
        replace(orphan, blocks=blocks)
        for folder, orphan in sorted(seen.items())
        if folder not in served and (blocks := _blocks_in(folder))
    ]


def _folders_of_processes(path: Path) -> Iterator[tuple[int, Path]]:
    """The folder, and those of other processes beside it."""
    yield 0, path
    prefix = f"{path.name}."
    for other in _inside(path.parent):
        number = other.name.removeprefix(prefix)
        if other.name.startswith(prefix) and number.isascii() and number.isdigit() and str(int(number)) == number:
            yield int(number), other


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # missing or unreadable: opening a queue there reports it


def _blocks_in(folder: Path) -> int:
    try:
        return overview_of_spool(str(folder)).blocks
    except (QueueError, OSError):
        return 0  # no queue, or none that we may look into
