"""Tables as plain Parquet folders, for readers that know nothing else.

    <folder>/minute/.<id>/part-….parquet                     the landing of a batch, written by executors
    <folder>/minute/batch-<id>/part-….parquet + _guard.json  one append: appears whole, by a rename
    <folder>/minute/folded-<id>/ …   _guard.json names what it replaces

A folder is written under a name that starts with a dot or underscore (which readers of Parquet pass over) and then
renamed: the rename is the commit. A folder that a newer one replaces is passed over by us at once, and deleted; a
reader that only lists files may see both for that moment, so let such readers wait for a compaction to end.
"""

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.model.level import Level
from penstock.tables.landing import FileLanding, Written, check_visible
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

_GUARD = "_guard.json"
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
        self.folder = local_folder(location, "tables")
        self.location = f"parquet:{self.folder}"
        self.conflicts = 0  # a lock lets one append at a time through

    @_steadily
    def held(self, name: str, applications: Iterable[str]) -> dict[str, int]:
        wanted = set(applications)
        found: dict[str, int] = {}
        for folder in self._live(name):
            for application, version in _guard(folder)["versions"].items():
                if application in wanted:
                    found[application] = max(version, found.get(application, -1))
        return found

    def landing(self, label: str) -> FileLanding:
        folders = {name: self._scratch(name) for name in SCHEMAS}
        for folder in folders.values():
            folder.mkdir(parents=True)
        return FileLanding({name: str(folder) for name, folder in folders.items()})

    def append(self, name: str, written: Sequence[Written], batch: Batch) -> bool:
        check_visible(written)
        with self._alone(name):
            if not batch.wanted_by(name, self.held(name, batch.versions)):
                return False
            # The landing may still get files of attempts that were overtaken: only what was reported moves on.
            scratch = self._scratch(name)
            scratch.mkdir()
            for number, file in enumerate(written):
                os.rename(file.place, scratch / f"part-{number}.parquet")
            guard = {"versions": batch.versions, "replaces": []}
            _publish(scratch, self.folder / name / f"batch-{scratch.name[1:13]}", guard)
        return True

    def replace(
        self,
        name: str,
        written: Sequence[Written],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check_visible(written)
        fresh = [pq.read_table(file.place).cast(SCHEMAS[name]) for file in written]
        with self._alone(name):
            check()
            kept = self._rows(name).filter((pc.field("bucket") < start) | (pc.field("bucket") >= end))
            self._fold(name, pa.concat_tables([kept, *fresh]))

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        return as_partials(self._rows(level.value, start, end, metric))

    def top_rows(self) -> pa.Table:
        return self._rows(TOP_N)

    def compact(self, name: str) -> Compaction:
        before = self.describe(name)
        with self._alone(name):
            if len(self._live(name)) > 1:
                self._fold(name, self._rows(name))
        after = self.describe(name)
        return Compaction(before.rows, after.rows, before.files, after.files)

    def expire(self, name: str, before: datetime, metrics: tuple[str, ...] = (), but_not: tuple[str, ...] = ()) -> int:
        doomed = expired(before, metrics, but_not)
        with self._alone(name):
            rows = self._rows(name)
            kept = rows.filter(~doomed)
            if kept.num_rows < rows.num_rows:
                self._fold(name, kept)
        return int(rows.num_rows - kept.num_rows)

    def vacuum(self, hours: int) -> int:
        gone = 0
        for name in SCHEMAS:
            if (self.folder / name).is_dir():
                with self._alone(name):  # what is published during the vacuum would be in no list of live folders
                    live = set(self._live(name))
                    dead = [folder for folder in self._folders(name) if folder not in live]
                    for folder in dead:
                        _remove(folder)
                    gone += len(dead) + _clear_scratch(self.folder / name, time.time() - 3600 * hours)
        return gone

    @_steadily
    def describe(self, name: str) -> Description:
        files = [file for folder in self._live(name) for file in folder.glob("*.parquet")]
        buckets = self._rows(name)["bucket"]
        return Description(
            rows=len(buckets),
            files=len(files),
            size_bytes=sum(file.stat().st_size for file in files),
            oldest=pc.min(buckets).as_py(),
            newest=pc.max(buckets).as_py(),
        )

    def file_uris(self, name: str) -> list[str]:
        """The files that hold the table now."""
        return [str(file) for folder in self._live(name) for file in folder.glob("*.parquet")]

    def _folders(self, name: str) -> list[Path]:
        root = self.folder / name
        return [path for path in sorted(root.iterdir()) if path.name[0] not in "._"] if root.is_dir() else []

    def _live(self, name: str) -> list[Path]:
        """The folders that hold the table: all but those that another replaces."""
        folders = self._folders(name)
        replaced = {gone for folder in folders for gone in _guard(folder)["replaces"]}
        return [folder for folder in folders if folder.name not in replaced]

    @_steadily
    def _rows(
        self, name: str, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        files = self.file_uris(name)
        if not files:
            return SCHEMAS[name].empty_table()
        rows = pa.concat_tables([pq.read_table(file).select(SCHEMAS[name].names).cast(SCHEMAS[name]) for file in files])
        if start:
            rows = rows.filter(pc.field("bucket") >= start)
        if metric:
            rows = rows.filter(pc.field("metric") == metric)
        return rows.filter(pc.field("bucket") < end) if end else rows

    def _fold(self, name: str, rows: pa.Table) -> None:
        """Put `rows`, merged, in the place of everything that the table holds."""
        live = self._live(name)
        versions: dict[str, int] = {}
        for folder in live:
            for application, version in _guard(folder)["versions"].items():
                versions[application] = max(version, versions.get(application, -1))
        scratch = self._scratch(name)
        scratch.mkdir(parents=True)
        pq.write_table(folded(name, rows), scratch / "part-0.parquet", compression="zstd")
        # Also what is dead already: the folder that says so goes now, and a fold that died may have left it there.
        replaced = self._folders(name)
        guard = {"versions": versions, "replaces": [folder.name for folder in replaced]}
        _publish(scratch, self.folder / name / f"folded-{uuid.uuid4().hex[:12]}", guard)
        for folder in replaced:
            _remove(folder)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One writer of a table at a time; the lock goes with its process."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        with open(self.folder / name / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _scratch(self, name: str) -> Path:
        return self.folder / name / f".{uuid.uuid4().hex}"


def _publish(scratch: Path, folder: Path, guard: dict[str, Any]) -> None:
    """Make a finished folder visible, with its guard in it."""
    with open(scratch / _GUARD, "w") as file:
        json.dump(guard, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(folder)


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
