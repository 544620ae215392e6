"""The tables: increments appended batch by batch, folded into final rows. Three adapters behind one port keep them.

    open_tables("/data/tables")                    Delta folders, one a table      penstock.tables.delta
    open_tables("file:///data/tables")             the same
    open_tables("postgresql://user@host/db")       PostgreSQL                      penstock.tables.postgres
    open_tables("parquet:/data/tables")            plain Parquet folders           penstock.tables.parquet

    minute  hour  day  top_n                       the tables, see `penstock.tables.table_rows`

Tasks write, the driver commits what they report (`penstock.tables.landing`). Every append carries its guard in the same
commit: up to which sequence of each writer the table now holds the points. So a batch that runs again changes nothing,
and a batch that does not follow what the table holds (another query on the same table) is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import TableConflict, TableOvertaken
from penstock.model.finals import with_finals
from penstock.model.function import is_function
from penstock.model.grouping import grouped_partials
from penstock.model.level import Level
from penstock.model.partial import SERIES, first_of_each
from penstock.model.segment import Origin
from penstock.tables.fold import Run, run_folds_here
from penstock.tables.landing import TableLanding, WrittenTableFile
from penstock.tables.table_rows import RECORDS, TOP_KEPT, records_kept, top_records
from penstock.tables.table_rows import SCHEMAS as SCHEMAS
from penstock.tables.table_rows import TOP_N as TOP_N


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The sequences that a batch adds, of the writers that moved: after `start`, up to `end`."""

    source: str
    start: Mapping[str, int] = field(default_factory=dict)
    end: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)  # of writers: the queue, and its first sequence here

    @property
    def versions(self) -> dict[str, int]:
        """The guard: what a table says of itself once it has this batch; application and version, as Delta says."""
        return {self.application(writer): last for writer, last in self.end.items()} | {
            table_application_of_queue(writer, origin): self.end[writer] for writer, origin in self.origins.items()
        }

    def application(self, writer: str) -> str:
        return f"penstock/{self.source}/{writer}"

    def wanted_by(self, table: str, held: Mapping[str, int]) -> bool:
        """Whether a table that holds `held` still needs this batch; TableConflict if it does not follow on that."""
        moved = {writer: last for writer, last in self.end.items() if last > self.start.get(writer, -1)}
        if all(held.get(self.application(writer), -1) >= last for writer, last in moved.items()):
            return False
        for writer in moved:
            begins, ends = self.start.get(writer, -1), held.get(self.application(writer), -1)
            where = (
                f"table {table!r} holds writer {writer!r} up to sequence {ends}, but this batch begins after {begins}"
            )
            if ends > begins:
                raise TableOvertaken(f"{where}: another query has added some of it")
            if ends < begins:
                raise TableConflict(
                    f"{where}: what lies between was never added. Restore the table, or delete the checkpoint and all "
                    "tables of this job and run it again over the segments"
                )
        for writer, origin in self.origins.items():
            there = held.get(table_application_of_queue(writer, origin), -1)
            if there > self.start.get(writer, -1) and origin[1] <= there:
                raise TableConflict(
                    f"table {table!r} holds the queue of writer {writer!r} up to sequence {there}, added from another "
                    f"folder of segments, and this batch has it from {origin[1]} on: its points would count twice. "
                    "Move the copies away; a folder that is copied whole, with its .penstock-source, is known again"
                )
        return True


def table_application_of_queue(writer: str, origin: Origin) -> str:
    """By what a table says how far it holds a queue, whichever folder its segments lay in."""
    return f"penstock/queue/{origin[0]}/{writer}"


