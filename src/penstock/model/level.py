"""Levels: how coarse a table's buckets are."""

from enum import Enum


class Level(Enum):
    """Minute, hour and day tables. Each coarser one is a merge of the finer one's rows."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"

    @property
    def minutes(self) -> int:
        """How many minutes one bucket covers."""
        return {"minute": 1, "hour": 60, "day": 1440}[self.value]
