"""Keeping tables small: rows of one series and bucket folded into one, what is too old deleted, dead files removed."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from penstock.model.definition import Definitions
from penstock.model.level import Level
from penstock.tables.port import SCHEMAS, TOP_N, Tables

log = logging.getLogger(__name__)
VACUUM_HOURS = 24  # a reader that began before the last fold may still be at work


def expire(tables: Tables, keep: Mapping[str, float], defined: Definitions, now: datetime) -> Iterator[tuple[str, int]]:
    """Delete what is older than its metric's lifetime, else its table's (`keep`, seconds); table and rows that went."""
    for name in SCHEMAS:
        own = {} if name == TOP_N else defined.ttls(Level(name))
        gone = sum(tables.expire(name, now - timedelta(seconds=ttl), (metric,)) for metric, ttl in own.items())
        gone += tables.expire(name, now - timedelta(seconds=keep[name]), but_not=tuple(own))
        yield name, gone


class Maintenance:
    """Folds, expires and vacuums on a thread of its own, every so often. What fails is tried again the next time."""

    def __init__(
        self, tables: Tables, every: float, keep: Mapping[str, float], definitions: Callable[[], Definitions]
    ) -> None:
        self._tables = tables
        self._every = every
        self._keep = keep
        self._definitions = definitions
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-maintenance", daemon=True)

    def start(self) -> None:
        if self._every:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            try:
                self.once(datetime.now(UTC))
            except Exception as error:  # noqa: BLE001 - of three kinds of tables, each with errors of its own
                log.warning("The tables could not be maintained and wait for the next time. reason=%s", error)

    def once(self, now: datetime) -> None:
        began = time.monotonic()
        before = after = 0
        for name in SCHEMAS:
            done = self._tables.compact(name)
            before, after = before + done.rows_before, after + done.rows_after
        gone = sum(rows for _, rows in expire(self._tables, self._keep, self._definitions(), now))
        removed = self._tables.vacuum(VACUUM_HOURS)
        log.info(
            "Tables are maintained. rows_before=%d rows_after=%d expired=%d files_removed=%d seconds=%.1f",
            before, after, gone, removed, time.monotonic() - began,
        )  # fmt: skip
