"""Sums that have left the range of a double: such a row is written without its sum, counted and logged by name."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.clock import Clock, SystemClock
from penstock.tables.labels import entity_from_table_labels

log = logging.getLogger(__name__)
_QUIET = 60.0  # seconds between two lines


@dataclass(frozen=True, slots=True)
class Overflow:
    """So many rows without a sum, and one of them."""

    rows: int = 0
    example: str = ""

    def __add__(self, other: "Overflow") -> "Overflow":
        return Overflow(self.rows + other.rows, self.example or other.example)


NO_OVERFLOW = Overflow()


def overflow_in(rows: pa.Table) -> Overflow:
    """What rows of a table have overflowed; a top-n has no sums."""
    if "sum" not in rows.column_names or not rows["sum"].null_count:
        return NO_OVERFLOW
    lost = rows.filter(pc.is_null(rows["sum"]))
    (one,) = lost.slice(0, 1).select(["metric", "labels"]).to_pylist()
    return Overflow(lost.num_rows, f"{one['metric']} {entity_from_table_labels(one['labels'])}")


class OverflowLog:
    """Counts rows that are written without their sum; one line a minute names a series.

    Threads: every method may be called from any thread.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.rows = 0
        self._unlogged = 0
        self._logged_at = -_QUIET

    def add(self, found: Iterable[Overflow]) -> None:
        together = sum(found, NO_OVERFLOW)
        if not together.rows:
            return
        now = self._clock.monotonic()
        with self._lock:
            self.rows += together.rows
            self._unlogged += together.rows
            if now - self._logged_at < _QUIET:
                return
            self._logged_at, unlogged, self._unlogged = now, self._unlogged, 0
        log.warning(
            "Sums are too large for a double and left empty; min, max and count are kept. rows=%d series=%s",
            unlogged,
            together.example,
        )
