"""Delta tables without a jar: executors write Parquet files into the table's folder, the driver commits them.

    <folder>/minute/data/<label>-<id>/date=2026-11-18/part-….parquet     increments of a batch, unseen until committed
    <folder>/minute/data/final-<id>/date=2026-11-18/part-….parquet       final rows
    <folder>/minute/_delta_log/                                          Delta's log, through `deltalake`
    <folder>/metrics/                                                    what is known of metrics, replaced as a whole

Tables are partitioned by date; `penstock.format` among a table's properties names its layout.

The guard is a Delta transaction identifier in the same commit. Two writers with the same guard exclude each other:
the log refuses the second. Compaction, expiry and replacement share one guard of their own for the same reason.
"""

import json
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
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.durable import make_folder, sync_to_disk
from penstock.errors import TableBusy, TableConflict
from penstock.model.level import Level
from penstock.tables import delta_commits
from penstock.tables.delta_commits import DELTA_SCHEMAS, OpenTable, partitioned_by
from penstock.tables.delta_log import MAINTENANCE, NO_HOOKS, DeltaLog
from penstock.tables.fold import Run, TableFile, TableFold, folded, plan_folds, run_folds_here
from penstock.tables.landing import TableFileLanding, WrittenTableFile, check_landed_files, table_file_stats
from penstock.tables.location import local_tables_folder
from penstock.tables.metrics_table import METRIC_ROWS, METRICS, merged_metrics, still_seen
from penstock.tables.overflow import OverflowLog
from penstock.tables.port import TableBatch, TableCompaction, TableDescription
from penstock.tables.pruning import Doomed, pruned_table_file
from penstock.tables.table_rows import FORMAT, SCHEMAS, TOP_N, check_format, table_partials, table_records
from penstock.tables.torn import Covered

ATTEMPTS = 10  # each fails only because another commit succeeded first
# A batch every two seconds is 43,000 files of Delta's log a day, and every opening lists them. More than vacuum waits.
LOG_KEPT = "interval 2 days"
FORMAT_KEY = "penstock.format"
FINAL = "final"  # how the folder of a file with final rows is called


