"""Delta tables without a jar: executors write Parquet files into the table's folder, the driver commits them.

    <folder>/minute/data/<label>-<id>/date=2026-11-18/part-….parquet     increments of a batch, unseen until committed
    <folder>/minute/data/final-<id>/date=2026-11-18/part-….parquet       final rows
    <folder>/minute/_delta_log/                                          Delta's log, through `deltalake`

Tables are partitioned by date; `penstock.format` among a table's properties names its layout.

The guard is a Delta transaction identifier in the same commit. Two writers with the same guard exclude each other:
the log refuses the second. Compaction, expiry and replacement share one guard of their own for the same reason.
"""

import operator
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.errors import TableBusy, TableConflict
from penstock.model.level import Level
from penstock.tables.fold import Run, TableFile, TableFold, checked_fold_reports, plan_folds, run_folds_here
from penstock.tables.landing import TableFileLanding, WrittenTableFile, check_landed_files
from penstock.tables.location import local_tables_folder
from penstock.tables.port import TableBatch, TableCompaction, TableDescription, expired_table_rows
from penstock.tables.pruning import metrics_in_table_file, pruned_table_file
from penstock.tables.table_rows import FORMAT, SCHEMAS, TOP_N, check_format, table_partials, table_records

MAINTENANCE = "penstock/maintenance"
ATTEMPTS = 10  # each fails only because another commit succeeded first
# A batch every two seconds is 43,000 files of Delta's log a day, and every opening lists them. More than vacuum waits.
LOG_KEPT = "interval 2 days"
PARTITIONED_BY = ["date"]
FORMAT_KEY = "penstock.format"
FINAL = "final"  # how the folder of a file with final rows is called


