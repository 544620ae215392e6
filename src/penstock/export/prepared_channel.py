"""The bounded channel between preparers and senders. The oldest batch leaves it first, whenever it came in."""

import heapq
import math
import threading
from typing import NamedTuple

from penstock.export.exporter import Prepared
from penstock.spool import Lease


class PreparedBatch(NamedTuple):
    """A leased batch, in the form in which it travels; None where preparing failed."""

    lease: Lease
    prepared: Prepared | None


class PreparedChannel:
    """Holds prepared batches, at most `size` and about `max_bytes` of them, as they were and as they travel.

    Order: lowest sequence first, so a batch that was nacked and prepared again passes the younger ones that wait.
        With `newest_first` the other way round.
    Threads: every method may be called from any thread.
    Blocks: `wait_for_room` while it is full, `get` while it is empty, for their timeouts.
    """

    def __init__(self, size: int, max_bytes: float = math.inf, *, newest_first: bool = False) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._sign = -1 if newest_first else 1
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._batches: list[tuple[int, PreparedBatch]] = []
        self._bytes = 0

    def wait_for_room(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for room. Returns whether there is; called before a batch is leased."""
        with self._lock:
            return self._not_full.wait_for(self._has_room_locked, timeout)

    def put(self, batch: PreparedBatch) -> None:
        """Take the batch. Several preparers that saw the same room may exceed the size by one each."""
        with self._lock:
            heapq.heappush(self._batches, (self._sign * batch.lease.sequence, batch))
            self._bytes += _size(batch)
            self._not_empty.notify()

    def get(self, timeout: float) -> PreparedBatch | None:
        """Returns the next batch; None if there is none within `timeout` seconds."""
        with self._lock:
            if not self._batches and not self._not_empty.wait_for(lambda: self._batches, timeout):
                return None
            batch = heapq.heappop(self._batches)[1]
            self._bytes -= _size(batch)
            self._not_full.notify()
            return batch

    def drain(self) -> list[PreparedBatch]:
        """Take everything out."""
        with self._lock:
            batches, self._batches, self._bytes = [batch for _, batch in self._batches], [], 0
            self._not_full.notify_all()
            return batches

    def _has_room_locked(self) -> bool:
        return len(self._batches) < self._size and self._bytes < self._max_bytes


def _size(batch: PreparedBatch) -> int:
    return len(batch.lease.data) + (len(batch.prepared.body) if batch.prepared else 0)
