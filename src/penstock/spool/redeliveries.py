"""Blocks that were leased and came back: each goes out again at once, or when its delay is over."""

import heapq

from penstock.spool.lease import FrameRef, Lease


class SpoolRedeliveries:
    """The nacked blocks of one queue. Not thread-safe: the queue's lock guards it.

    `held` has every block by its sequence: a Lease where the block is in memory only, else its place in the log.
    """

    def __init__(self) -> None:
        self.held: dict[int, Lease | FrameRef] = {}
        self._due: list[int] = []  # heap of the sequences that may go out
        self._delayed: list[tuple[float, int]] = []  # heap of those that may not yet

    def add(self, sequence: int, held: Lease | FrameRef, due_at: float | None) -> None:
        """Let the block go out again at `due_at`, at once without it."""
        self.held[sequence] = held
        if due_at is None:
            heapq.heappush(self._due, sequence)
        else:
            heapq.heappush(self._delayed, (due_at, sequence))

    def due(self, now: float, *, newest: bool = False) -> int | None:
        """The oldest (or the newest) sequence that may go out at `now`; None if there is none."""
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappush(self._due, heapq.heappop(self._delayed)[1])
        if not self._due:
            return None
        return max(self._due) if newest else self._due[0]

    def next_look(self, deadline: float) -> float:
        """When a block may be due again, whether one comes or not; `deadline` at the latest."""
        due_at = self.next_due_at()
        return deadline if due_at is None else min(due_at, deadline)

    def next_due_at(self) -> float | None:
        """When the next delayed block may go out."""
        return self._delayed[0][0] if self._delayed else None

    def remove(self, sequence: int) -> Lease | FrameRef:
        """Take the block out, due or not."""
        if self._due and self._due[0] == sequence:
            heapq.heappop(self._due)
        elif sequence in self._due:
            self._due.remove(sequence)
            heapq.heapify(self._due)
        else:
            self._delayed = [entry for entry in self._delayed if entry[1] != sequence]
            heapq.heapify(self._delayed)
        return self.held.pop(sequence)
