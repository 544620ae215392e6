"""Tables as plain Parquet folders, for readers that know nothing else.

    <folder>/minute/_format                                             the format of the layout
    <folder>/minute/.<id>/2026-11-18-part-….parquet                     a landing, written by executors
    <folder>/minute/batch-<id>/2026-11-18-part-….parquet + _guard.json  one append: appears whole, by a rename
    <folder>/minute/final-<id>/ …   _guard.json names the files that it replaces
    <folder>/metrics/metrics.parquet                                    what is known of metrics, replaced as a whole

A file holds rows of one date. A folder is written under a name that starts with a dot (which readers of Parquet pass
over) and then renamed: the rename is the commit. A file that a newer folder replaces is passed over by us at once, and
deleted; a reader that only lists files may see both for that moment, so let such readers wait for a fold to end.
"""

import fcntl
import json
import operator
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from functools import lru_cache, reduce, wraps
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq

from penstock.durable import make_folder, sync_to_disk, write_text
from penstock.errors import TableConflict
from penstock.model.level import Level
from penstock.tables.fold import Run, TableFile, TableFold, folded, plan_folds, run_folds_here
from penstock.tables.landing import TableFileLanding, WrittenTableFile, check_landed_files
from penstock.tables.location import local_tables_folder
from penstock.tables.metrics_table import METRICS, merged_metrics, still_seen
from penstock.tables.overflow import OverflowLog
from penstock.tables.parquet_mending import mend_folders
from penstock.tables.parquet_metrics import change_metrics_file, read_metrics_file
from penstock.tables.port import TableBatch, TableCompaction, TableDescription
from penstock.tables.pruning import Doomed, pruned_table_file
from penstock.tables.table_rows import FORMAT, SCHEMAS, TOP_N, check_format, table_partials, table_records
from penstock.tables.torn import Covered

_GUARD = "_guard.json"
_FORMAT = "_format"
_READS = 20
T = TypeVar("T")


def _steadily(read: Callable[..., T]) -> Callable[..., T]:
    """Read again if a compaction has taken a folder away: its successor is there by then."""

    @wraps(read)
    def steady(*arguments: Any) -> T:
        for _ in range(_READS):
            try:
                return read(*arguments)
            except FileNotFoundError:
                continue
        return read(*arguments)

    return steady


