"""Which type lives in which partition, and which task drains it. It only ever grows; a type never moves."""

import threading
from collections.abc import Callable, Iterator
from itertools import count

from penstock.batch.config import BatchQueueConfig, Handler, HandlerConsumer
from penstock.batch.drain import DrainTask
from penstock.batch.idle import IdleExclusion
from penstock.batch.partition import Lane, Partition, Registration, Route
from penstock.batch.policies import stable_hash
from penstock.errors import QueueClosed


class PartitionLayout:
    """Partitions, lanes, registrations and owners.

    Even: a type goes to the partition with the least weight, the first of them; so the same registrations in the same
    order give the same layout in every run.
    Threads: every method may be called from any thread.
    """

    def __init__(self, config: BatchQueueConfig, tasks: tuple[DrainTask, ...], partitions: int) -> None:
        selector = config.resolved_selector
        self.tasks = tasks
        self._config = config
        self._spreads = selector.kind != "type_hash" and (partitions > 1 or config.partitions.kind == "adaptive")
        self._key = selector.key
        self._turn = count()
        # The lanes of types whose items all go to one place, and their routes. Written under the lock, read without.
        self.homes: dict[type, Lane] = {}
        self.routes: dict[type, Route] = {}
        # _lock guards everything below, and what partitions, registrations and tasks say is the layout's to write.
        # `partitions` is replaced, never changed, so it may be read without.
        self._lock = threading.Lock()
        self.registrations: dict[type, Registration] = {}
        self.partitions: tuple[Partition, ...] = ()
        self._frozen = False
        self._grow_locked(partitions)
        if config.consumer is not None:
            everything = self._registration_locked(object)
            everything.consume, everything.on_idle = batch_handler_callbacks(config.consumer)
            self._feed_locked(everything)

    # Producers

    def lane_for(self, item: object) -> Lane:
        """Where `item` goes; opens the lane if it is the first of its kind."""
        kind = type(item)
        if not self._spreads:
            return self.homes.get(kind) or self._first_of(kind, None)
        partitions = self.partitions
        number = next(self._turn) if self._key is None else stable_hash(self._key(item))
        partition = partitions[number % len(partitions)]
        return partition.lane_of.get(self._lane_type(kind)) or self._first_of(kind, partition)

    def lane_of_type(self, kind: type) -> Lane | None:
        """Where all items of `kind` go, or None if they go to several places."""
        if self._spreads:
            return None
        return self.homes.get(kind) or self._first_of(kind, None)

    def _lane_type(self, kind: type) -> type:
        return kind if self._config.consumer is None else object

    def _first_of(self, kind: type, partition: Partition | None) -> Lane:
        with self._lock:
            registration = self._registration_locked(self._lane_type(kind))
            if partition is not None:
                return self._open_lane_locked(registration, partition)
            if kind not in self.homes:
                partition = min(self.partitions, key=lambda candidate: candidate.weight)
                partition.weight += registration.weight or 1.0
                lane = self._open_lane_locked(registration, partition)
                self.homes[kind], self.routes[kind] = lane, lane.route
            return self.homes[kind]

    def _feed_locked(self, everything: Registration) -> None:
        """Let every partition feed the one consumer."""
        for partition in self.partitions:
            self._open_lane_locked(everything, partition)

    def _registration_locked(self, kind: type) -> Registration:
        registration = self.registrations.get(kind)
        if registration is None:
            several = self._spreads or self._config.consumer is not None
            registration = self.registrations[kind] = Registration(kind, IdleExclusion() if several else None)
        return registration

    def _open_lane_locked(self, registration: Registration, partition: Partition) -> Lane:
        lane = partition.lane_of.get(registration.type)
        if lane is None:
            lane = Lane(registration, partition)
            registration.lanes.append(lane)
            partition.lanes.append(lane)
            partition.lane_of[registration.type] = lane
            if registration.lanes[0] is lane:
                self._note_idle_handler_locked(registration)
        return lane

    # Handlers

    def register(self, kind: type, handler: Handler, weight: float) -> None:
        """Put `handler` in charge of `kind`, growing the partitions if they are adaptive."""
        with self._lock:
            if self._frozen:
                raise QueueClosed("a closed queue takes no handlers")
            registration = self._registration_locked(kind)
            registration.weight = weight
            registration.consume, registration.on_idle = batch_handler_callbacks(handler)
            registration.unregistered_logged = False
            total = sum(other.weight for other in self.registrations.values() if other.consume is not None)
            wanted = self._config.partitions.resolve(len(self.tasks), total)
            self._grow_locked(wanted)
            if self._spreads and not registration.lanes:
                # Its first lane is where its idle calls come from: not all of them from the same thread.
                home = self.partitions[len(self.registrations) % len(self.partitions)]
                self._open_lane_locked(registration, home)
            self._note_idle_handler_locked(registration)
        if not self._spreads:
            self.homes.get(kind) or self._first_of(kind, None)

    def unregister(self, kind: type) -> bool:
        """Leave `kind` without a handler; its lane and its partition stay."""
        with self._lock:
            registration = self.registrations.get(kind)
            if registration is None or registration.consume is None:
                return False
            registration.consume = registration.on_idle = None
            registration.weight = 0.0
            self._note_idle_handler_locked(registration)
            return True

    def freeze(self) -> int:
        """Let nothing grow any more; how many partitions there are for good."""
        with self._lock:
            self._frozen = True
            return len(self.partitions)

    # Owners

    def _grow_locked(self, wanted: int) -> None:
        for index in range(len(self.partitions), wanted):
            owner = min(self.tasks, key=lambda task: len(task.partitions))
            partition = Partition(index, self._config.buffer_size, self._config.buffer_bytes, owner)
            owner.partitions = (*owner.partitions, partition)
            self.partitions = (*self.partitions, partition)

    def _note_idle_handler_locked(self, registration: Registration) -> None:
        """The `on_idle` of a handler has changed. It is called with the token of the first partition that feeds it."""
        if not registration.lanes:
            return
        partition = registration.lanes[0].partition
        partition.idle_lanes = tuple(
            lane
            for lane in partition.lanes
            if lane.registration.on_idle is not None and lane.registration.lanes[0] is lane
        )
        self._note_idle_partitions_locked(partition.owner)

    def _note_idle_partitions_locked(self, task: DrainTask) -> None:
        slept_for_good = not task.idle_partitions
        task.idle_partitions = tuple(partition for partition in task.partitions if partition.idle_lanes)
        if slept_for_good and task.idle_partitions:
            task.nudge()

    def loads(self, measure: Callable[[Partition], float]) -> tuple[list[float], list[int]]:
        """What `measure` says of every partition, and the index of its owner."""
        with self._lock:
            return [measure(part) for part in self.partitions], [part.owner.index for part in self.partitions]

    def reassign(self, owners: list[int]) -> bool:
        """Give partition p to task `owners[p]`; False if nothing moves."""
        with self._lock:
            # Partitions that came since the owners were computed keep theirs.
            moved = [partition for partition, owner in zip(self.partitions, owners) if partition.owner.index != owner]
            for partition in moved:
                partition.owner = self.tasks[owners[partition.index]]
            if moved:
                self._tell_tasks_locked()
        return bool(moved)

    def _tell_tasks_locked(self) -> None:
        """Tell the tasks which partitions are theirs."""
        for task in self.tasks:
            task.partitions = tuple(partition for partition in self.partitions if partition.owner is task)
            self._note_idle_partitions_locked(task)

    def lanes(self) -> Iterator[Lane]:
        for partition in self.partitions:
            yield from list(partition.lanes)

    def reset(self) -> None:
        """Start over in the child of a fork: the locks and what is held are the parent's."""
        self._lock = threading.Lock()
        for registration in self.registrations.values():
            if registration.exclusion is not None:
                registration.exclusion.reset()
        for partition in self.partitions:
            partition.reset()
        for task in self.tasks:
            task.reset()
        self._tell_tasks_locked()  # the parent may have been moving some


def batch_handler_callbacks(handler: Handler) -> tuple[Callable[..., object], Callable[[], object] | None]:
    """`consume` and, if it does anything, `on_idle` of what was registered."""
    consume: Callable[..., object] = getattr(handler, "consume", handler)  # type: ignore[arg-type]
    on_idle = getattr(handler, "on_idle", None)
    if getattr(type(handler), "on_idle", None) is HandlerConsumer.on_idle:
        on_idle = None  # the inherited one does nothing: no thread needs to wake up for it
    return consume, on_idle
