"""Moving partitions between threads when it is time, by what came since the last time."""

import logging
import math
import threading

from penstock.batch.config import BatchQueueConfig
from penstock.batch.layout import Layout
from penstock.batch.partition import Partition
from penstock.clock import Clock

log = logging.getLogger("penstock.batch")


class Rebalancer:
    """Asks the balancer which task should own which partition, and tells the layout.

    Threads: every method may be called from any thread; one look at a time, a second one does nothing.
    """

    def __init__(self, queue_name: str, config: BatchQueueConfig, layout: Layout, clock: Clock) -> None:
        self._queue_name = queue_name
        self._balancer = config.balancer
        self._interval = config.balance_interval or math.inf
        self._layout = layout
        self._due = clock.monotonic() + self._interval
        # _looking guards everything below.
        self._looking = threading.Lock()
        self._totals: list[float] = []
        self.moves = 0

    def if_due(self, now: float) -> None:
        """Called by the drain threads after a cycle: the first one after the due time looks."""
        if now >= self._due:
            self.look(now)

    def look(self, now: float) -> bool:
        """Have the balancer look at what came since the last time; True if partitions changed threads."""
        if self._balancer is None or not self._looking.acquire(blocking=False):
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
            self._looking.release()

    def reset(self) -> None:
        """Start over: we are the child of a fork."""
        self._looking = threading.Lock()
        self._totals = []
        self.moves = 0


def _items_of(partition: Partition) -> float:
    # Also what is held: batches are large, and counting only what was taken would make a coarse measure.
    return float(sum(partition.counts(lane)[0] for lane in partition.lanes))


def _seconds_of(partition: Partition) -> float:
    return partition.seconds