class Tables(Protocol):
    """Where the tables are kept. Guarantee: an append is in the table once or not at all, whatever crashes when."""

    location: str
    conflicts: int  # commits of appends that were tried again because another commit came first

    def held(self, name: str, applications: Iterable[str]) -> dict[str, int]:
        """Of these guards the versions that the table has; empty if there is no table yet."""
        ...

    def landing(self, label: str) -> TableLanding:
        """Where tasks write the rows of one batch, or of one backfill, until they are committed."""
        ...

    def append(self, name: str, written: Sequence[WrittenTableFile], batch: TableBatch) -> bool:
        """Add what tasks report, exactly that, unless the table has this batch already; say whether it did."""
        ...

    def replace(
        self,
        name: str,
        written: Sequence[WrittenTableFile],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Put what tasks report in the place of what the table holds of the days from `start` to before `end`.

        `check` is called once no append can be overlooked any more; if it raises, nothing is replaced.
        """
        ...

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        """The rows of a level as they lie there (schema `PARTIALS`, not merged), from `start` to before `end`."""
        ...

    def records(self, level: Level, start: datetime | None = None, metric: str | None = None) -> pa.Table:
        """The rows of the top-n table as they lie there (schema `RECORDS`), from `start` on."""
        ...

    def compact(self, name: str, run: Run = run_folds_here) -> "TableCompaction":
        """Make the rows of each series and bucket one that is final; readers and the running job are not disturbed.

        `run` runs the tasks of it, here or on executors.
        """
        ...

    def expire(self, name: str, before: datetime, metrics: tuple[str, ...] = (), but_not: tuple[str, ...] = ()) -> int:
        """Delete the days that end by `before`; how many rows went. Of these metrics only, or of all but those."""
        ...

    def vacuum(self, hours: int) -> int:
        """Remove files that no reader of the last `hours` can need; how many."""
        ...

    def describe(self, name: str) -> "TableDescription":
        """What `penstock spark tables` shows."""
        ...


@dataclass(frozen=True, slots=True)
class TableCompaction:
    """What a compaction did to one table."""

    rows_before: int
    rows_after: int
    files_before: int
    files_after: int


@dataclass(frozen=True, slots=True)
class TableDescription:
    """One table at a glance."""

    rows: int
    files: int
    size_bytes: int
    oldest: datetime | None = None
    newest: datetime | None = None


def open_tables(location: str) -> Tables:
    """The tables at `location`; nothing is created or looked at yet. ConfigError for a place that is none of these."""
    if location.startswith(("postgresql://", "postgres://")):
        from penstock.tables.postgres import PostgresTables

        return PostgresTables(location)
    if location.startswith("parquet:"):
        from penstock.tables.parquet import ParquetTables

        return ParquetTables(location.removeprefix("parquet:"))
    from penstock.tables.delta import DeltaTables

    return DeltaTables(location)


def expired_table_rows(metrics: tuple[str, ...], but_not: tuple[str, ...]) -> Any:
    """What `expire` deletes of a day, as an expression of pyarrow."""
    if metrics:
        return pc.field("metric").isin(pa.array(metrics, pa.string()))
    return ~pc.field("metric").isin(pa.array(but_not, pa.string()))


def read_level(tables: Tables, level: Level, start: datetime | None = None, end: datetime | None = None) -> pa.Table:
    """The merged rows of a level with their final values, sorted by series and bucket."""
    return with_finals(tables.partials(level, start, end), level)


def read_top_n(tables: Tables, n: int, level: Level = Level.MINUTE) -> pa.Table:
    """The `n` greatest of each bucket, greatest first: per metric entities, per metric and entity records.

    Entities are those of the level's own table, `TOP_KEPT` at most; records as many as the function keeps.
    """
    records = top_records(tables.records(level), lambda function: min(n, records_kept(function)))
    found = [_top_entities(tables.partials(level), min(n, TOP_KEPT)), records.select(_TOP)]
    return pa.concat_tables(found)


_TOP = [name for name in RECORDS.names if name != "level"]


def _top_entities(partials: pa.Table, n: int) -> pa.Table:
    rows = partials.filter(is_function(partials["function"], lambda spec: spec.is_ranked))
    if not rows.num_rows:
        return RECORDS.empty_table().select(_TOP)
    rows = grouped_partials(rows, SERIES, [("max", "max")]).rename_columns([*SERIES, "max"])
    rows = rows.append_column("record", pa.nulls(rows.num_rows, pa.string())).select(_TOP)
    rows = rows.cast(pa.schema([RECORDS.field(name) for name in _TOP]))
    return first_of_each(rows, ("metric", "function", "bucket"), [("max", "descending"), ("entity", "ascending")], n)