class ParquetTables:
    """The tables below one folder."""

    def __init__(self, location: str) -> None:
        self.folder = local_tables_folder(location, "tables")
        self.location = f"parquet:{self.folder}"
        self.overflow = OverflowLog()
        self.conflicts = 0  # a lock lets one append at a time through

    @_steadily
    def held(self, name: str, applications: Iterable[str] | None = None) -> dict[str, int]:
        found = self._versions(name)
        wanted = set(found if applications is None else applications)
        return {application: last for application, last in found.items() if application in wanted}

    def landing(self, label: str) -> TableFileLanding:
        return self._landing(*SCHEMAS)

    def append(self, name: str, written: Sequence[WrittenTableFile], batch: TableBatch) -> bool:
        check_landed_files(written)
        with self._alone(name):
            if not batch.wanted_by(name, self.held(name, batch.versions)):
                sync_to_disk([self.folder / name])  # the process that added it may have died before
                return False
            self._publish(name, "batch", written, batch.versions, ())
        self.overflow.add(file.overflow for file in written)
        return True

    def adopt(self, name: str, written: Sequence[WrittenTableFile], versions: Mapping[str, int]) -> None:
        """Begin a table with these rows and guards."""
        check_landed_files(written)
        with self._alone(name):
            self._publish(name, "batch", written, versions, ())

    def replace(
        self,
        name: str,
        written: Sequence[WrittenTableFile],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check_landed_files(written)
        with self._alone(name):
            check()
            doomed = [file for file in self.files(name) if start.date() <= file.date < end.date()]
            self._publish(name, "batch", written, self._versions(name), doomed)

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        return table_partials(self._rows(level.value, start, end, metric))

    def records(self, level: Level, start: datetime | None = None, metric: str | None = None) -> pa.Table:
        return table_records(self._rows(TOP_N, start, None, metric, pc.field("level") == level.value))

    def metrics(self) -> pa.Table:
        return read_metrics_file(self.folder / METRICS)

    def note_metrics(self, rows: pa.Table) -> None:
        self._rewrite_metrics(lambda there: merged_metrics(there, rows))

    def forget_metrics(self, before: datetime) -> int:
        return self._rewrite_metrics(lambda there: still_seen(there, before))

    def _rewrite_metrics(self, change: Callable[[pa.Table], pa.Table]) -> int:
        with self.locked(METRICS):
            return change_metrics_file(self.folder / METRICS, change)

    def compact(self, name: str, run: Run = run_folds_here) -> TableCompaction:
        before = self.describe(name)
        landing = self._landing(name)
        left = list(plan_folds(name, self.files(name), landing, datetime.now(UTC).date()))
        try:
            for fold, written in folded(name, tuple(left), run):
                left.remove(fold)
                check_landed_files(written)
                with self._alone(name):
                    self._check_unchanged(name, fold)
                    self._publish(name, "final", written, self._versions(name), fold.replaced)
                self.overflow.add(file.overflow for file in written)
        except TableConflict:
            raise
        except Exception as error:
            for fold in left:
                self._check_unchanged(name, fold, error)  # its files may be gone
            raise
        after = self.describe(name)
        return TableCompaction(before.rows, after.rows, before.files, after.files)

    def _check_unchanged(self, name: str, fold: TableFold, cause: Exception | None = None) -> None:
        if not set(fold.replaced) <= set(self.files(name)):
            raise TableConflict(f"table {name!r} was rewritten while it was being folded: try again") from cause

    def expire(
        self,
        name: str,
        before: datetime,
        metrics: tuple[str, ...] = (),
        but_not: tuple[str, ...] = (),
        level: str | None = None,
    ) -> int:
        doomed = Doomed(metrics, but_not, level)
        gone = 0
        with self._alone(name):
            # A folder has files of one kind: final rows, or increments.
            for kind in ("final", "batch"):
                removed: list[TableFile] = []
                added: list[WrittenTableFile] = []
                for file in self.files(name):
                    if file.date >= before.date() or file.is_final != (kind == "final"):
                        continue
                    has_doomed, has_others = doomed.share_of(file.path)
                    if not has_doomed:
                        continue
                    removed.append(file)
                    if has_others:
                        added += pruned_table_file(
                            file.path, name, self._landing(name), ~doomed.expression(), file.date
                        )
                if removed:
                    self._publish(name, kind, added, self._versions(name), removed)
                    gone += sum(file.rows for file in removed) - sum(file.rows for file in added)
        return gone

    def vacuum(self, hours: int) -> int:
        gone = 0
        for name in SCHEMAS:
            if (self.folder / name).is_dir():
                with self._alone(name):
                    gone += self._sweep(name) + _clear_scratch(self.folder / name, time.time() - 3600 * hours)
        return gone

    def mend(self, covered: Covered) -> int:
        aside = 0
        for name in SCHEMAS:
            if (self.folder / name).is_dir():
                with self.locked(name):  # no folder comes or goes while they are examined
                    aside += mend_folders(self.folder / name, _GUARD, covered)
        return aside

    @_steadily
    def describe(self, name: str) -> TableDescription:
        files = self.files(name)
        return TableDescription(
            rows=sum(file.rows for file in files),
            files=len(files),
            size_bytes=sum(os.stat(file.path).st_size for file in files),
            oldest=min((file.first for file in files), default=None),
            newest=max((file.last for file in files), default=None),
        )

    def file_uris(self, name: str) -> list[str]:
        """The files that hold the table now."""
        return [file.path for file in self.files(name)]

    @_steadily
    def files(self, name: str) -> list[TableFile]:
        """The files that hold the table: all but those that a folder replaces."""
        guards = {folder: _guard(folder) for folder in self._folders(name)}
        replaced = {gone for guard in guards.values() for gone in guard["replaces"]}
        return [
            _table_file(folder / file)
            for folder, guard in guards.items()
            for file in guard["files"]
            if f"{folder.name}/{file}" not in replaced
        ]

    def _folders(self, name: str) -> list[Path]:
        root = self.folder / name
        if not root.is_dir():
            return []
        folders = [path for path in sorted(root.iterdir()) if path.name[0] not in "._"]
        if folders:
            form = root / _FORMAT
            # Empty: of a version that did not sync it. Tables of format 1 have none.
            check_format(int(form.read_text() or FORMAT) if form.exists() else 1, self.location, name)
        return folders

    def _versions(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder in self._folders(name):
            for application, version in _guard(folder)["versions"].items():
                found[application] = max(version, found.get(application, -1))
        return found

    @_steadily
    def _rows(
        self,
        name: str,
        start: datetime | None = None,
        end: datetime | None = None,
        metric: str | None = None,
        wanted: Any = None,
    ) -> pa.Table:
        bounds = [wanted] if wanted is not None else []
        bounds += ([pc.field("bucket") >= start] if start else []) + ([pc.field("bucket") < end] if end else [])
        bounds += [pc.field("metric") == metric] if metric else []
        files = [file.path for file in self.files(name) if _is_within(file, start, end)]
        if not files:
            return SCHEMAS[name].empty_table()
        dataset = pa_dataset.dataset(files, schema=SCHEMAS[name], format="parquet", partitioning=None)
        return dataset.to_table(filter=reduce(operator.and_, bounds) if bounds else None)

    def _publish(
        self,
        name: str,
        kind: str,
        written: Sequence[WrittenTableFile],
        versions: Mapping[str, int],
        replaced: Sequence[TableFile],
    ) -> None:
        """Make files part of the table in the place of others; the caller holds the lock.

        The landing may still get files of attempts that were overtaken: only what was reported moves on.
        """
        scratch = self._scratch(name)
        scratch.mkdir()
        for file in written:
            os.rename(file.place, scratch / Path(file.place).name)
        guard = {
            "versions": dict(versions),
            "replaces": ["/".join(Path(file.path).parts[-2:]) for file in replaced],
            "files": [Path(file.place).name for file in written],
        }
        _publish(scratch, self.folder / name / f"{kind}-{scratch.name[1:13]}", guard)
        if replaced:
            self._sweep(name)

    def _sweep(self, name: str) -> int:
        """Delete the files that are replaced, then the folders that have none left; the caller holds the lock.

        A folder without files stays as long as it alone has all guards, or says what another folder has lost.
        """
        gone = 0
        folders = self._folders(name)
        replaced = {self.folder / name / file for folder in folders for file in _guard(folder)["replaces"]}
        for file in replaced:
            if file.exists():
                file.unlink()
                gone += 1
        # Gone for good before what says that they are replaced may go.
        sync_to_disk({file.parent for file in replaced if file.parent.is_dir()})
        versions = self._versions(name)
        empty = [folder for folder in folders if not any(folder.glob("*.parquet"))]
        keeper = next((folder for folder in folders if _guard(folder)["versions"] == versions), None)
        for folder in [folder for folder in empty if keeper is not None and folder != keeper]:
            folders.remove(folder)
            known = {file for other in folders for file in _guard(other)["replaces"]}
            lost = {file for file in _guard(folder)["replaces"] if (self.folder / name / file).parent.exists()}
            if lost <= known | {file for file in lost if file.startswith(f"{folder.name}/")}:
                _remove(folder)
            else:
                folders.append(folder)
        return gone

    def _landing(self, *names: str) -> TableFileLanding:
        folders = {name: self._scratch(name) for name in names}
        for folder in folders.values():
            make_folder(folder.parent)
            folder.mkdir()
        return TableFileLanding({name: str(folder) for name, folder in folders.items()}, names_date=False)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        with self.locked(name):
            if not self._folders(name):
                write_text(self.folder / name / _FORMAT, str(FORMAT))
            yield

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """One writer of a table at a time; the lock goes with its process."""
        make_folder(self.folder / name)
        with open(self.folder / name / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _scratch(self, name: str) -> Path:
        return self.folder / name / f".{uuid.uuid4().hex}"


def _publish(scratch: Path, folder: Path, guard: dict[str, Any]) -> None:
    """Make a finished folder visible, with its guard in it; both are on the disk before and after."""
    (scratch / _GUARD).write_text(json.dumps(guard))
    sync_to_disk([scratch / _GUARD, scratch])
    scratch.rename(folder)
    sync_to_disk([folder.parent])


def _remove(folder: Path) -> None:
    """Out of sight first: a reader, also after a crash in here, finds the folder whole or not at all."""
    scratch = folder.with_name(f".{uuid.uuid4().hex}")
    folder.rename(scratch)
    shutil.rmtree(scratch)


def _clear_scratch(folder: Path, before: float) -> int:
    """Remove what writers that died have left; a young one may still be written."""
    old = [child for child in folder.iterdir() if child.name[0] == "." and child.is_dir()]
    old = [child for child in old if child.stat().st_mtime < before]
    for child in old:
        shutil.rmtree(child)
    return len(old)


@lru_cache(maxsize=1 << 16)  # a published folder never changes, and a batch would read those of all batches before
def _guard(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / _GUARD).read_text())
    return found


@lru_cache(maxsize=1 << 16)  # nor does a file
def _table_file(path: Path) -> TableFile:
    metadata = pq.read_metadata(path)
    columns = [metadata.schema.column(n).path for n in range(len(metadata.schema))]
    bounds = [metadata.row_group(n).column(columns.index("bucket")).statistics for n in range(metadata.num_row_groups)]
    return TableFile(
        str(path),
        date.fromisoformat(path.name[:10]),
        metadata.num_rows,
        path.stat().st_size,
        min(one.min for one in bounds).replace(tzinfo=UTC),
        max(one.max for one in bounds).replace(tzinfo=UTC),
        path.parent.name.startswith("final-"),
    )


def _is_within(file: TableFile, start: datetime | None, end: datetime | None) -> bool:
    return (start is None or file.last >= start) and (end is None or file.first < end)
