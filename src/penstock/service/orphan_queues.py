"""Queues that hold what was answered for and that nobody serves: found at the start, drained beside the others.

They are left when `processes` is lowered (`queue.2`, `queue.3` …), a queue (`queue.enabled`, `queue.type`) or a
pipeline is switched off, or a destination is taken out of the configuration. What still has somewhere to go is brought
there, the rest is named until somebody sees to it.
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
from penstock.service.queues import SEGMENTS, SegmentQueue, are_emptying, beside, drained, for_process, relay_queue
from penstock.spool.examine import overview
from penstock.telemetry import Telemetry

log = logging.getLogger(__name__)
ORDER_PATIENCE = 10.0  # seconds that receivers wait for old samples of destinations that want them in order
NO_DESTINATION = (
    "its destination is not in the configuration any more, or its pipeline is off. Put it back until the queue is "
    "empty, or send it elsewhere with penstock relay"
)
_LOOK_AGAIN = 0.1  # seconds between two looks whether a queue is empty


@dataclass(frozen=True, slots=True)
class LeftQueue:
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


class LeftQueues:
    """Drains the queues of processes that are not started any more, and those that are switched off.

    Loss: none, and no segment twice: blocks are sealed under the name of the process that took them in.
    Threads: one of its own watches. `start` and `close` once, from one thread; the others from any.
    """

    def __init__(self, config: ServiceConfig, telemetry: Telemetry, *, clock: Clock | None = None) -> None:
        self._config = config
        self._telemetry = telemetry
        self._clock: Clock = clock or SystemClock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="penstock-left-queues", daemon=True)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._draining: dict[Path, tuple[LeftQueue, SendQueue]] = {}
        self._stuck: dict[Path, str] = {}

    def start(self) -> None:
        """Begin to drain what was left. A queue that cannot be opened is named and keeps nobody from starting."""
        for left in find(self._config):
            if left.name is None:
                self._give_up(left, NO_DESTINATION)
                continue
            try:
                sender = self._open(left.name, left.index)
            except (PenstockError, OSError) as error:
                self._give_up(left, str(error))
                continue
            what = "that is switched off" if left.is_off else "of a process that is not started any more"
            text = f"Draining a queue {what}. queue=%s process=%d path=%s blocks=%d"
            log.warning(text, left.name, left.index, left.path, left.blocks)
            with self._lock:
                self._draining[left.path] = (left, sender)
        if self._draining:
            self._watcher.start()

    def _give_up(self, left: LeftQueue, reason: str) -> None:
        log.warning("A queue is left with blocks in it. path=%s blocks=%d reason=%s", left.path, left.blocks, reason)
        with self._lock:
            self._stuck[left.path] = f"{left.blocks} blocks wait in {left.path}: {reason}"

    def _open(self, name: str, index: int) -> SendQueue:
        config = for_process(self._config, index)
        process = str(index)
        if name == SEGMENTS:
            segments = SegmentQueue.open(config)
            segments.pace.hurry()  # they have waited long enough
            self._telemetry.watch(segments.samples, process=process)
            sender = segments.sender
        else:
            sender = relay_queue(config, name, is_left=True)
        self._telemetry.watch(sender.samples, queue=name, process=process)
        return sender.start()

    def wait_for_order(self) -> None:
        """Give old samples a head start: a destination that wants them in order would refuse them after new ones."""
        deadline = self._clock.monotonic() + ORDER_PATIENCE
        ordered = [sender for left, sender in self._open_ones() if self._is_ordered(left)]
        pause = threading.Event()
        while are_emptying(ordered) and self._clock.monotonic() < deadline:
            pause.wait(0.01)

    def _is_ordered(self, left: LeftQueue) -> bool:
        section = self._config.relays().get(left.name or "")
        return section is not None and section.keeps_order

    def _open_ones(self) -> list[tuple[LeftQueue, SendQueue]]:
        with self._lock:
            return list(self._draining.values())

    def _watch(self) -> None:
        while (open_ones := self._open_ones()) and not self._closing.wait(_LOOK_AGAIN):
            for left, sender in open_ones:
                if not len(sender):
                    self._close_one(left, sender, 5.0)

    def _close_one(self, left: LeftQueue, sender: SendQueue, timeout: float) -> str | None:
        """What went wrong, if anything."""
        with self._lock:
            self._draining.pop(left.path, None)
        try:
            sender.close(timeout)
        except (PenstockError, OSError) as error:
            log.error("A left queue did not close in good order. path=%s reason=%s", left.path, error)
            return f"{left.path}: {error}"
        if waiting := len(sender):
            log.warning("A left queue is not empty yet, the next start goes on. path=%s left=%d", left.path, waiting)
        else:
            refused = sender.stats().queue.dead_lettered
            log.info("A left queue is drained. path=%s blocks=%d dead_letters=%d", left.path, left.blocks, refused)
        return None

    def close(self, deadline: float) -> list[str]:
        """Empty them as far as the time allows; what was not done. The next start goes on with what they hold."""
        self._closing.set()
        if self._watcher.ident is not None:
            self._watcher.join(max(0.0, deadline - self._clock.monotonic()))
        late = drained({f"{left.path}": sender for left, sender in self._open_ones()}, deadline, self._clock)
        ended = [
            self._close_one(left, sender, max(0.0, deadline - self._clock.monotonic()))
            for left, sender in self._open_ones()
        ]
        return late + [problem for problem in ended if problem is not None]

    def notes(self) -> list[str]:
        """What is being drained, and what cannot be."""
        with self._lock:
            draining, stuck = list(self._draining.values()), list(self._stuck.values())
        return stuck + [
            f"{left.described}: {len(sender)} of {left.blocks} blocks are left in {left.path}"
            for left, sender in draining
        ]


def find(config: ServiceConfig) -> list[LeftQueue]:
    """Queues with blocks in them that no process of this configuration opens, each with where it goes."""
    relays = config.relays()
    off = {name for name, one in relays.items() if one.queue.type != "disk" or not one.queue.enabled}
    homes = {SEGMENTS: config.resolved(config.segments.queue.path)} if config.pipelines.rollup else {}
    homes |= {name: config.queue_path(name) for name in relays}
    used = [path for name, path in homes.items() if name not in off]
    served = {Path(beside(path, index)) for path in used for index in range(config.processes)}
    seen: dict[Path, LeftQueue] = {}
    for name, path in homes.items():
        for index, folder in _siblings(path):
            is_claimed = folder in seen  # twice, by queues of which neither is in use: nobody knows whose blocks it has
            seen[folder] = LeftQueue(folder, 0) if is_claimed else LeftQueue(folder, 0, name, index, name in off)
    unserved = {config.resolved(config.segments.queue.path), config.resolved(config.exporter.queue.path)}
    for path in (*unserved, *(one for one in _inside(config.resolved(".")) if one.name.startswith("queue-"))):
        for _, folder in _siblings(path):
            seen.setdefault(folder, LeftQueue(folder, 0))
    return [
        replace(left, blocks=blocks)
        for folder, left in sorted(seen.items())
        if folder not in served and (blocks := _blocks_in(folder))
    ]


def _siblings(path: Path) -> Iterator[tuple[int, Path]]:
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
        return []  # it is not there, or not ours to look into: whoever opens a queue there says so


def _blocks_in(folder: Path) -> int:
    try:
        return overview(str(folder)).blocks
    except (QueueError, OSError):
        return 0  # no queue, or none that we may look into
