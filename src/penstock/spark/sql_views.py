"""The tables in Spark SQL: `penstock.hour` and its like, and functions for what is not a column.

    register(spark, "/data/tables")
    select labels['service'], bucket, p95 from penstock.hour where metric = 'order.duration'

The functions are expressions of Spark's own, so nothing leaves the JVM.
"""

import os
from collections.abc import Iterator, Sequence

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark.table_source import SCHEMAS, TableSource, seen_schema
from penstock.tables.catalog_sql import spark_functions
from penstock.tables.port import open_tables

SCHEMA = "penstock"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession, tables: str | os.PathLike[str], *, labels: Sequence[str] = ()) -> None:
    """Make `penstock.minute`, `.hour`, `.day`, `.top_n` and `.metrics` of the tables at a place, and the functions.

    They are views of the session's catalog: every query reads what is there when it is planned.
    `labels` are names of labels that queries filter by: each is a field of the column `label`, by which rows are left
    out while they are read.
    """
    location = os.fspath(tables)
    open_tables(location)  # ConfigError for a place that is none
    spark.dataSource.register(TableSource)
    spark.conf.set(PUSHDOWN, "true")
    for statement in statements(location, labels):
        spark.sql(statement)


def statements(location: str, labels: Sequence[str] = ()) -> Iterator[str]:
    """What makes the tables and functions in Spark SQL, where the source `penstock-table` is known."""
    yield f"CREATE DATABASE IF NOT EXISTS {SCHEMA}"
    for name in SCHEMAS:
        options = {"path": location, "table": name, "labels": ",".join(labels)}
        given = [(key, _quoted(value)) for key, value in options.items() if value]
        columns = ", ".join(
            f"`{column.name}` {column.dataType.simpleString()}"
            for column in from_arrow_schema(seen_schema(name, labels)).fields
        )
        # Spark forgets the options of such a table when it reads it (4.3), so a view names them again.
        source = f"{SCHEMA}.{name}_source"
        yield f"DROP TABLE IF EXISTS {source}"
        listed = ", ".join(f"`{key}` {value}" for key, value in given)
        yield f"CREATE TABLE {source} ({columns}) USING `{TableSource.name()}` OPTIONS ({listed})"
        listed = ", ".join(f"`{key}` = {value}" for key, value in given)
        yield f"CREATE OR REPLACE VIEW {SCHEMA}.{name} AS SELECT * FROM {source} WITH ({listed})"  # noqa: S608 - quoted
    yield from spark_functions()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
