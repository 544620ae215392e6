"""Where the tasks of a batch put their rows until the driver commits them, and what they report of it.

    driver   landing = tables.landing(label)        makes the folders (or staging tables) of one batch
    task     landing.writer("minute") ─► Written    a file for each table, date and task attempt, unseen by any reader
    driver   tables.append("minute", written, …)    commits exactly what was reported
    driver   landing.close()                        drops staging tables

A landing is pickled and sent to the tasks. An attempt that fails or is overtaken leaves a file that no report names:
it is never seen by a reader, and `vacuum` removes it.
"""

import json
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import RowsMissing

BOUND_TEXT = 32  # characters of a text that bounds a column; entities may be long
GROUP_ROWS = 1 << 13  # about 140 series of an hour of minutes: what a reader of one series has to read
PAGE_BYTES = 64 * 1024
# Columns whose values repeat. Of others, as sums, a dictionary would be as long as the column.
_TEXT_LEAVES = [f"{name}.key_value.{leaf}" for name in ("labels", "record") for leaf in ("key", "value")]
_LIST_LEAVES = [f"distribution.list.element.{leaf}" for leaf in ("index", "count")]
REPEATING = ["date", "bucket", "level", "metric", "function", "series", "record_id", "count", "rank"]
GREATEST_TEXT = "\U0010ffff"  # sorts behind everything


@dataclass(frozen=True, slots=True)
class WrittenTableFile:
    """What a task reports of the rows that it has written for one table."""

    table: str
    place: str  # a file's absolute path, or the name of what is staged in a database
    size_bytes: int
    rows: int
    stats: str = "{}"  # bounds of each column, as Delta's log has them
    date: str = ""  # the day that all rows are of, in ISO's form; empty: of any


class TableWriter(Protocol):
    """The rows of one table, written by one task attempt."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> list[WrittenTableFile]:
        """Finish; what was written, of each day by itself."""
        ...


class TableLanding(Protocol):
    """Where one batch lands. Picklable: tasks on other machines write through a copy of it."""

    def writer(self, name: str) -> TableWriter: ...

    def close(self) -> None:
        """Give up what a landing no longer needs, once its batch is committed or refused."""
        ...


@dataclass(frozen=True, slots=True)
class TableFileLanding:
    """One folder for each table, made by the driver: a task that does not find it is on another file system."""

    folders: dict[str, str]
    names_date: bool = True  # the folder of a file names its date, and the file does not; else the other way round

    def writer(self, name: str) -> "TableFileWriter":
        return TableFileWriter(name, Path(self.folders[name]), names_date=self.names_date)

    def close(self) -> None:
        """What was committed stays where it is, and vacuum removes the rest; folders without a file go at once."""
        for folder in self.folders.values():
            with suppress(OSError):  # it has files, or was moved
                os.rmdir(folder)


class TableFileWriter:
    """One Parquet file for each day, begun with its first rows.

    Row groups are small, and pages have an index: a reader of one metric and a few hours reads little else.
    """

    def __init__(self, name: str, folder: Path, *, names_date: bool) -> None:
        self._name = name
        self._folder = folder
        self._names_date = names_date
        self._files: dict[str, tuple[Path, pq.ParquetWriter]] = {}

    def write(self, rows: pa.Table) -> None:
        """Rows of any days; those of one day stay in their order."""
        days = pc.unique(rows["date"]).to_pylist()
        for day in days:
            own = rows if len(days) == 1 else rows.filter(pc.equal(rows["date"], pa.scalar(day, pa.date32())))
            if self._names_date:
                own = own.drop_columns(["date"])
            writer = self._writer(day.isoformat(), own.schema)
            writer.write_table(own, row_group_size=GROUP_ROWS)

    def _writer(self, day: str, schema: pa.Schema) -> pq.ParquetWriter:
        if day not in self._files:
            name = f"part-{uuid.uuid4().hex}.parquet"
            path = self._folder / f"date={day}" / name if self._names_date else self._folder / f"{day}-{name}"
            if not self._folder.is_dir():
                raise RowsMissing(
                    f"an executor does not see {self._folder}, which the driver has made: the folder of the "
                    "tables must be mounted under the same path on the driver and on every worker"
                )
            path.parent.mkdir(exist_ok=True)
            made = pq.ParquetWriter(
                path,
                schema,
                compression="zstd",
                use_dictionary=[*REPEATING, *_TEXT_LEAVES, *_LIST_LEAVES],
                write_page_index=True,
                data_page_size=PAGE_BYTES,
            )
            self._files[day] = (path, made)
        return self._files[day][1]

    def close(self) -> list[WrittenTableFile]:
        found = []
        for day, (path, writer) in self._files.items():
            writer.close()
            metadata = pq.read_metadata(path)
            stats = json.dumps(table_file_stats(metadata), allow_nan=False)
            found.append(WrittenTableFile(self._name, str(path), path.stat().st_size, metadata.num_rows, stats, day))
        return found


def check_landed_files(written: Sequence[WrittenTableFile]) -> None:
    """RowsMissing unless the driver sees every reported file at its full size."""
    for file in written:
        try:
            size = Path(file.place).stat().st_size
        except FileNotFoundError:
            size = -1
        if size != file.size_bytes:
            found = "it is not there" if size < 0 else f"it has {size}"
            raise RowsMissing(
                f"a task has written {file.rows} rows of table {file.table!r} to {file.place}, {file.size_bytes} "
                f"bytes, and on the driver {found}: the folder of the tables must be mounted under the same path on "
                "the driver and on every worker. Nothing was committed"
            )


def table_file_stats(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Bounds of every column, wide ones where Parquet has none: a reader may take a column without for an empty one."""
    stats: dict[str, Any] = {"numRecords": metadata.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    columns = [metadata.schema.column(n).path for n in range(len(metadata.schema))]
    for field in metadata.schema.to_arrow_schema():
        if field.name not in columns:  # a map or a list: it has no bounds
            continue
        place = columns.index(field.name)
        groups = [metadata.row_group(n).column(place).statistics for n in range(metadata.num_row_groups)]
        if groups and all(group is not None and group.has_null_count for group in groups):
            stats["nullCount"][field.name] = sum(group.null_count for group in groups)
        bounds = [(group.min, group.max) for group in groups if group is not None and group.has_min_max]
        whole = len(bounds) == len(groups)
        least, greatest = min((low for low, _ in bounds), default=None), max((high for _, high in bounds), default=None)
        for kind, bound in (("minValues", least), ("maxValues", greatest)):
            stats[kind][field.name] = _bound_of(field.type, bound if whole else None, is_least=kind == "minValues")
    return stats


def _bound_of(kind: Any, bound: Any, *, is_least: bool) -> Any:
    """A bound as JSON has it, never within the values; None of a time or a whole number that has none."""
    if pa.types.is_string(kind):
        if bound is None:
            return "" if is_least else GREATEST_TEXT
        return bound if len(bound) <= BOUND_TEXT else bound[:BOUND_TEXT] + ("" if is_least else GREATEST_TEXT)
    if pa.types.is_floating(kind):
        widest = -sys.float_info.max if is_least else sys.float_info.max
        return widest if bound is None else min(max(bound, -sys.float_info.max), sys.float_info.max)
    if isinstance(bound, datetime):
        return bound.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return bound.isoformat() if isinstance(bound, date) else bound
