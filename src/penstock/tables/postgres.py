"""Tables in PostgreSQL: rows and guard in one transaction.

    penstock_minute  penstock_hour  penstock_day  penstock_top_n     one row per identity, kept merged by an upsert
    penstock_guard (table_name, application, version)                which batches each table holds

The driver copies a batch into a temporary table and merges it with one statement: there is nothing to compact, and
any client reads the tables as they are. For batches beyond some hundred thousand rows Delta is the better place.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.errors import MissingRequirement
from penstock.model.function import names_where
from penstock.model.level import Level
from penstock.model.partial import SERIES, STATES
from penstock.tables.port import (
    LEVEL_ROWS,
    SCHEMAS,
    TOP_N,
    TOP_N_ROWS,
    Batch,
    Compaction,
    Description,
    Rows,
    as_partials,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
        shown = re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", location)
        self.location = re.sub(r"(password=)[^&\s]*", r"\1***", shown)  # no password in what is shown

    def held(self, name: str, applications: Iterable[str]) -> dict[str, int]:
        with self._connect() as connection:
            self._prepare(connection, name)
            return _held(connection, name, applications)

    def append(self, name: str, rows: Rows, batch: Batch) -> bool:
        with self._connect() as connection:
            self._prepare(connection, name)
            if not batch.wanted_by(name, _held(connection, name, batch.versions)):
                return False
        here = rows if isinstance(rows, pa.Table) else rows.toArrow()
        data = _once(name, here.select(SCHEMAS[name].names).cast(SCHEMAS[name]))
        with self._connect() as connection, connection.transaction():
            # One writer a table at a time: a transaction that waits here sees the other's guard afterwards.
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"penstock_{name}",))
            if not batch.wanted_by(name, _held(connection, name, batch.versions)):
                return False
            self._merge(connection, name, data)
            for application, version in batch.versions.items():
                connection.execute(
                    "insert into penstock_guard values (%s, %s, %s) on conflict (table_name, application) "
                    "do update set version = excluded.version",
                    (name, application, version),
                )
        return True

    def replace(
        self, name: str, rows: "DataFrame", start: datetime, end: datetime, check: Callable[[], None] = lambda: None
    ) -> None:
        data = _once(name, rows.toArrow().select(SCHEMAS[name].names).cast(SCHEMAS[name]))
        with self._connect() as connection, connection.transaction():
            self._prepare(connection, name)
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"penstock_{name}",))
            check()
            doomed = sql.SQL("delete from {} where bucket >= %s and bucket < %s").format(_table(name))
            connection.execute(doomed, (start, end))
            self._merge(connection, name, data)

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
        return 0  # the server does it by itself

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
        # Who may only read, or reads from a replica, may not even create what is there.
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

    def _merge(self, connection: psycopg.Connection[Any], name: str, data: pa.Table) -> None:
        table, staged = _table(name), sql.Identifier("penstock_staged")
        columns = sql.SQL(", ").join(map(sql.Identifier, SCHEMAS[name].names))
        connection.execute(sql.SQL("create temp table {} (like {}) on commit drop").format(staged, table))
        copying = sql.SQL("copy {} ({}) from stdin").format(staged, columns)
        with connection.cursor() as cursor, cursor.copy(copying) as copy:
            for batch in _storable(data).to_batches(max_chunksize=10_000):
                for row in zip(*(column.to_pylist() for column in batch.columns)):
                    copy.write_row(row)
        merging = sql.SQL("insert into {} ({}) select {} from {} on conflict ({}) do update set {}")
        connection.execute(merging.format(table, columns, columns, staged, _identity(name), _assignments(name)))

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


def _once(name: str, rows: pa.Table) -> pa.Table:
    """The same rows: an upsert may not meet one key twice in a statement, and the frames of a batch are merged."""
    keys = _keys(name)
    assert rows.group_by(keys).aggregate([]).num_rows == rows.num_rows, f"rows of {name} are not merged"
    return rows


def _held(connection: psycopg.Connection[Any], name: str, applications: Iterable[str]) -> dict[str, int]:
    query = "select application, version from penstock_guard where table_name = %s and application = any(%s)"
    return dict(connection.execute(query, (name, list(applications))).fetchall())


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(f"penstock_{name}")


assert LEVEL_ROWS.names[: len(SERIES)] == list(SERIES)
