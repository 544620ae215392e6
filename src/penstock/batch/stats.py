"""What a queue says of itself: a frozen snapshot, computed when asked for and never on the way of an item."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.batch.drain import SIZE_CLASSES
from penstock.batch.layout import PartitionLayout
from penstock.telemetry import Sample


def _percentage(used: float, capacity: float) -> float:
    return 100.0 * used / capacity


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """One partition."""

    index: int
    owner: int
    used: int
    capacity: int
    used_bytes: int
    byte_capacity: int | None

    @property
    def used_percentage(self) -> float:
        """0 to 100: of the items or of the bytes, whichever is closer to its bound."""
        by_items = _percentage(self.used, self.capacity)
        return (
            by_items if self.byte_capacity is None else max(by_items, _percentage(self.used_bytes, self.byte_capacity))
        )


@dataclass(frozen=True, slots=True)
class TypeStats:
    """One type; everything under `object` where one consumer takes all types.

    produced = consumed + errors + unregistered + what is held or being handled.
    """

    produced: int = 0
    """Answered True."""
    consumed: int = 0
    dropped: int = 0
    """Answered False: no room, or the queue was closed."""
    errors: int = 0
    """In a batch that the handler failed on, or that was still held when `close` gave up."""
    unregistered: int = 0
    """Drained without a handler for them."""


@dataclass(frozen=True, slots=True)
class BatchQueueStats:
    """A queue at one moment. Each number is exact for its moment; they are read one after the other."""

    name: str
    partitions: tuple[PartitionStats, ...]
    types: Mapping[type, TypeStats]
    thread_items: tuple[int, ...]
    """Items drained by each thread (or by the one task of a queue on a shared scheduler)."""
    thread_seconds: tuple[float, ...]
    """Seconds that each thread spent in handlers."""
    batches_by_size: Mapping[str, int]
    """Batches of up to "1", "10", … items, and of "more"."""
    rebalances: int

    @property
    def total_used(self) -> int:
        return sum(partition.used for partition in self.partitions)

    @property
    def total_capacity(self) -> int:
        return sum(partition.capacity for partition in self.partitions)

    @property
    def total_used_percentage(self) -> float:
        """0 to 100."""
        return _percentage(self.total_used, self.total_capacity)

    def top_n(self, n: int) -> tuple[PartitionStats, ...]:
        """The `n` fullest partitions, the fullest first."""
        return tuple(sorted(self.partitions, key=lambda partition: (-partition.used, partition.index))[:n])

    @property
    def batches(self) -> int:
        return sum(self.batches_by_size.values())

    def samples(self) -> Iterator[Sample]:
        """The same as metrics."""
        name = self.name
        fullest = max(partition.used_percentage for partition in self.partitions)
        yield Sample("penstock_batch_queue_used", self.total_used, (name,))
        yield Sample("penstock_batch_queue_capacity", self.total_capacity, (name,))
        yield Sample("penstock_batch_queue_used_percentage", self.total_used_percentage, (name,))
        yield Sample("penstock_batch_queue_fullest_partition_percentage", fullest, (name,))
        yield Sample("penstock_batch_queue_used_bytes", sum(part.used_bytes for part in self.partitions), (name,))
        yield Sample("penstock_batch_queue_partitions", len(self.partitions), (name,))
        yield Sample("penstock_batch_queue_rebalances_total", self.rebalances, (name,))
        for size, count in self.batches_by_size.items():
            yield Sample("penstock_batch_queue_batches_total", count, (name, size))
        for index, (items, seconds) in enumerate(zip(self.thread_items, self.thread_seconds)):
            yield Sample("penstock_batch_queue_thread_items_total", items, (name, str(index)))
            yield Sample("penstock_batch_queue_thread_busy_seconds_total", seconds, (name, str(index)))
        for type_, counts in self.types.items():
            labels = (name, type_.__qualname__)
            yield Sample("penstock_batch_queue_produced_total", counts.produced, labels)
            yield Sample("penstock_batch_queue_consumed_total", counts.consumed, labels)
            yield Sample("penstock_batch_queue_dropped_total", counts.dropped, labels)
            yield Sample("penstock_batch_queue_errors_total", counts.errors, labels)
            yield Sample("penstock_batch_queue_unregistered_total", counts.unregistered, labels)


SIZE_NAMES = (*(str(bound) for bound in SIZE_CLASSES), "more")


def batch_queue_snapshot(name: str, layout: PartitionLayout, rebalances: int) -> BatchQueueStats:
    """Read everything, one lock at a time."""
    partitions = []
    for partition in layout.partitions:
        used, used_bytes = partition.used()
        partitions.append(
            PartitionStats(
                partition.index, partition.owner.index, used, partition.capacity, used_bytes, partition.byte_capacity
            )
        )
    types: dict[type, TypeStats] = {}
    for lane in layout.lanes():
        produced, dropped = lane.partition.counts(lane)
        kind = lane.registration.type
        so_far = types.get(kind, TypeStats())
        types[kind] = TypeStats(
            produced=so_far.produced + produced,
            consumed=so_far.consumed + lane.consumed,
            dropped=so_far.dropped + dropped,
            errors=so_far.errors + lane.errors + lane.abandoned,
            unregistered=so_far.unregistered + lane.unregistered,
        )
    return BatchQueueStats(
        name=name,
        partitions=tuple(partitions),
        types=types,
        thread_items=tuple(task.drained for task in layout.tasks),
        thread_seconds=tuple(task.seconds for task in layout.tasks),
        batches_by_size={
            size: sum(task.batches[index] for task in layout.tasks) for index, size in enumerate(SIZE_NAMES)
        },
        rebalances=rebalances,
    )
