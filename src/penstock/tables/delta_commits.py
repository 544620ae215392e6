"""Commits to Delta tables, with their guards."""

from collections.abc import Iterable, Mapping
from typing import Any

from deltalake import CommitProperties, DeltaTable, Schema, Transaction

from penstock.tables.delta_log import NO_HOOKS, DeltaLog
from penstock.tables.metrics_table import METRIC_ROWS, METRICS
from penstock.tables.table_rows import SCHEMAS

DELTA_SCHEMAS = SCHEMAS | {METRICS: METRIC_ROWS}


def partitioned_by(name: str) -> list[str]:
    return ["date"] if name in SCHEMAS else []


def commit_actions(table: DeltaTable, name: str, actions: list[Any], guards: list[Transaction]) -> None:
    table.create_write_transaction(
        actions,
        "append",
        Schema.from_arrow(DELTA_SCHEMAS[name]),
        partition_by=partitioned_by(name),
        commit_properties=CommitProperties(app_transactions=guards),
        post_commithook_properties=NO_HOOKS,
    )


class OpenTable:
    """A table that stays open between commits, and the guards that were read or written at its version.

    Opening a table and asking for a guard read Delta's log; a batch that follows on the last does neither. Commits of
    others do no harm: one that shares a guard with ours is refused by the log, any other is passed.
    """

    def __init__(self, name: str, table: DeltaTable, log: DeltaLog) -> None:
        self._name = name
        self._table = table
        self._log = log
        self._held: dict[str, int | None] = {}

    def held(self, applications: Iterable[str]) -> dict[str, int]:
        found = {}
        for application in applications:
            if application not in self._held:
                self._held[application] = self._table.transaction_version(application)
            version = self._held[application]
            if version is not None:
                found[application] = version
        return found

    def commit(self, actions: list[Any], versions: Mapping[str, int]) -> None:
        guards = [Transaction(app_id=application, version=version) for application, version in versions.items()]
        before = self._table.version()
        commit_actions(self._table, self._name, actions, guards)
        self._table.update_incremental()
        if self._table.version() > before + 1:  # another commit came in between: it may have moved any guard
            self._held.clear()
        else:
            self._held.update(versions)
        self.sync()

    def sync(self) -> None:
        """Return when what it holds survives a power cut."""
        self._log.sync(self._table)
