"""Where the tasks of a batch copy their rows in PostgreSQL, until the driver adds them to the tables."""

import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.tables.landing import WrittenTableFile
from penstock.tables.overflow import NO_OVERFLOW, overflow_in
from penstock.tables.postgres_rows import postgres_rows_as_csv


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
        self._overflow = NO_OVERFLOW

    def write(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if self._connection is None:
            self._connection = psycopg.connect(self._dsn)
        self._overflow += overflow_in(rows)
        rows = rows.add_column(0, "attempt", pa.repeat(pa.scalar(self._attempt), rows.num_rows))
        columns = sql.SQL(", ").join(map(sql.Identifier, rows.schema.names))
        copying = sql.SQL("copy {} ({}) from stdin (format csv)").format(sql.Identifier(self._staged), columns)
        data = postgres_rows_as_csv(rows)
        with self._connection.cursor() as cursor, cursor.copy(copying) as copy:
            copy.write(data)
        self._rows += rows.num_rows
        self._size += len(data)

    def close(self) -> list[WrittenTableFile]:
        if self._connection is None:
            return []
        self._connection.commit()
        self._connection.close()
        place = f"{self._staged}/{self._attempt}"
        return [WrittenTableFile(self._name, place, self._size, self._rows, overflow=self._overflow)]
