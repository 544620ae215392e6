"""Delta tables without a jar: executors write Parquet files into the table's folder, the driver commits them.

    <folder>/minute/data/<label>-<id>/part-….parquet     written by executors, unseen until committed
    <folder>/minute/_delta_log/                          Delta's log, through `deltalake`

The guard is a Delta transaction identifier in the same commit. Two writers with the same guard exclude each other:
the log refuses the second. Compaction, expiry and replacement share one guard of their own for the same reason.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.errors import TableConflict
from penstock.model.level import Level
from penstock.tables.landing import FileLanding, Written, check_visible, stats_of
from penstock.tables.location import local_folder
from penstock.tables.port import (
    SCHEMAS,
    TOP_N,
    Batch,
    Compaction,
    Description,
    as_partials,
    expired,
    folded,
)

MAINTENANCE = "penstock/maintenance"
ATTEMPTS = 10  # each fails only because another commit succeeded first
# A batch every two seconds is 43,000 files of Delta's log a day, and every opening lists them. More than vacuum waits.
LOG_KEPT = "interval 2 days"
COMPACT_BYTES = 256 * 2**20  # of Parquet: what one step reads, merges and writes in memory


class DeltaTables:
    """The tables below one folder."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self.folder = local_folder(location, "tables")
        self.location = str(self.folder)
        self.conflicts = 0
        # _appending guards _opened.
        self._appending = threading.Lock()
        self._opened: dict[str, _OpenTable] = {}

    def path(self, name: str) -> Path:
        return self.folder / name

    def held(self, name: str, applications: Iterable[str]) -> dict[str, int]:
        with self._appending:
            self._opened.pop(name, None)  # a job that begins looks at what is there now
        table = self._open(name)
        return _OpenTable(name, table).held(applications) if table else {}

    def landing(self, label: str) -> FileLanding:
        folders = {name: self.path(name) / "data" / f"{label}-{uuid.uuid4().hex[:8]}" for name in SCHEMAS}
        for folder in folders.values():
            folder.mkdir(parents=True)
        return FileLanding({name: str(folder) for name, folder in folders.items()})

    def append(self, name: str, written: Sequence[Written], batch: Batch) -> bool:
        check_visible(written)
        added = [self._reported(name, file) for file in written]
        with self._appending:
            for _ in range(ATTEMPTS):
                table = self._opened_locked(name)
                if not batch.wanted_by(name, table.held(batch.versions)):
                    return False
                try:
                    table.commit(added, batch.versions)
                except CommitFailedError:
                    self._opened.pop(name, None)
                    self.conflicts += 1
                    continue
                return True
        raise TableConflict(f"table {name!r} changed {ATTEMPTS} times while this batch was being added: try again")

    def replace(
        self,
        name: str,
        written: Sequence[Written],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check_visible(written)
        added = [self._reported(name, file) for file in written]

        def step(table: DeltaTable) -> list[Any]:
            check()  # what is appended after `table` was opened stays beside what is put in
            doomed = (pc.field("bucket") >= start) & (pc.field("bucket") < end)
            kept, removed = self._without(table, name, doomed, end)
            return [*removed, *added, *kept]

        self._maintain(name, step)

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        return as_partials(self._rows(level.value, start, end, metric))

    def top_rows(self) -> pa.Table:
        return self._rows(TOP_N)

    def compact(self, name: str) -> Compaction:
        before = self.describe(name)
        for paths in self._groups(name):
            self._fold(name, paths)
        after = self.describe(name)
        return Compaction(before.rows, after.rows, before.files, after.files)

    def expire(self, name: str, before: datetime, metrics: tuple[str, ...] = (), but_not: tuple[str, ...] = ()) -> int:
        doomed = expired(before, metrics, but_not)
        there = self.describe(name)

        def step(table: DeltaTable) -> list[Any]:
            kept, removed = self._without(table, name, doomed, before)
            return [*removed, *kept]

        if there.oldest is None or there.oldest >= before:
            return 0
        self._maintain(name, step)
        return there.rows - self.describe(name).rows

    def vacuum(self, hours: int) -> int:
        removed = 0
        for name in SCHEMAS:
            table = self._open(name)
            if table:
                gone = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
                removed += len(gone)
                _prune_empty(self.path(name) / "data", time.time() - 3600 * hours)
        return removed

    def describe(self, name: str) -> Description:
        table = self._open(name)
        if not table:
            return Description(0, 0, 0)
        actions = pa.table(table.get_add_actions(flatten=True))
        if not actions.num_rows:
            return Description(0, 0, 0)
        return Description(
            rows=pc.sum(actions["num_records"]).as_py() or 0,
            files=actions.num_rows,
            size_bytes=pc.sum(actions["size_bytes"]).as_py() or 0,
            oldest=pc.min(actions["min.bucket"]).as_py(),
            newest=pc.max(actions["max.bucket"]).as_py(),
        )

    def file_uris(self, name: str) -> list[str]:
        """The files that hold the table now, for any engine that reads Parquet."""
        table = self._open(name)
        return [str(self.path(name) / path) for path in _paths(table)] if table else []

    def _open(self, name: str) -> DeltaTable | None:
        try:
            return DeltaTable(str(self.path(name)))
        except TableNotFoundError:
            return None

    def _create(self, name: str) -> DeltaTable:
        self.path(name).mkdir(parents=True, exist_ok=True)
        schema = Schema.from_arrow(SCHEMAS[name])
        kept = {"delta.logRetentionDuration": LOG_KEPT}
        return DeltaTable.create(str(self.path(name)), schema=schema, mode="ignore", configuration=kept)

    def _rows(
        self, name: str, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        table = self._open(name)
        if not table:
            return SCHEMAS[name].empty_table()
        wanted = None
        for bound in ([pc.field("bucket") >= start] if start else []) + ([pc.field("bucket") < end] if end else []):
            wanted = bound if wanted is None else wanted & bound
        # Not by deltalake's own file system, which is Python: a thread of Arrow's that closes a file through it while
        # the interpreter ends would abort the process.
        dataset = table.to_pyarrow_dataset(filesystem=SubTreeFileSystem(str(self.path(name)), LocalFileSystem()))
        if metric is None:
            rows = dataset.to_table(filter=wanted)
        else:
            # Not in the filter: earlier commits have the range of buckets only, and deltalake takes what a commit does
            # not say for "no value fits". Batch by batch, so that other metrics are never in memory together.
            batches = (batch.filter(pc.equal(batch["metric"], metric)) for batch in dataset.to_batches(filter=wanted))
            rows = pa.Table.from_batches(batches, dataset.schema)
        return rows.select(SCHEMAS[name].names).cast(SCHEMAS[name])

    def _opened_locked(self, name: str) -> "_OpenTable":
        """The table as it was opened last. What others commit is noticed when a commit of ours is refused."""
        if name not in self._opened:
            self._opened[name] = _OpenTable(name, self._open(name) or self._create(name))
        return self._opened[name]

    def _reported(self, name: str, file: Written) -> AddAction:
        path = Path(file.place).relative_to(self.path(name)).as_posix()
        return AddAction(path, file.size_bytes, {}, int(time.time() * 1000), True, file.stats)

    def _without(
        self, table: DeltaTable, name: str, doomed: Any, before: datetime
    ) -> tuple[list[AddAction], list[RemoveAction]]:
        """Adds of new files for what is to stay of every file with doomed rows, and removes of those.

        Nothing at or after `before` is doomed, so the files that begin there need not be looked at.
        """
        added, removed = [], []
        root = self.path(name)
        actions = pa.table(table.get_add_actions(flatten=True))
        for path, oldest in zip(actions["path"].to_pylist(), actions["min.bucket"].to_pylist()):
            if oldest is not None and oldest >= before:
                continue
            rows = pq.read_table(root / path)
            kept = rows.filter(~doomed)
            if kept.num_rows == rows.num_rows:
                continue
            removed.append(_remove_action(path, data_change=True))
            if kept.num_rows:
                added.append(self._put(name, kept, data_change=True))
        return added, removed

    def _put(self, name: str, rows: pa.Table, *, data_change: bool) -> AddAction:
        folder = self.path(name) / "data" / f"folded-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        file = folder / "part-0.parquet"
        pq.write_table(rows.cast(SCHEMAS[name]), file, compression="zstd")
        return _add_action(file, self.path(name), data_change=data_change)

    def _groups(self, name: str) -> Iterable[list[str]]:
        """Files side by side in time, as many as one step may hold. Any grouping is right, this one folds the most."""
        table = self._open(name)
        if not table:
            return
        actions = pa.table(table.get_add_actions(flatten=True)).sort_by([("min.bucket", "ascending")])
        group: list[str] = []
        size = 0
        for path, size_bytes in zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist()):
            if group and size + size_bytes > COMPACT_BYTES:
                if len(group) > 1:
                    yield group
                group, size = [], 0
            group.append(path)
            size += size_bytes
        if len(group) > 1:
            yield group

    def _fold(self, name: str, paths: list[str]) -> None:
        root = self.path(name)
        rows = pa.concat_tables([pq.read_table(root / path).cast(SCHEMAS[name]) for path in paths])
        put = self._put(name, folded(name, rows), data_change=False)

        def step(table: DeltaTable) -> list[Any]:
            if not set(paths) <= set(_paths(table)):
                raise TableConflict(f"table {name!r} was rewritten while it was being compacted: try again")
            return [*(_remove_action(path, data_change=False) for path in paths), put]

        self._maintain(name, step)

    def _maintain(self, name: str, step: Any) -> None:
        """Commit what `step` makes of the table; one maintaining process at a time."""
        for _ in range(ATTEMPTS):
            table = self._open(name)
            if not table:
                return
            turn = Transaction(app_id=MAINTENANCE, version=(table.transaction_version(MAINTENANCE) or 0) + 1)
            actions = step(table)
            try:
                if actions:
                    _commit(table, name, actions, [turn])
            except CommitFailedError:
                continue
            return
        raise TableConflict(f"table {name!r} is being maintained by another process: try again later")


def _commit(table: DeltaTable, name: str, actions: list[Any], guards: list[Transaction]) -> None:
    table.create_write_transaction(
        actions,
        "append",
        Schema.from_arrow(SCHEMAS[name]),
        commit_properties=CommitProperties(app_transactions=guards),
    )


class _OpenTable:
    """A table that stays open between commits, and the guards that were read or written at its version.

    Opening a table and asking for a guard read Delta's log; a batch that follows on the last does neither. Commits of
    others do no harm: one that shares a guard with ours is refused by the log, any other is passed.
    """

    def __init__(self, name: str, table: DeltaTable) -> None:
        self._name = name
        self._table = table
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
        _commit(self._table, self._name, actions, guards)
        self._table.update_incremental()
        if self._table.version() > before + 1:  # another commit came in between: it may have moved any guard
            self._held.clear()
        else:
            self._held.update(versions)


def _paths(table: DeltaTable) -> list[str]:
    found: list[str] = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    return found


def _add_action(file: Path, root: Path, *, data_change: bool) -> AddAction:
    metadata = pq.read_metadata(file)
    path = file.relative_to(root).as_posix()
    stats = json.dumps(stats_of(metadata), allow_nan=False)
    return AddAction(path, file.stat().st_size, {}, int(time.time() * 1000), data_change, stats)


def _remove_action(path: str, *, data_change: bool) -> RemoveAction:
    return RemoveAction(path=path, data_change=data_change, deletion_timestamp=int(time.time() * 1000))


def _prune_empty(folder: Path, before: float) -> None:
    """Remove what vacuum left of folders; a young one may be that of a batch which is being written."""
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.is_dir() and child.stat().st_mtime < before and not any(child.rglob("*.parquet")):
            shutil.rmtree(child)