class DeltaTables:
    """The tables below one folder."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self.folder = local_tables_folder(location, "tables")
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

    def landing(self, label: str) -> TableFileLanding:
        return TableFileLanding({name: str(self._new_folder(name, label)) for name in SCHEMAS})

    def append(self, name: str, written: Sequence[WrittenTableFile], batch: TableBatch) -> bool:
        check_landed_files(written)
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
        raise TableBusy(f"table {name!r} changed {ATTEMPTS} times while this batch was being added: try again")

    def adopt(self, name: str, written: Sequence[WrittenTableFile], versions: Mapping[str, int]) -> None:
        """Begin a table with these rows and guards."""
        check_landed_files(written)
        with self._appending:
            self._opened_locked(name).commit([self._reported(name, file) for file in written], versions)

    def replace(
        self,
        name: str,
        written: Sequence[WrittenTableFile],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check_landed_files(written)
        added = [self._reported(name, file) for file in written]

        def step(table: DeltaTable) -> list[Any]:
            check()  # what is appended after `table` was opened stays beside what is put in
            doomed = [file for file in _files(table, self.path(name)) if start.date() <= file.date < end.date()]
            return [*(self._removed(name, file) for file in doomed), *added]

        self._maintain(name, step)

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        return table_partials(self._rows(level.value, start, end, metric))

    def records(self, level: Level, start: datetime | None = None, metric: str | None = None) -> pa.Table:
        return table_records(self._rows(TOP_N, start, None, metric, pc.field("level") == level.value))

    def compact(self, name: str, run: Run = run_folds_here) -> TableCompaction:
        before = self.describe(name)
        landing = TableFileLanding({name: str(self._new_folder(name, FINAL))})
        for fold in plan_folds(name, self.files(name), landing, datetime.now(UTC).date()):
            self._replace_files(name, fold, checked_fold_reports(name, fold, run(fold.tasks)))
        after = self.describe(name)
        return TableCompaction(before.rows, after.rows, before.files, after.files)

    def expire(self, name: str, before: datetime, metrics: tuple[str, ...] = (), but_not: tuple[str, ...] = ()) -> int:
        gone = 0

        def step(table: DeltaTable) -> list[Any]:
            nonlocal gone
            gone, actions = 0, []
            for file in _files(table, self.path(name)):
                if file.date >= before.date():
                    continue
                rows, kept = self._expired(name, file, metrics, but_not)
                if rows:
                    gone += rows
                    actions += [self._removed(name, file), *kept]
            return actions

        self._maintain(name, step)
        return gone

    def _expired(
        self, name: str, file: TableFile, metrics: tuple[str, ...], but_not: tuple[str, ...]
    ) -> tuple[int, list[AddAction]]:
        """How many rows of a file go, and what is to be added for those that stay. Most files need not be read."""
        if not metrics and not but_not:
            return file.rows, []
        there = metrics_in_table_file(file.path)
        doomed = there & set(metrics) if metrics else there - set(but_not)
        if not doomed:
            return 0, []
        if doomed == there:
            return file.rows, []
        landing = TableFileLanding({name: str(self._new_folder(name, FINAL if file.is_final else "kept"))})
        written = pruned_table_file(file.path, name, landing, ~expired_table_rows(metrics, but_not), file.date)
        kept = sum(one.rows for one in written)
        return file.rows - kept, [self._reported(name, one) for one in written]

    def vacuum(self, hours: int) -> int:
        removed = 0
        for name in SCHEMAS:
            table = self._open(name)
            if table:
                gone = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
                removed += len(gone)
                _prune_empty(self.path(name) / "data", time.time() - 3600 * hours)
        return removed

    def describe(self, name: str) -> TableDescription:
        table = self._open(name)
        if not table:
            return TableDescription(0, 0, 0)
        actions = pa.table(table.get_add_actions(flatten=True))
        if not actions.num_rows:
            return TableDescription(0, 0, 0)
        return TableDescription(
            rows=pc.sum(actions["num_records"]).as_py() or 0,
            files=actions.num_rows,
            size_bytes=pc.sum(actions["size_bytes"]).as_py() or 0,
            oldest=pc.min(actions["min.bucket"]).as_py(),
            newest=pc.max(actions["max.bucket"]).as_py(),
        )

    def file_uris(self, name: str) -> list[str]:
        """The files that hold the table now, for any engine that reads Parquet."""
        return [file.path for file in self.files(name)]

    def files(self, name: str) -> list[TableFile]:
        table = self._open(name)
        return _files(table, self.path(name)) if table else []

    def _open(self, name: str) -> DeltaTable | None:
        try:
            table = DeltaTable(str(self.path(name)))
        except TableNotFoundError:
            return None
        check_format(int(table.metadata().configuration.get(FORMAT_KEY, "1")), self.location, name)
        return table

    def _create(self, name: str) -> DeltaTable:
        self.path(name).mkdir(parents=True, exist_ok=True)
        return DeltaTable.create(
            str(self.path(name)),
            schema=Schema.from_arrow(SCHEMAS[name]),
            mode="ignore",
            partition_by=PARTITIONED_BY,
            configuration={"delta.logRetentionDuration": LOG_KEPT, FORMAT_KEY: str(FORMAT)},
            raise_if_key_not_exists=False,
        )

    def _new_folder(self, name: str, label: str) -> Path:
        folder = self.path(name) / "data" / f"{label}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return folder

    def _rows(
        self,
        name: str,
        start: datetime | None = None,
        end: datetime | None = None,
        metric: str | None = None,
        wanted: Any = None,
    ) -> pa.Table:
        table = self._open(name)
        if not table:
            return SCHEMAS[name].empty_table()
        bounds = [wanted] if wanted is not None else []
        if start:
            bounds += [pc.field("bucket") >= start, pc.field("date") >= start.date()]
        if end:
            bounds += [pc.field("bucket") < end, pc.field("date") <= end.date()]
        if metric:
            bounds.append(pc.field("metric") == metric)
        # Not by deltalake's own file system, which is Python: a thread of Arrow's that closes a file through it while
        # the interpreter ends would abort the process.
        dataset = table.to_pyarrow_dataset(filesystem=SubTreeFileSystem(str(self.path(name)), LocalFileSystem()))
        rows = dataset.to_table(filter=reduce(operator.and_, bounds) if bounds else None)
        return rows.select(SCHEMAS[name].names).cast(SCHEMAS[name])

    def _opened_locked(self, name: str) -> "_OpenTable":
        """The table as it was opened last. What others commit is noticed when a commit of ours is refused."""
        if name not in self._opened:
            self._opened[name] = _OpenTable(name, self._open(name) or self._create(name))
        return self._opened[name]

    def _reported(self, name: str, file: WrittenTableFile) -> AddAction:
        path = Path(file.place).relative_to(self.path(name)).as_posix()
        return AddAction(path, file.size_bytes, {"date": file.date}, int(time.time() * 1000), True, file.stats)

    def _removed(self, name: str, file: TableFile) -> RemoveAction:
        path = Path(file.path).relative_to(self.path(name)).as_posix()
        return RemoveAction(
            path=path,
            data_change=True,
            deletion_timestamp=int(time.time() * 1000),
            partition_values={"date": file.date.isoformat()},
        )

    def _replace_files(self, name: str, fold: TableFold, written: list[WrittenTableFile]) -> None:
        check_landed_files(written)

        def step(table: DeltaTable) -> list[Any]:
            if not {file.path for file in fold.replaced} <= {file.path for file in _files(table, self.path(name))}:
                raise TableConflict(f"table {name!r} was rewritten while it was being folded: try again")
            removed = [self._removed(name, file) for file in fold.replaced]
            return [*removed, *(self._reported(name, file) for file in written)]

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
        partition_by=PARTITIONED_BY,
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


def _files(table: DeltaTable, root: Path) -> list[TableFile]:
    actions = pa.table(table.get_add_actions(flatten=True))
    columns = ("path", "partition.date", "num_records", "size_bytes", "min.bucket", "max.bucket")
    rows = zip(*(actions[name].to_pylist() for name in columns)) if actions.num_rows else ()
    return [
        TableFile(str(root / path), day, count, size, first, last, Path(path).parts[1].startswith(f"{FINAL}-"))
        for path, day, count, size, first, last in rows
    ]


def _prune_empty(folder: Path, before: float) -> None:
    """Remove what vacuum left of folders; a young one may be that of a batch which is being written."""
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.is_dir() and child.stat().st_mtime < before and not any(child.rglob("*.parquet")):
            shutil.rmtree(child)
