"""Tables in PostgreSQL: rows and guard in one transaction.

    penstock_minute  penstock_hour  penstock_day  penstock_top_n     one row per identity, kept merged by an upsert
    penstock_guard (table_name, application, version)                which batches each table holds

    penstock_staged_<time>_<id>_<table>                              what the tasks of one batch have copied

Tasks copy their rows into staging tables. One transaction of the driver merges them with one statement, so there is
nothing to compact, and any client reads the tables as they are. Then the staging tables go.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from penstock.errors import ConfigError, MissingRequirement, RowsMissing
from penstock.model.function import names_where
from penstock.model.level import Level
from penstock.model.partial import SERIES, STATES
from penstock.secret_text import redacted
from penstock.tables.landing import Written
from penstock.tables.port import (
    LEVEL_ROWS,
    SCHEMAS,
    TOP_N,
    TOP_N_ROWS,
    Batch,
    Compaction,
    Description,
    as_partials,
)

_STAGED = "penstock_staged_"
_TYPES = {"string": "text", "int64": "bigint", "double": "double precision", "timestamp[us, tz=UTC]": "timestamptz"}
_MERGES = {
    "sum": "{t}.{c} + excluded.{c}",
    "min": "least({t}.{c}, excluded.{c})",
    "max": "greatest({t}.{c}, excluded.{c})",
}
_GUARD = """create table if not exists penstock_guard (
    table_name text not null, application text not null, version bigint not null,
    primary key (table_name, application))"""

_OVERTAKEN = sql.SQL(
    "delete from {} as old using {} as new where split_part(old.function, '(', 1) = any(%s) and old.part < new.part "
    "and (old.metric, old.function, old.entity, old.bucket) = (new.metric, new.function, new.entity, new.bucket)"
)


class PostgresTables:
    """The tables in one database."""

    def __init__(self, location: str) -> None:
        self._dsn = location
        self.conflicts = 0  # a lock lets one append at a time through
        self.location = redacted(location)
        try:
            conninfo_to_dict(location)
        except psycopg.ProgrammingError:  # its text may quote the password
            raise ConfigError(
                f"tables must look like postgresql://user:password@host:5432/database, with / ? # % and @ in user or "
                f"password written as %2F %3F %23 %25 and %40, got {self.location!r}"
            ) from None

    def held(self, name: str, applications: Iterable[str]) -> dict[str, int]:
        with self._connect() as connection:
            self._prepare(connection, name)
            return _held(connection, name, applications)

    def landing(self, label: str) -> "StagedLanding":
        """Staging tables of one batch, without a log: what they hold matters only until the batch is committed."""
        staged = {name: f"{_STAGED}{int(time.time())}_{uuid.uuid4().hex[:8]}_{name}" for name in SCHEMAS}
        create = sql.SQL("create unlogged table {} (attempt text, like {})")
        with self._connect() as connection:
            for name, table in staged.items():
                self._prepare(connection, name)
                connection.execute(create.format(sql.Identifier(table), _table(name)))
        return StagedLanding(self._dsn, staged)

    def append(self, name: str, written: Sequence[Written], batch: Batch) -> bool:
        with self._connect() as connection, connection.transaction():
            self._prepare(connection, name)
            # One writer a table at a time: a transaction that waits here sees the other's guard afterwards.
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"penstock_{name}",))
            if not batch.wanted_by(name, _held(connection, name, batch.versions)):
                return False
            self._merge(connection, name, written)
            connection.execute(
                "insert into penstock_guard select %s, * from unnest(%s::text[], %s::bigint[]) "
                "on conflict (table_name, application) do update set version = excluded.version",
                (name, list(batch.versions), list(batch.versions.values())),
            )
        return True

    def replace(
        self,
        name: str,
        written: Sequence[Written],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        with self._connect() as connection, connection.transaction():
            self._prepare(connection, name)
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"penstock_{name}",))
            check()
            doomed = sql.SQL("delete from {} where bucket >= %s and bucket < %s").format(_table(name))
            connection.execute(doomed, (start, end))
            self._merge(connection, name, written)

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        return as_partials(self._rows(level.value, start, end, metric))

    def top_rows(self) -> pa.Table:
        return self._rows(TOP_N)

    def compact(self, name: str) -> Compaction:
        """An upsert keeps one row per identity already: only what was overtaken goes, and the space of old versions."""
        before = self.describe(name)
        with self._connect() as connection:
            self._prepare(connection, name)
            if name != TOP_N:
                newest = names_where(lambda spec: spec.keeps_newest)
                connection.execute(_OVERTAKEN.format(_table(name), _table(name)), (newest,))
            connection.execute(sql.SQL("vacuum (analyze) {}").format(_table(name)))
        return Compaction(before.rows, self.describe(name).rows, 1, 1)

    def expire(self, name: str, before: datetime, metrics: tuple[str, ...] = (), but_not: tuple[str, ...] = ()) -> int:
        with self._connect() as connection:
            self._prepare(connection, name)
            doomed = sql.SQL("delete from {} where bucket < %s and not metric = any(%s)").format(_table(name))
            if metrics:
                doomed = doomed + sql.SQL(" and metric = any(%s)")
                return connection.execute(doomed, (before, list(but_not), list(metrics))).rowcount
            return connection.execute(doomed, (before, list(but_not))).rowcount

    def vacuum(self, hours: int) -> int:
        """Drop what batches that were never committed have staged; rows the server clears by itself."""
        oldest, gone = int(time.time()) - 3600 * hours, 0
        with self._connect() as connection:
            found = connection.execute(
                "select tablename from pg_tables where schemaname = current_schema() and starts_with(tablename, %s)",
                (_STAGED,),
            )
            for (table,) in found.fetchall():
                if int(table.removeprefix(_STAGED).partition("_")[0]) < oldest:
                    connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(table)))
                    gone += 1
        return gone

    def describe(self, name: str) -> Description:
        with self._connect() as connection:
            self._prepare(connection, name)
            query = sql.SQL("select count(*), min(bucket), max(bucket), pg_total_relation_size(%s) from {}")
            found = connection.execute(query.format(_table(name)), (f"penstock_{name}",)).fetchone()
        assert found is not None
        return Description(rows=found[0], files=1, size_bytes=found[3], oldest=found[1], newest=found[2])

    @contextmanager
    def _connect(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection; MissingRequirement if it cannot be had, or is lost on the way."""
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                yield connection
        except psycopg.OperationalError as error:
            raise MissingRequirement(f"PostgreSQL at {self.location} failed: {error}") from error

    def _prepare(self, connection: psycopg.Connection[Any], name: str) -> None:
        # An account that may only read, or a replica, may not even create what is there.
        there = connection.execute("select to_regclass('penstock_guard'), to_regclass(%s)", (_identity_index(name),))
        if None not in (there.fetchone() or (None,)):
            return
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(_TYPES[str(column.type)]))
            for column in SCHEMAS[name]
        ]
        create = sql.SQL("create table if not exists {} ({})").format(_table(name), sql.SQL(", ").join(columns))
        index = sql.SQL("create unique index if not exists {} on {} ({}) nulls not distinct")
        earlier = f"penstock_{name}_{'_'.join(_keys(name))}_key"  # over whole texts, until they were found to be long
        drop = sql.SQL("alter table {} drop constraint if exists {}").format(_table(name), sql.Identifier(earlier))
        connection.execute("select pg_advisory_lock(hashtext('penstock'))")  # "if not exists" alone is no lock
        try:
            connection.execute(_GUARD)
            connection.execute(create)
            connection.execute(index.format(sql.Identifier(_identity_index(name)), _table(name), _identity(name)))
            connection.execute(drop)
        finally:
            connection.execute("select pg_advisory_unlock(hashtext('penstock'))")

    def _merge(self, connection: psycopg.Connection[Any], name: str, written: Sequence[Written]) -> None:
        """Add the staged rows that were reported. A row occurs in them once."""
        columns = sql.SQL(", ").join(map(sql.Identifier, SCHEMAS[name].names))
        merging = sql.SQL(
            "insert into {} ({}) select {} from {} where attempt = any(%s) on conflict ({}) do update set {}"
        )
        attempts: dict[str, list[Written]] = {}
        for one in written:
            attempts.setdefault(one.place.partition("/")[0], []).append(one)
        for staged, reported in attempts.items():
            table = sql.Identifier(staged)
            command = merging.format(_table(name), columns, columns, table, _identity(name), _assignments(name))
            added = connection.execute(command, ([one.place.partition("/")[2] for one in reported],)).rowcount
            if added != sum(one.rows for one in reported):
                rows = sum(one.rows for one in reported)
                raise RowsMissing(f"tasks have staged {rows} rows of table {name!r}, PostgreSQL has {added} of them")

    def _rows(
        self, name: str, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        bounds = {"bucket >= %s": start, "bucket < %s": end, "metric = %s": metric}
        given = {text: bound for text, bound in bounds.items() if bound}
        where = sql.SQL(" where " + " and ".join(given)) if given else sql.SQL("")
        columns = sql.SQL(", ").join(map(sql.Identifier, SCHEMAS[name].names))
        with self._connect() as connection:
            self._prepare(connection, name)
            query = sql.SQL("select {} from {}").format(columns, _table(name)) + where
            rows = connection.execute(query, tuple(given.values())).fetchall()
        return pa.table(list(map(list, zip(*rows))) or [[] for _ in SCHEMAS[name]], schema=SCHEMAS[name])


@dataclass(frozen=True, slots=True)
class StagedLanding:
    """One staging table for each table. A row carries the attempt that wrote it: one that failed counts for nothing."""

    dsn: str
    staged: dict[str, str]

    def writer(self, name: str) -> "StagedWriter":
        return StagedWriter(self.dsn, name, self.staged[name])

    def close(self) -> None:
        """Drop the staging tables; what cannot be dropped now, `vacuum` drops later."""
        with suppress(psycopg.OperationalError), psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("set lock_timeout = '1s'")  # a task attempt that was overtaken may still copy
            for table in self.staged.values():
                connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(table)))


