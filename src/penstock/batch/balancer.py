"""Who drains which partition: assigning partitions to threads by what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

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
