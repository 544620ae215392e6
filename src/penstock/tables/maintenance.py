"""Keeping tables small: rows of one series and bucket folded into one, what is too old deleted, dead files removed."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from penstock.model.definition import Definitions
from penstock.model.level import Level
from penstock.tables.port import SCHEMAS, TOP_N, Tables
from penstock.telemetry import Sample

log = logging.getLogger(__name__)
STEPS = ("fold", "expire", "vacuum")
HOURS = 24  # until vacuum removes a dead file: a reader that began before the last fold may still be at work


def expire(tables: Tables, keep: Mapping[str, float], defined: Definitions, now: datetime) -> Iterator[tuple[str, int]]:
    """Delete what is older than its metric's lifetime, else its table's (`keep`, seconds); table and rows that went."""
    for name in SCHEMAS:
        own = {} if name == TOP_N else defined.ttls(Level(name))
        gone = sum(tables.expire(name, now - timedelta(seconds=ttl), (metric,)) for metric, ttl in own.items())
        gone += tables.expire(name, now - timedelta(seconds=keep[name]), but_not=tuple(own))
        yield name, gone


class Maintenance:
    """Folds, expires and vacuums on a thread of its own, every so often.

    A step that fails is logged and tried again the next time; the other steps are done all the same.
    """

    def __init__(
        self, tables: Tables, every: float, keep: Mapping[str, float], definitions: Callable[[], Definitions]
    ) -> None:
        self._tables = tables
        self._every = every
        self._keep = keep
        self._definitions = definitions
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-maintenance", daemon=True)
        self._changed = dict.fromkeys(STEPS, 0)  # rows folded away, rows expired, files removed
        self._failures = dict.fromkeys(STEPS, 0)
        self._seconds = 0.0

    def start(self) -> None:
        if self._every:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            self.once(datetime.now(UTC))

    def once(self, now: datetime) -> None:
        began = time.monotonic()
        steps = {"fold": self._fold, "expire": lambda: self._expire(now), "vacuum": lambda: self._tables.vacuum(HOURS)}
        changed = {step: self._try(step, work) for step, work in steps.items()}
        self._seconds = time.monotonic() - began
        log.info(
            "Tables are maintained. folded=%d expired=%d files_removed=%d seconds=%.1f",
            *changed.values(), self._seconds,
        )  # fmt: skip

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_tables_folded_rows_total", self._changed["fold"])
        yield Sample("penstock_tables_expired_rows_total", self._changed["expire"])
        yield Sample("penstock_tables_removed_files_total", self._changed["vacuum"])
        yield Sample("penstock_tables_maintenance_seconds", self._seconds)
        for step, failures in self._failures.items():
            yield Sample("penstock_tables_maintenance_failures_total", failures, (step,))

    def _try(self, step: str, work: Callable[[], int]) -> int:
        try:
            changed = work()
        except Exception as error:  # noqa: BLE001 - of three kinds of tables, each with errors of its own
            self._failures[step] += 1
            log.warning("A step of maintenance failed and waits for the next time. step=%s reason=%s", step, error)
            return 0
        self._changed[step] += changed
        return changed

    def _fold(self) -> int:
        done = [self._tables.compact(name) for name in SCHEMAS]
        return sum(one.rows_before - one.rows_after for one in done)

    def _expire(self, now: datetime) -> int:
        return sum(rows for _, rows in expire(self._tables, self._keep, self._definitions(), now))