class StagedWriter:
    """Copies rows into a staging table, in one transaction."""

    def __init__(self, dsn: str, name: str, staged: str) -> None:
        self._dsn = dsn
        self._name = name
        self._staged = staged
        self._attempt = uuid.uuid4().hex
        self._connection: psycopg.Connection[Any] | None = None
        self._rows = self._size = 0

    def write(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if self._connection is None:
            self._connection = psycopg.connect(self._dsn)
        rows = _storable(rows).add_column(0, "attempt", pa.repeat(pa.scalar(self._attempt), rows.num_rows))
        columns = sql.SQL(", ").join(map(sql.Identifier, rows.schema.names))
        copying = sql.SQL("copy {} ({}) from stdin (format csv)").format(sql.Identifier(self._staged), columns)
        text = pa.BufferOutputStream()
        pa_csv.write_csv(rows, text, pa_csv.WriteOptions(include_header=False))  # texts quoted, nulls bare
        data = text.getvalue()
        with self._connection.cursor() as cursor, cursor.copy(copying) as copy:
            copy.write(memoryview(data))
        self._rows += rows.num_rows
        self._size += data.size

    def close(self) -> Written | None:
        if self._connection is None:
            return None
        self._connection.commit()
        self._connection.close()
        return Written(self._name, f"{self._staged}/{self._attempt}", self._size, self._rows)


def _keys(name: str) -> list[str]:
    return [*SERIES, "part"] if name != TOP_N else [column for column in TOP_N_ROWS.names if column != "max"]


def _identity_index(name: str) -> str:
    return f"penstock_{name}_identity"


def _identity(name: str) -> sql.Composed:
    """What a row is known by. Of texts that may be long a digest: an index takes no more than 2,700 bytes."""
    digests = {key: sql.SQL("md5({})") for key in ("entity", "record")}
    return sql.SQL(", ").join(digests.get(key, sql.SQL("{}")).format(sql.Identifier(key)) for key in _keys(name))


def _storable(rows: pa.Table) -> pa.Table:
    """Metrics without NUL, which no text of PostgreSQL may have; entities and records are JSON, which escapes it."""
    metrics = pc.replace_substring(rows["metric"], "\0", "\N{REPLACEMENT CHARACTER}")
    return rows.set_column(rows.schema.get_field_index("metric"), "metric", metrics)


def _assignments(name: str) -> sql.Composed:
    """How a row that is there and one that comes become one: the merge of each state."""
    merges = {state.name: _MERGES[state.merge] for state in STATES if name != TOP_N or state.name == "max"}
    texts = [
        sql.SQL("{} = " + text.format(t=f"penstock_{name}", c=f'"{column}"')).format(sql.Identifier(column))
        for column, text in merges.items()
    ]
    return sql.SQL(", ").join(texts)


def _held(connection: psycopg.Connection[Any], name: str, applications: Iterable[str]) -> dict[str, int]:
    query = "select application, version from penstock_guard where table_name = %s and application = any(%s)"
    return dict(connection.execute(query, (name, list(applications))).fetchall())


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(f"penstock_{name}")


assert LEVEL_ROWS.names[: len(SERIES)] == list(SERIES)
