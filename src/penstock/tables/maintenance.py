"""Keeping tables small: rows of one series and bucket folded into one, what is too old deleted, dead files removed."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

from penstock.errors import TableConflict
from penstock.model.definition import Definitions
from penstock.model.level import Level
from penstock.tables.fold import Run, run_folds_here
from penstock.tables.port import SCHEMAS, TOP_N, Tables
from penstock.telemetry import Sample

log = logging.getLogger(__name__)
STEPS = ("fold", "expire", "vacuum")
HOURS = 24  # until vacuum removes a dead file: a reader that began before the last fold may still be at work


def expire_tables(
    tables: Tables, keep: Mapping[str, float], defined: Definitions, now: datetime
) -> Iterator[tuple[str, int]]:
    """Delete what is older than its metric's lifetime, else its table's (`keep`, seconds); table and rows that went."""
    for name in SCHEMAS:
        yield name, expire_table(tables, name, keep[name], defined, now)


def expire_table(tables: Tables, name: str, keep: float, defined: Definitions, now: datetime) -> int:
    own = defined.record_ttls() if name == TOP_N else defined.ttls(Level(name))
    together: dict[float, list[str]] = defaultdict(list)
    for metric, ttl in own.items():
        together[ttl].append(metric)
    gone = sum(tables.expire(name, now - timedelta(seconds=ttl), tuple(some)) for ttl, some in together.items())
    return gone + tables.expire(name, now - timedelta(seconds=keep), but_not=tuple(own))


class Maintenance:
    """Folds every few minutes, expires and vacuums more seldom, on a thread of its own.

    A step that fails for a table is logged and tried again the next time; the others are done all the same. A table
    that another process maintains at that moment is left to it. `run` runs the tasks of a fold.
    """

    def __init__(
        self,
        tables: Tables,
        every: float,
        keep: Mapping[str, float],
        definitions: Callable[[], Definitions],
        *,
        fold_every: float | None = None,
        run: Run = run_folds_here,
    ) -> None:
        self._tables = tables
        self._every = every
        self._fold_every = every if fold_every is None else fold_every
        self._keep = keep
        self._definitions = definitions
        self._run_tasks = run
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-maintenance", daemon=True)
        self._changed = dict.fromkeys(STEPS, 0)  # rows folded away, rows expired, files removed
        self._failures = dict.fromkeys(STEPS, 0)
        self._seconds = 0.0

    def start(self) -> None:
        if self._every or self._fold_every:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        pauses = {"fold": self._fold_every, "rest": self._every}
        due = {what: time.monotonic() + pause for what, pause in pauses.items() if pause}
        while not self._stopping.wait(max(0.0, min(due.values()) - time.monotonic())):
            for what in [what for what, moment in due.items() if moment <= time.monotonic()]:
                self.fold() if what == "fold" else self.clean_up(datetime.now(UTC))
                due[what] = time.monotonic() + pauses[what]

    def once(self, now: datetime) -> None:
        self.fold()
        self.clean_up(now)

    def fold(self) -> None:
        """Make increments final, table by table."""
        began = time.monotonic()
        folded = sum(self._try("fold", name, partial(self._fold, name)) for name in SCHEMAS)
        self._seconds = time.monotonic() - began
        log.info("Tables are folded. rows=%d seconds=%.1f", folded, self._seconds)

    def clean_up(self, now: datetime) -> None:
        """Delete what is too old, then the files that no reader needs."""
        defined = self._definitions()
        expired = sum(
            self._try("expire", name, partial(expire_table, self._tables, name, self._keep[name], defined, now))
            for name in SCHEMAS
        )
        removed = self._try("vacuum", "all", partial(self._tables.vacuum, HOURS))
        log.info("Tables are cleaned up. expired=%d files_removed=%d", expired, removed)

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_tables_folded_rows_total", self._changed["fold"])
        yield Sample("penstock_tables_expired_rows_total", self._changed["expire"])
        yield Sample("penstock_tables_removed_files_total", self._changed["vacuum"])
        yield Sample("penstock_tables_maintenance_seconds", self._seconds)
        for step, failures in self._failures.items():
            yield Sample("penstock_tables_maintenance_failures_total", failures, (step,))

    def _try(self, step: str, table: str, work: Callable[[], int]) -> int:
        try:
            changed = work()
        except TableConflict as error:
            log.info("A table is left to another process that maintains it. step=%s reason=%s", step, error)
            return 0
        except Exception as error:  # noqa: BLE001 - of three kinds of tables, each with errors of its own
            self._failures[step] += 1
            log.warning(
                "A step of maintenance failed and waits for the next time. step=%s table=%s reason=%s",
                step,
                table,
                error,
            )
            return 0
        self._changed[step] += changed
        return changed

    def _fold(self, name: str) -> int:
        done = self._tables.compact(name, self._run_tasks)
        return done.rows_before - done.rows_after
