"""The tables: partials appended batch by batch, read merged. Where they lie is one of three adapters behind one port.

    open_tables("/data/tables")                    Delta folders, one a table      penstock.tables.delta
    open_tables("file:///data/tables")             the same
    open_tables("postgresql://user@host/db")       PostgreSQL                      penstock.tables.postgres
    open_tables("parquet:/data/tables")            plain Parquet folders           penstock.tables.parquet

    minute  hour  day  top_n                       the tables, see `SCHEMAS`

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
from penstock.model.function import Function
from penstock.model.grouping import grouped
from penstock.model.level import Level
from penstock.model.partial import PARTIALS, TOP_N_ORDER, first_of_each, merged
from penstock.model.segment import Origin
from penstock.tables.landing import Landing, Written

LEVEL_ROWS = pa.schema([field for field in PARTIALS if field.name != "record"])
TOP_N_ROWS = pa.schema([PARTIALS.field(name) for name in ("metric", "function", "bucket", "entity", "record", "max")])
TOP_N = "top_n"
TOP_KEPT = 10  # entities of a metric and minute that the top-n table keeps
SCHEMAS: dict[str, Any] = {level.value: LEVEL_ROWS for level in Level} | {TOP_N: TOP_N_ROWS}


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences that a batch adds, of the writers that moved: after `start`, up to `end`."""

    source: str
    start: Mapping[str, int] = field(default_factory=dict)
    end: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)  # of writers: the queue, and its first sequence here

    @property
    def versions(self) -> dict[str, int]:
        """The guard: what a table says of itself once it has this batch; application and version, as Delta says."""
        return {self.application(writer): last for writer, last in self.end.items()} | {
            queue_application(writer, origin): self.end[writer] for writer, origin in self.origins.items()
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
            there = held.get(queue_application(writer, origin), -1)
            if there > self.start.get(writer, -1) and origin[1] <= there:
                raise TableConflict(
                    f"table {table!r} holds the queue of writer {writer!r} up to sequence {there}, added from another "
                    f"folder of segments, and this batch has it from {origin[1]} on: its points would count twice. "
                    "Move the copies away; a folder that is copied whole, with its .penstock-source, is known again"
                )
        return True


def queue_application(writer: str, origin: Origin) -> str:
    """By what a table says how far it holds a queue, whichever folder its segments lay in."""
    return f"penstock/queue/{origin[0]}/{writer}"


class Tables(Protocol):
    """Where the tables are kept. Guarantee: an append is in the table once or not at all, whatever crashes when."""

    location: str
    conflicts: int  # commits of appends that were tried again because another commit came first

    def held(self, name: str, applications: Iterable[str]) -> dict[str, int]:
        """Of these guards the versions that the table has; empty if there is no table yet."""
        ...

    def landing(self, label: str) -> Landing:
        """Where tasks write the rows of one batch, or of one backfill, until they are committed."""
        ...

    def append(self, name: str, written: Sequence[Written], batch: Batch) -> bool:
        """Add what tasks report, exactly that, unless the table has this batch already; say whether it did."""
        ...

    def replace(
        self,
        name: str,
        written: Sequence[Written],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Put what tasks report in the place of what the table holds of the buckets from `start` to before `end`.

        `check` is called once no append can be overlooked any more; if it raises, nothing is replaced.
        """
        ...

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        """The rows of a level as they lie there (schema `PARTIALS`, not merged), from `start` to before `end`."""
        ...

    def top_rows(self) -> pa.Table:
        """The rows of the top-n table as they lie there."""
        ...

    def compact(self, name: str) -> "Compaction":
        """Fold the rows of each series and bucket into one; readers and the running job are not disturbed."""
        ...

    def expire(self, name: str, before: datetime, metrics: tuple[str, ...] = (), but_not: tuple[str, ...] = ()) -> int:
        """Delete the buckets before `before`; how many rows went. Of these metrics only, or of all but those."""
        ...

    def vacuum(self, hours: int) -> int:
        """Remove files that no reader of the last `hours` can need; how many."""
        ...

    def describe(self, name: str) -> "Description":
        """What `penstock spark tables` shows."""
        ...


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did to one table."""

    rows_before: int
    rows_after: int
    files_before: int
    files_after: int


@dataclass(frozen=True, slots=True)
class Description:
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


def expired(before: datetime, metrics: tuple[str, ...], but_not: tuple[str, ...]) -> Any:
    """What `expire` deletes, as an expression of pyarrow."""
    doomed = pc.field("bucket") < before
    if metrics:
        doomed = doomed & pc.field("metric").isin(pa.array(metrics, pa.string()))
    return doomed & ~pc.field("metric").isin(pa.array(but_not, pa.string())) if but_not else doomed


def as_partials(rows: pa.Table) -> pa.Table:
    """Rows of a level in the schema `PARTIALS`: their record is null."""
    rows = rows.select(LEVEL_ROWS.names).cast(LEVEL_ROWS)
    return rows.add_column(PARTIALS.get_field_index("record"), "record", pa.nulls(rows.num_rows, pa.string()))


def read_level(tables: Tables, level: Level, start: datetime | None = None, end: datetime | None = None) -> pa.Table:
    """The merged rows of a level with their final values, sorted by series and bucket."""
    return with_finals(tables.partials(level, start, end), level)


def read_top_n(tables: Tables, n: int) -> pa.Table:
    """The `n` greatest of each minute, greatest first: per metric entities, per metric and entity records.

    Not more than the table keeps, `TOP_KEPT` entities and as many records as the function says: so far it is exact.
    """
    return _tops(tables.top_rows(), min(n, TOP_KEPT), lambda function: min(n, _records_kept(function)))


def folded(name: str, rows: pa.Table) -> pa.Table:
    """Rows of a table with those of one series and bucket made one, and those that no reader asks for left out."""
    if name == TOP_N:
        return _tops(rows, TOP_KEPT, _records_kept)
    order = [(column, "ascending") for column in ("metric", "entity", "bucket")]
    return merged(as_partials(rows)).select(LEVEL_ROWS.names).sort_by(order)


def _records_kept(function: str) -> int:
    return int(Function.parse(function).parameters[0])


def _tops(rows: pa.Table, entities: int, records: Callable[[str], int]) -> pa.Table:
    keys = [column for column in TOP_N_ROWS.names if column != "max"]
    if not rows.num_rows:
        return rows.select(TOP_N_ROWS.names)
    rows = grouped(rows, keys, [("max", "max")]).rename_columns([*keys, "max"]).cast(TOP_N_ROWS)
    plain = rows.filter(pc.is_null(rows["record"]))
    groups = ("metric", "function", "bucket")
    found = [first_of_each(plain, groups, [("max", "descending"), ("entity", "ascending")], entities)]
    for function in pc.unique(rows.filter(pc.is_valid(rows["record"]))["function"]).to_pylist():
        some = rows.filter((pc.field("function") == function) & pc.field("record").is_valid())
        found.append(first_of_each(some, (*groups, "entity"), TOP_N_ORDER, records(function)))
    return pa.concat_tables(found).select(TOP_N_ROWS.names)
