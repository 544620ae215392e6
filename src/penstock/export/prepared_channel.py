"""The bounded channel between preparers and senders. The oldest batch leaves it first, whenever it came in."""

import heapq
import math
import threading

from penstock.export.batch_delivery import Job


class Channel:
    """Holds prepared batches, at most `size` and about `max_bytes` of them, as they were and as they travel.

    Order: lowest sequence first, so a batch that was nacked and prepared again passes the younger ones that wait.
        With `newest_first` the other way round.
    Threads: every method may be called from any thread.
    Blocks: `wait_room` while it is full, `get` while it is empty, for their timeouts.
    """

    def __init__(self, size: int, max_bytes: float = math.inf, *, newest_first: bool = False) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._sign = -1 if newest_first else 1
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._jobs: list[tuple[int, Job]] = []
        self._bytes = 0

    def wait_room(self, timeout: float) -> bool:
        """Whether there is room, within `timeout` seconds. Asked before a batch is leased for it."""
        with self._lock:
            return self._not_full.wait_for(self._has_room_locked, timeout)

    def put(self, job: Job) -> None:
        """Take the batch. Several preparers that saw the same room may exceed the size by one each."""
        with self._lock:
            heapq.heappush(self._jobs, (self._sign * job.lease.sequence, job))
            self._bytes += _size(job)
            self._not_empty.notify()

    def get(self, timeout: float) -> Job | None:
        """The next batch, None if there is none within `timeout` seconds."""
        with self._lock:
            if not self._jobs and not self._not_empty.wait_for(lambda: self._jobs, timeout):
                return None
            job = heapq.heappop(self._jobs)[1]
            self._bytes -= _size(job)
            self._not_full.notify()
            return job

    def drain(self) -> list[Job]:
        """Everything that is in it."""
        with self._lock:
            jobs, self._jobs, self._bytes = [job for _, job in self._jobs], [], 0
            self._not_full.notify_all()
            return jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def _has_room_locked(self) -> bool:
        return len(self._jobs) < self._size and self._bytes < self._max_bytes


def _size(job: Job) -> int:
    return len(job.lease.data) + len(job.prepared.body)
