"""The `metrics` table in PostgreSQL: `penstock_metrics`, one row for each metric and function."""

from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.tables.metrics_table import METRIC_ROWS

_CREATE = """create table if not exists penstock_metrics (
    metric text collate "C" not null, type text, function text collate "C" not null, unit text, description text,
    first_seen timestamptz not null, last_seen timestamptz not null, primary key (metric, function))"""
_ADD = """insert into penstock_metrics as known (metric, type, function, unit, description, first_seen, last_seen)
    values (%s, %s, %s, %s, %s, %s, %s) on conflict (metric, function) do update set
    type = coalesce(excluded.type, known.type), unit = coalesce(excluded.unit, known.unit),
    description = coalesce(excluded.description, known.description),
    first_seen = least(known.first_seen, excluded.first_seen), last_seen = greatest(known.last_seen, excluded.last_seen)
    """


def is_there(connection: psycopg.Connection[Any]) -> bool:
    found = connection.execute("select to_regclass('penstock_metrics') is not null").fetchone()
    return bool(found and found[0])


def create_metrics(connection: psycopg.Connection[Any]) -> None:
    if not is_there(connection):
        connection.execute(_CREATE)


def read_metrics(connection: psycopg.Connection[Any]) -> pa.Table:
    if not is_there(connection):
        return METRIC_ROWS.empty_table()
    listed = sql.SQL(", ").join(map(sql.Identifier, METRIC_ROWS.names))
    rows = connection.execute(sql.SQL("select {} from penstock_metrics order by metric, function").format(listed))
    columns: list[Any] = list(map(list, zip(*rows.fetchall()))) or [[] for _ in METRIC_ROWS]
    return pa.table(columns, schema=METRIC_ROWS)


def add_metrics(connection: psycopg.Connection[Any], rows: pa.Table) -> None:
    create_metrics(connection)
    found: list[tuple[Any, ...]] = list(zip(*(rows[name].to_pylist() for name in METRIC_ROWS.names)))
    with connection.transaction(), connection.cursor() as cursor:
        # In one order: two writers do not wait for each other.
        cursor.executemany(_ADD, [row for _, row in sorted(((row[0], row[2]), row) for row in found)])


def forget_metrics(connection: psycopg.Connection[Any], before: datetime) -> int:
    if not is_there(connection):
        return 0
    return connection.execute("delete from penstock_metrics where last_seen < %s", (before,)).rowcount
