"""Which thread drains which partition: partitions move between threads by what they cost."""

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from penstock.clock import Clock

if TYPE_CHECKING:
    from penstock.batch.config import BatchQueueConfig
    from penstock.batch.layout import PartitionLayout
    from penstock.batch.partition import Partition

log = logging.getLogger("penstock.batch")

SKIP_BELOW = 1.15  # back-pressure compresses the observed loads: below this ratio moving costs more than it brings


@dataclass(frozen=True, slots=True)
class DrainBalancer:
    """Gives the heaviest partition to the least loaded thread, then the next (longest processing time first).

    Subclass it and override `assign` for another way.
    """

    measure: Literal["items", "seconds"]

    @classmethod
    def throughput_weighted(cls) -> Self:
        """By how many items came: right where an item of one type costs as much as one of another."""
        return cls("items")

    @classmethod
    def cost_weighted(cls) -> Self:
        """By how long the handlers took: right where types differ in cost."""
        return cls("seconds")

    def assign(self, loads: Sequence[float], owners: Sequence[int], tasks: int) -> list[int] | None:
        """The new owner of every partition, or None to leave all as it is.

        `loads[p]` is what partition p brought since the last time, `owners[p]` the index of the task that drains it.
        """
        if tasks < 2:
            return None
        current = [0.0] * tasks
        for load, owner in zip(loads, owners, strict=True):
            current[owner] += load
        heaviest, lightest = max(current), min(current)
        if heaviest == 0 or (lightest > 0 and heaviest / lightest < SKIP_BELOW):
            return None
        assigned = list(owners)  # a partition without load stays where it is
        totals = [0.0] * tasks
        for index in sorted((i for i, load in enumerate(loads) if load > 0), key=lambda i: -loads[i]):
            # Among equals the present owner: a move that gains nothing is not made.
            chosen = min(range(tasks), key=lambda task: (totals[task], task != owners[index], task))
            assigned[index] = chosen
            totals[chosen] += loads[index]
        return None if assigned == list(owners) else assigned


class Rebalancer:
    """Asks the balancer which task should own which partition, and tells the layout.

    Threads: every method may be called from any thread; one look at a time, a second one does nothing.
    """

    def __init__(self, queue_name: str, config: "BatchQueueConfig", layout: "PartitionLayout", clock: Clock) -> None:
        self._queue_name = queue_name
        self._balancer = config.balancer
        self._interval = config.balance_interval or math.inf
        self._layout = layout
        self._due = clock.monotonic() + self._interval
        # _busy guards everything below.
        self._busy = threading.Lock()
        self._totals: list[float] = []
        self.moves = 0

    def rebalance_if_due(self, now: float) -> None:
        """Called by the drain threads after a cycle: the first one after the due time looks."""
        if now >= self._due:
            self.rebalance(now)

    def rebalance(self, now: float) -> bool:
        """Have the balancer look at what came since the last time; True if partitions changed threads."""
        if self._balancer is None or not self._busy.acquire(blocking=False):
            return False
        try:
            self._due = now + self._interval
            measure = _items_of if self._balancer.measure == "items" else _seconds_of
            totals, owners = self._layout.loads(measure)
            before = self._totals + [0.0] * (len(totals) - len(self._totals))
            self._totals = totals
            loads = [total - was for total, was in zip(totals, before)]
            assigned = self._balancer.assign(loads, owners, len(self._layout.tasks))
            moved = assigned is not None and self._layout.reassign(assigned)
            self.moves += moved
            return moved
        except Exception:
            log.exception("Balancer failed. queue=%s", self._queue_name)
            return False
        finally:
            self._busy.release()

    def reset(self) -> None:
        """Start over in the child of a fork."""
        self._busy = threading.Lock()
        self._totals = []
        self.moves = 0


def _items_of(partition: "Partition") -> float:
    # Also what is held: batches are large, and counting only what was taken would make a coarse measure.
    return float(sum(partition.counts(lane)[0] for lane in partition.lanes))


def _seconds_of(partition: "Partition") -> float:
    return partition.seconds