class DeltaTables:
    """The tables below one folder."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self.folder = local_tables_folder(location, "tables")
        self.location = str(self.folder)
        self.overflow = OverflowLog()
        self.conflicts = 0
        # _appending guards _opened.
        self._appending = threading.Lock()
        self._opened: dict[str, OpenTable] = {}
        self._logs = {name: DeltaLog(self.path(name)) for name in DELTA_SCHEMAS}

    def path(self, name: str) -> Path:
        return self.folder / name

    def held(self, name: str, applications: Iterable[str] | None = None) -> dict[str, int]:
        if applications is None:
            return self._logs[name].guards()
        with self._appending:
            self._opened.pop(name, None)  # a job that begins looks at what is there now
        table = self._open(name)
        return OpenTable(name, table, self._logs[name]).held(applications) if table else {}

    def landing(self, label: str) -> TableFileLanding:
        return TableFileLanding({name: str(self._new_folder(name, label)) for name in SCHEMAS})

    def append(self, name: str, written: Sequence[WrittenTableFile], batch: TableBatch) -> bool:
        added = self._added(name, written)
        with self._appending:
            for _ in range(ATTEMPTS):
                table = self._opened_locked(name)
                if not batch.wanted_by(name, table.held(batch.versions)):
                    table.sync()  # the process that added it may have died before
                    return False
                try:
                    table.commit(added, batch.versions)
                except CommitFailedError:
                    self._opened.pop(name, None)
                    self.conflicts += 1
                    continue
                self.overflow.add(file.overflow for file in written)
                return True
        raise TableBusy(f"table {name!r} changed {ATTEMPTS} times while this batch was being added: try again")

    def adopt(self, name: str, written: Sequence[WrittenTableFile], versions: Mapping[str, int]) -> None:
        """Begin a table with these rows and guards."""
        added = self._added(name, written)
        with self._appending:
            self._opened_locked(name).commit(added, versions)

    def replace(
        self,
        name: str,
        written: Sequence[WrittenTableFile],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        added = self._added(name, written)

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

    def metrics(self) -> pa.Table:
        table = self._open(METRICS)
        return _metrics_in(table, self.path(METRICS)) if table else METRIC_ROWS.empty_table()

    def note_metrics(self, rows: pa.Table) -> None:
        self._rewrite_metrics(lambda there: merged_metrics(there, rows))

    def forget_metrics(self, before: datetime) -> int:
        return self._rewrite_metrics(lambda there: still_seen(there, before)) if self._open(METRICS) else 0

    def _rewrite_metrics(self, change: Callable[[pa.Table], pa.Table]) -> int:
        """Put a changed table in the place of the one that is there, in one commit; how many rows it lost."""
        lost = 0
        if self._open(METRICS) is None:
            self._create(METRICS)

        def step(table: DeltaTable) -> list[Any]:
            nonlocal lost
            there = _metrics_in(table, self.path(METRICS))
            made = change(there)
            lost = int(there.num_rows - made.num_rows)
            if made.equals(there):
                return []
            path = self._new_folder(METRICS, "all") / "part.parquet"
            pq.write_table(made, path, compression="zstd")
            sync_to_disk([path, path.parent, path.parent.parent])
            stats = json.dumps(table_file_stats(pq.read_metadata(path)))
            place, now = path.relative_to(self.path(METRICS)).as_posix(), int(time.time() * 1000)
            old = [RemoveAction(path=one, data_change=True, deletion_timestamp=now) for one in _paths(table)]
            return [*old, AddAction(place, path.stat().st_size, {}, now, True, stats)]

        self._maintain(METRICS, step)
        return lost

    def compact(self, name: str, run: Run = run_folds_here) -> TableCompaction:
        before = self.describe(name)
        landing = TableFileLanding({name: str(self._new_folder(name, FINAL))})
        folds = plan_folds(name, self.files(name), landing, datetime.now(UTC).date())
        for fold, written in folded(name, folds, run):
            self._replace_files(name, fold, written)
            self.overflow.add(file.overflow for file in written)
        after = self.describe(name)
        return TableCompaction(before.rows, after.rows, before.files, after.files)

    def expire(
        self,
        name: str,
        before: datetime,
        metrics: tuple[str, ...] = (),
        but_not: tuple[str, ...] = (),
        level: str | None = None,
    ) -> int:
        gone = 0

        def step(table: DeltaTable) -> list[Any]:
            nonlocal gone
            gone, actions = 0, []
            for file in _files(table, self.path(name)):
                if file.date >= before.date():
                    continue
                rows, kept = self._expired(name, file, Doomed(metrics, but_not, level))
                if rows:
                    gone += rows
                    actions += [self._removed(name, file), *kept]
            return actions

        self._maintain(name, step)
        return gone

    def _expired(self, name: str, file: TableFile, doomed: Doomed) -> tuple[int, list[AddAction]]:
        """How many rows of a file go, and what is to be added for those that stay."""
        has_doomed, has_others = doomed.share_of(file.path)
        if not has_doomed:
            return 0, []
        if not has_others:
            return file.rows, []
        landing = TableFileLanding({name: str(self._new_folder(name, FINAL if file.is_final else "kept"))})
        written = pruned_table_file(file.path, name, landing, ~doomed.expression(), file.date)
        kept = sum(one.rows for one in written)
        return file.rows - kept, self._added(name, written)

    def vacuum(self, hours: int) -> int:
        removed = 0
        for name in DELTA_SCHEMAS:
            table = self._open(name)
            if table:
                self._logs[name].sync(table)  # else a power cut could bring back a version that needs these files
                gone = table.vacuum(
                    hours,
                    dry_run=False,
                    enforce_retention_duration=False,
                    full=True,
                    post_commithook_properties=NO_HOOKS,
                )
                removed += len(gone)
                _prune_empty(self.path(name) / "data", time.time() - 3600 * hours)
        return removed

    def mend(self, covered: Covered) -> int:
        return sum(one.mend(covered) for one in self._logs.values())

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
        make_folder(self.path(name))
        made = DeltaTable.create(
            str(self.path(name)),
            schema=Schema.from_arrow(DELTA_SCHEMAS[name]),
            mode="ignore",
            partition_by=partitioned_by(name),
            configuration={"delta.logRetentionDuration": LOG_KEPT, FORMAT_KEY: str(FORMAT)},
            raise_if_key_not_exists=False,
        )
        sync_to_disk([self.path(name)])  # the name of the log; its entry is synced with the first commit
        return made

    def _new_folder(self, name: str, label: str) -> Path:
        folder = self.path(name) / "data" / f"{label}-{uuid.uuid4().hex[:8]}"
        make_folder(folder.parent)
        folder.mkdir()
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

    def _opened_locked(self, name: str) -> OpenTable:
        """The table as it was opened last. What others commit is noticed when a commit of ours is refused."""
        if name not in self._opened:
            self._opened[name] = OpenTable(name, self._open(name) or self._create(name), self._logs[name])
        return self._opened[name]

    def _added(self, name: str, written: Sequence[WrittenTableFile]) -> list[AddAction]:
        """What a commit says of these files, once their names are on the disk; what is in them is already."""
        check_landed_files(written)
        data = self.path(name) / "data"
        dates = {Path(file.place).parent for file in written}
        sync_to_disk([*dates, *{date.parent for date in dates}, *([data] if dates else ())])
        now = int(time.time() * 1000)
        places = [Path(file.place).relative_to(self.path(name)).as_posix() for file in written]
        return [
            AddAction(place, file.size_bytes, {"date": file.date}, now, True, file.stats)
            for place, file in zip(places, written)
        ]

    def _removed(self, name: str, file: TableFile) -> RemoveAction:
        path = Path(file.path).relative_to(self.path(name)).as_posix()
        return RemoveAction(
            path=path,
            data_change=True,
            deletion_timestamp=int(time.time() * 1000),
            partition_values={"date": file.date.isoformat()},
        )

    def _replace_files(self, name: str, fold: TableFold, written: list[WrittenTableFile]) -> None:
        added = self._added(name, written)

        def step(table: DeltaTable) -> list[Any]:
            if not {file.path for file in fold.replaced} <= {file.path for file in _files(table, self.path(name))}:
                raise TableConflict(f"table {name!r} was rewritten while it was being folded: try again")
            return [*(self._removed(name, file) for file in fold.replaced), *added]

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
                    delta_commits.commit_actions(table, name, actions, [turn])
                    table.update_incremental()
                    self._logs[name].sync(table)
            except CommitFailedError:
                continue
            return
        raise TableConflict(f"table {name!r} is being maintained by another process: try again later")


def _files(table: DeltaTable, root: Path) -> list[TableFile]:
    actions = pa.table(table.get_add_actions(flatten=True))
    columns = ("path", "partition.date", "num_records", "size_bytes", "min.bucket", "max.bucket")
    rows = zip(*(actions[name].to_pylist() for name in columns)) if actions.num_rows else ()
    return [
        TableFile(str(root / path), day, count, size, first, last, Path(path).parts[1].startswith(f"{FINAL}-"))
        for path, day, count, size, first, last in rows
    ]


def _paths(table: DeltaTable) -> list[str]:
    actions = pa.table(table.get_add_actions(flatten=True))
    return actions["path"].to_pylist() if actions.num_rows else []


def _metrics_in(table: DeltaTable, root: Path) -> pa.Table:
    files = [root / path for path in _paths(table)]
    read = [pq.read_table(file, schema=METRIC_ROWS, partitioning=None) for file in files]
    return pa.concat_tables(read) if read else METRIC_ROWS.empty_table()


def _prune_empty(folder: Path, before: float) -> None:
    """Remove what vacuum left of folders; a young one may be that of a batch which is being written."""
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.is_dir() and child.stat().st_mtime < before and not any(child.rglob("*.parquet")):
            shutil.rmtree(child)
