"""Where the tasks of a batch put their rows until the driver commits them, and what they report of it.

    driver   landing = tables.landing(label)        makes the folders (or staging tables) of one batch
    task     landing.writer("minute") ─► Written    one file for each table and task attempt, unseen by any reader
    driver   tables.append("minute", written, …)    commits exactly what was reported
    driver   landing.close()                        drops staging tables

A landing is pickled and sent to the tasks. An attempt that fails or is overtaken leaves a file that no report names:
it is never seen by a reader, and `vacuum` removes it.
"""

import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import RowsMissing

BOUND_TEXT = 32  # characters of a text that bounds a column; entities may be long
GREATEST_TEXT = "\U0010ffff"  # sorts behind everything


@dataclass(frozen=True, slots=True)
class Written:
    """What a task reports of the rows that it has written for one table."""

    table: str
    place: str  # a file's absolute path, or the name of what is staged in a database
    size_bytes: int
    rows: int
    stats: str = "{}"  # bounds of each column, as Delta's log has them


class TableWriter(Protocol):
    """The rows of one table, written by one task attempt."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> Written | None:
        """Finish; None if there were no rows."""
        ...


class Landing(Protocol):
    """Where one batch lands. Picklable: tasks on other machines write through a copy of it."""

    def writer(self, name: str) -> TableWriter: ...

    def close(self) -> None:
        """Give up what a landing no longer needs, once its batch is committed or refused."""
        ...


@dataclass(frozen=True, slots=True)
class FileLanding:
    """One folder for each table, made by the driver: a task that does not find it is on another file system."""

    folders: dict[str, str]

    def writer(self, name: str) -> "FileWriter":
        return FileWriter(name, Path(self.folders[name]))

    def close(self) -> None:
        pass  # what was committed stays where it is, the rest is removed by vacuum


class FileWriter:
    """One Parquet file, begun with its first rows."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._path = folder / f"part-{uuid.uuid4().hex}.parquet"
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0

    def write(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if self._writer is None:
            try:
                self._writer = pq.ParquetWriter(self._path, rows.schema, compression="zstd")
            except FileNotFoundError:
                raise RowsMissing(
                    f"an executor does not see {self._path.parent}, which the driver has made: the folder of the "
                    "tables must be mounted under the same path on the driver and on every worker"
                ) from None
        self._writer.write_table(rows)
        self._rows += rows.num_rows

    def close(self) -> Written | None:
        if self._writer is None:
            return None
        self._writer.close()
        metadata = pq.read_metadata(self._path)
        stats = json.dumps(stats_of(metadata), allow_nan=False)
        return Written(self._name, str(self._path), self._path.stat().st_size, self._rows, stats)


def check_visible(written: Sequence[Written]) -> None:
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


def stats_of(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Bounds of every column, wide ones where Parquet has none: a reader may take a column without for an empty one."""
    stats: dict[str, Any] = {"numRecords": metadata.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for place, field in enumerate(metadata.schema.to_arrow_schema()):
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
    return bound.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if isinstance(bound, datetime) else bound
