"""Which sequences are done: a low-water mark and the ranges above it, since acks come in any order."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class SpoolSequenceSet:
    """A set of sequences that grows from below and is nearly always one number.

    `low`: everything below it is in the set. Above it lie ranges that do not touch one another.
    """

    __slots__ = ("_ends", "_starts", "low")

    def __init__(self, low: int = 0, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.low = low
        self._starts: list[int] = []
        self._ends: list[int] = []
        for first, end in ranges:
            self.add(first, end)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """What lies above `low`, in order."""
        return list(zip(self._starts, self._ends))

    @property
    def top(self) -> int:
        """The sequence after the highest one in the set."""
        return self._ends[-1] if self._ends else self.low

    def add(self, first: int, end: int) -> int:
        """Put [first, end) into the set; how many were not in it."""
        if end <= first:
            return 0
        if first == self.low and not self._starts:  # nearly always
            self.low = end
            return end - first
        if first <= self.low and not self._starts:
            new = max(0, end - self.low)
            self.low += new
            return new
        new = end - first - self.overlap(first, end)
        if not new:
            return 0
        if first <= self.low:
            self.low = max(self.low, end)
            keep = bisect_right(self._starts, self.low)
            if keep:
                self.low = max(self.low, self._ends[keep - 1])
                del self._starts[:keep], self._ends[:keep]
            return new
        left = bisect_left(self._ends, first)
        right = bisect_right(self._starts, end)
        if left < right:
            first = min(first, self._starts[left])
            end = max(end, self._ends[right - 1])
        self._starts[left:right] = [first]
        self._ends[left:right] = [end]
        return new

    def overlap(self, first: int, end: int) -> int:
        """How many of [first, end) are in the set."""
        total = max(0, min(end, self.low) - first)
        first = max(first, self.low)
        index = bisect_right(self._ends, first)
        while index < len(self._starts) and self._starts[index] < end:
            total += min(end, self._ends[index]) - max(first, self._starts[index])
            index += 1
        return total

    def covers(self, first: int, end: int) -> bool:
        """Whether all of [first, end) are in the set."""
        if end <= self.low or not self._starts:
            return end <= self.low
        return self.overlap(first, end) == end - first

    def __contains__(self, sequence: int) -> bool:
        if sequence < self.low:
            return True
        index = bisect_right(self._starts, sequence)
        return index > 0 and sequence < self._ends[index - 1]
