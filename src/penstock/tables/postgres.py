"""Tables in PostgreSQL: rows and guard in one transaction.

    penstock_minute  penstock_hour  penstock_day  penstock_top_n     partitioned by date: penstock_minute_20261118
    penstock_metrics                                                 what is known of metrics
    penstock_guard (table_name, application, version)                which batches each table holds
    penstock.minute  penstock.hour …                                 views, see `penstock.tables.postgres_views`
    penstock_staged_<time>_<id>_<table>                              what the tasks of one batch have copied

Tasks copy their rows into staging tables. One transaction of the driver adds them, then the staging tables go. A fold
takes the rows of the series and buckets that have increments out and puts final rows in, in one transaction: a reader
sees the ones or the others. The comment of a table names its format.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from penstock.errors import ConfigError, RowsMissing, StoreUnavailable, TablesOutdated
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.secret_text import redacted
from penstock.tables.fold import Run, fold_rows, run_folds_here
from penstock.tables.landing import WrittenTableFile
from penstock.tables.overflow import OverflowLog, overflow_in
from penstock.tables.port import TableBatch, TableCompaction, TableDescription
from penstock.tables.postgres_landing import StagedLanding
from penstock.tables.postgres_metrics import add_metrics, create_metrics, forget_metrics, read_metrics
from penstock.tables.postgres_rows import TYPES, held_guards, postgres_rows_as_csv, table_from_postgres_rows
from penstock.tables.postgres_views import BESIDE_VIEWS, VERSION, view_statements
from penstock.tables.table_rows import FORMAT, IDENTITY_OF, SCHEMAS, TOP_N, check_format, table_partials, table_records

log = logging.getLogger(__name__)
_STAGED = "penstock_staged_"
_FOLD_ROWS = 50_000  # increments that are folded at once
_FORMAT = "penstock.format="
_GUARD = """create table if not exists penstock_guard (
    table_name text not null, application text not null, version bigint not null,
    primary key (table_name, application))"""


class PostgresTables:
    """The tables in one database."""

    def __init__(self, location: str) -> None:
        self._dsn = location
        self.overflow = OverflowLog()
        self.conflicts = 0  # a lock lets one append at a time through
        self._has_views = False
        self.location = redacted(location)
        try:
            conninfo_to_dict(location)
        except psycopg.ProgrammingError:  # its text may quote the password
            raise ConfigError(
                f"tables must look like postgresql://user:password@host:5432/database, with / ? # % and @ in user or "
                f"password written as %2F %3F %23 %25 and %40, got {self.location!r}"
            ) from None

    def held(self, name: str, applications: Iterable[str] | None = None) -> dict[str, int]:
        with self._connect() as connection:
            self._prepare(connection, name)
            return held_guards(connection, name, applications)

    def landing(self, label: str) -> StagedLanding:
        """Staging tables of one batch, without a log: what they hold matters only until the batch is committed."""
        staged = {name: f"{_STAGED}{int(time.time())}_{uuid.uuid4().hex[:8]}_{name}" for name in SCHEMAS}
        create = sql.SQL("create unlogged table {} (attempt text, like {})")
        with self._connect() as connection:
            for name, table in staged.items():
                self._prepare(connection, name)
                connection.execute(create.format(sql.Identifier(table), _table(name)))
            self._make_views(connection)
        return StagedLanding(self._dsn, staged)

    def _make_views(self, connection: psycopg.Connection[Any]) -> None:
        """Make the views where they are missing or of another version; a role that may not goes on without."""
        if self._has_views:
            return
        self._has_views = True
        found = connection.execute("select obj_description(to_regnamespace('penstock'), 'pg_namespace')").fetchone()
        if found and (found[0] or "").endswith(f"version {VERSION}"):
            return
        try:
            with connection.transaction():
                connection.execute("select pg_advisory_xact_lock(hashtext('penstock'))")
                for name in SCHEMAS:
                    self._prepare(connection, name)
                create_metrics(connection)
                for statement in view_statements():
                    connection.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege as error:
            log.warning("The views of PostgreSQL are not made: grant create on the database. reason=%s", error)

    def append(self, name: str, written: Sequence[WrittenTableFile], batch: TableBatch) -> bool:
        with self._connect() as connection, connection.transaction():
            self._prepare(connection, name)
            # One writer a table at a time: a transaction that waits here sees the other's guard afterwards.
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"penstock_{name}",))
            if not batch.wanted_by(name, held_guards(connection, name, batch.versions)):
                return False
            self._merge(connection, name, written)
            connection.execute(
                "insert into penstock_guard select %s, * from unnest(%s::text[], %s::bigint[]) "
                "on conflict (table_name, application) do update set version = excluded.version",
                (name, list(batch.versions), list(batch.versions.values())),
            )
        self.overflow.add(one.overflow for one in written)
        return True

    def replace(
        self,
        name: str,
        written: Sequence[WrittenTableFile],
        start: datetime,
        end: datetime,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        with self._connect() as connection, connection.transaction():
            self._prepare(connection, name)
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"penstock_{name}",))
            check()
            doomed = sql.SQL("delete from {} where date >= %s and date < %s").format(_table(name))
            connection.execute(doomed, (start.date(), end.date()))
            self._merge(connection, name, written)

    def partials(
        self, level: Level, start: datetime | None = None, end: datetime | None = None, metric: str | None = None
    ) -> pa.Table:
        return table_partials(self._rows(level.value, start, end, metric))

    def records(self, level: Level, start: datetime | None = None, metric: str | None = None) -> pa.Table:
        return table_records(self._rows(TOP_N, start, None, metric, level.value))

    def metrics(self) -> pa.Table:
        with self._connect() as connection:
            return read_metrics(connection)

    def note_metrics(self, rows: pa.Table) -> None:
        with self._connect() as connection:
            add_metrics(connection, rows)

    def forget_metrics(self, before: datetime) -> int:
        with self._connect() as connection:
            return forget_metrics(connection, before)

    def compact(self, name: str, run: Run = run_folds_here) -> TableCompaction:
        before = self.describe(name)
        with self._connect() as connection:
            self._prepare(connection, name)
            connection.execute("select pg_advisory_lock(hashtext(%s))", (f"penstock_{name}_maintenance",))
            query = sql.SQL("select date, count(*) from {} where not is_final group by date order by date desc")
            for day, count in connection.execute(query.format(_table(name))).fetchall():
                shares = 1 + count // _FOLD_ROWS
                for share in range(shares):
                    self._fold(connection, name, day, share, shares)
                connection.execute(sql.SQL("vacuum (analyze) {}").format(_partition(name, day)))
        return TableCompaction(before.rows, self.describe(name).rows, 1, 1)

    def _fold(self, connection: psycopg.Connection[Any], name: str, day: date, share: int, shares: int) -> None:
        """One share of the series of a day. Increments that come in between are left for the next time."""
        keys = [sql.Identifier(key) for key in IDENTITY_OF[name] if key != "record_id"]
        same = sql.SQL(" and ").join(sql.SQL("t.{k} = touched.{k}").format(k=key) for key in keys)
        columns = sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(column)) for column in SCHEMAS[name].names)
        taking = sql.SQL(
            "with touched as (select distinct {keys} from {table} where date = %s and not is_final "
            "and series >= %s and series < %s) "
            "delete from {table} t using touched where t.date = %s and {same} returning {columns}"
        ).format(keys=sql.SQL(", ").join(keys), table=_table(name), same=same, columns=columns)
        bounds = [f"{(number << 32) // shares:08x}" if number < shares else "g" for number in (share, share + 1)]
        with connection.transaction():
            rows = connection.execute(taking, (day, *bounds, day)).fetchall()
            if rows:
                made = fold_rows(name, table_from_postgres_rows(name, rows))
                self._copy(connection, name, made)
                self.overflow.add([overflow_in(made)])

    def _copy(self, connection: psycopg.Connection[Any], name: str, rows: pa.Table) -> None:
        columns = sql.SQL(", ").join(map(sql.Identifier, rows.schema.names))
        copying = sql.SQL("copy {} ({}) from stdin (format csv)").format(_table(name), columns)
        with connection.cursor() as cursor, cursor.copy(copying) as copy:
            copy.write(postgres_rows_as_csv(rows))

    def expire(
        self,
        name: str,
        before: datetime,
        metrics: tuple[str, ...] = (),
        but_not: tuple[str, ...] = (),
        level: str | None = None,
    ) -> int:
        gone = 0
        with self._connect() as connection:
            self._prepare(connection, name)
            for partition, day in self._partitions(connection, name):
                if day >= before.date():
                    continue
                if metrics or but_not or level:
                    doomed = sql.SQL("delete from {} where (metric = any(%s)) = %s").format(partition)
                    if level:
                        doomed += sql.SQL(" and level = {}").format(sql.Literal(level))
                    gone += connection.execute(doomed, (list(metrics or but_not), bool(metrics))).rowcount
                    continue
                with connection.transaction():
                    connection.execute("set local lock_timeout = '10s'")  # readers go first; there is a next time
                    counted = connection.execute(sql.SQL("select count(*) from {}").format(partition)).fetchone()
                    connection.execute(sql.SQL("drop table {}").format(partition))
                gone += counted[0] if counted else 0
        return gone

    def _partitions(self, connection: psycopg.Connection[Any], name: str) -> list[tuple[sql.Identifier, date]]:
        found = connection.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = %s::regclass", (f"penstock_{name}",)
        )
        names = [table.rpartition(".")[2] for (table,) in found.fetchall()]
        return [(sql.Identifier(table), datetime.strptime(table[-8:], "%Y%m%d").date()) for table in sorted(names)]

    def mend(self, covered: object) -> int:
        return 0  # the server mends itself

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

    def describe(self, name: str) -> TableDescription:
        with self._connect() as connection:
            self._prepare(connection, name)
            query = sql.SQL("select count(*), min(bucket), max(bucket), pg_total_relation_size(%s) from {}")
            found = connection.execute(query.format(_table(name)), (f"penstock_{name}",)).fetchone()
        assert found is not None
        return TableDescription(rows=found[0], files=1, size_bytes=found[3], oldest=found[1], newest=found[2])

    def is_outdated(self, name: str) -> bool:
        try:
            self.describe(name)
        except TablesOutdated:
            return True
        return False

    @contextmanager
    def converting(
        self, name: str, columns: list[str], rows: int
    ) -> Iterator[tuple[Iterator[pa.Table], Callable[[pa.Table], None]]]:
        """The rows of a table of format 1, and what writes those of the table in its place: in one transaction."""
        old = sql.Identifier(f"penstock_{name}_format_1")
        with self._connect() as connection, connection.transaction():
            connection.execute(sql.SQL("alter table {} rename to {}").format(_table(name), old))
            self._prepare(connection, name)

            def batches() -> Iterator[pa.Table]:
                listed = sql.SQL(", ").join(map(sql.Identifier, columns))
                with connection.cursor("penstock_upgrade") as cursor:
                    cursor.execute(sql.SQL("select {} from {}").format(listed, old))
                    while found := cursor.fetchmany(rows):
                        yield pa.table(
                            list(map(list, zip(*found))),
                            schema=pa.schema([PARTIALS.field(column) for column in columns]),
                        )

            def write(made: pa.Table) -> None:
                if made.num_rows:
                    self._make_partitions(connection, name, pc.unique(made["date"]).to_pylist())
                    self._copy(connection, name, made)

            yield batches(), write
            connection.execute(sql.SQL("drop table {}").format(old))

    @contextmanager
    def _connect(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection; StoreUnavailable if it cannot be had, or is lost on the way."""
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                connection.execute(BESIDE_VIEWS)
                yield connection
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"PostgreSQL at {self.location} failed: {error}") from error

    def _prepare(self, connection: psycopg.Connection[Any], name: str) -> None:
        # An account that may only read, or a replica, may not even create what is there.
        there = connection.execute(
            "select to_regclass('penstock_guard'), to_regclass(%s), obj_description(to_regclass(%s), 'pg_class')",
            (f"penstock_{name}",) * 2,
        ).fetchone()
        assert there is not None
        if there[1] is not None:
            comment = there[2] or ""
            found = int(comment.removeprefix(_FORMAT)) if comment.startswith(_FORMAT) else 1
            check_format(found, self.location, name)
            if there[0] is not None:
                return
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(TYPES[str(column.type)]))
            for column in SCHEMAS[name]
        ]
        table, listed = _table(name), sql.SQL(", ").join(columns)
        statements: list[sql.SQL | sql.Composed] = [
            sql.SQL(_GUARD),
            sql.SQL("create table if not exists {} ({}) partition by range (date)").format(table, listed),
            sql.SQL("create index if not exists {} on {} (metric, bucket)").format(_index(name, "metric"), table),
            sql.SQL("create index if not exists {} on {} using gin (labels)").format(_index(name, "labels"), table),
            sql.SQL("create index if not exists {} on {} (date, series) where not is_final").format(
                _index(name, "increments"), table
            ),
            sql.SQL("comment on table {} is {}").format(table, sql.Literal(f"{_FORMAT}{FORMAT}")),
        ]
        connection.execute("select pg_advisory_lock(hashtext('penstock'))")  # "if not exists" alone is no lock
        try:
            for statement in statements:
                connection.execute(statement)
        finally:
            connection.execute("select pg_advisory_unlock(hashtext('penstock'))")

    def _make_partitions(self, connection: psycopg.Connection[Any], name: str, days: Iterable[date]) -> None:
        """A table for each new day. It is attached: a partition that is created as one waits for all readers."""
        for day in days:
            partition = _partition(name, day)
            there = connection.execute("select to_regclass(%s)", (partition.as_string(connection),)).fetchone()
            if there and there[0] is not None:
                continue
            with connection.transaction():
                connection.execute(
                    sql.SQL("create table {} (like {} including defaults)").format(partition, _table(name))
                )
                connection.execute(
                    sql.SQL("alter table {} attach partition {} for values from ({}) to ({})").format(
                        _table(name), partition, sql.Literal(day), sql.Literal(day + timedelta(days=1))
                    )
                )

    def _merge(self, connection: psycopg.Connection[Any], name: str, written: Sequence[WrittenTableFile]) -> None:
        """Add the staged rows that were reported."""
        columns = sql.SQL(", ").join(map(sql.Identifier, SCHEMAS[name].names))
        attempts: dict[str, list[WrittenTableFile]] = {}
        for one in written:
            attempts.setdefault(one.place.partition("/")[0], []).append(one)
        for staged, reported in attempts.items():
            names, table = [one.place.partition("/")[2] for one in reported], sql.Identifier(staged)
            days = sql.SQL("select distinct date from {} where attempt = any(%s)").format(table)
            self._make_partitions(connection, name, [day for (day,) in connection.execute(days, (names,)).fetchall()])
            adding = sql.SQL("insert into {} ({}) select {} from {} where attempt = any(%s)")
            added = connection.execute(adding.format(_table(name), columns, columns, table), (names,)).rowcount
            if added != sum(one.rows for one in reported):
                rows = sum(one.rows for one in reported)
                raise RowsMissing(f"tasks have staged {rows} rows of table {name!r}, PostgreSQL has {added} of them")

    def _rows(
        self,
        name: str,
        start: datetime | None = None,
        end: datetime | None = None,
        metric: str | None = None,
        level: str | None = None,
    ) -> pa.Table:
        bounds = {
            "bucket >= %s": start,
            "date >= %s": start and start.date(),
            "bucket < %s": end,
            "metric = %s": metric,
            "level = %s": level,
        }
        given = {text: bound for text, bound in bounds.items() if bound}
        where = sql.SQL(" where " + " and ".join(given)) if given else sql.SQL("")
        columns = sql.SQL(", ").join(map(sql.Identifier, SCHEMAS[name].names))
        with self._connect() as connection:
            self._prepare(connection, name)
            query = sql.SQL("select {} from {}").format(columns, _table(name)) + where
            return table_from_postgres_rows(name, connection.execute(query, tuple(given.values())).fetchall())


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(f"penstock_{name}")


def _partition(name: str, day: date) -> sql.Identifier:
    return sql.Identifier(f"penstock_{name}_{day:%Y%m%d}")


def _index(name: str, of: str) -> sql.Identifier:
    return sql.Identifier(f"penstock_{name}_by_{of}")
