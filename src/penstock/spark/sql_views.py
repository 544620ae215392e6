"""The tables in Spark SQL: `penstock.hour` and its like, and functions for what is not a column.

    register(spark, "/data/tables")
    select labels['service'], bucket, p95 from penstock.hour where metric = 'order.duration'

The functions are expressions of Spark's own, so nothing leaves the JVM. DuckDB has the same, in `duckdb.sql`.
"""

import os
from collections.abc import Iterator, Sequence

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark.table_source import SCHEMAS, TableSource, seen_schema
from penstock.tables.port import open_tables

SCHEMA = "penstock"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_DISTRIBUTION = "ARRAY<STRUCT<index: BIGINT, count: BIGINT, value: DOUBLE>>"
# Rounded before it goes up: 0.55 of 100 points is a little more than 55 in doubles.
_RANK = "greatest(ceil(round(aggregate(distribution, 0D, (sum, one) -> sum + one.count) * fraction, 6)), 1D)"
_REGISTERS = "get(distribution, 0).value"
FUNCTIONS = (
    f"penstock_merge(distributions ARRAY<{_DISTRIBUTION}>) RETURNS {_DISTRIBUTION} "
    "RETURN flatten(array_compact(distributions))",
    f"penstock_percentile(distribution {_DISTRIBUTION}, fraction DOUBLE) RETURNS DOUBLE "
    f"""RETURN aggregate(
        sort_array(transform(distribution, one -> struct(one.value, one.count))),
        named_struct('left', {_RANK}, 'value', CAST(NULL AS DOUBLE)),
        (so_far, one) -> named_struct('left', so_far.left - one.count,
                                      'value', if(so_far.left > 0, one.value, so_far.value)),
        so_far -> so_far.value)""",
    # Ertl's estimator (arXiv 1702.01284): m² / (2 ln 2 · (m·σ(empty / m) + Σ 2^-rank)) of m registers. Of a register
    # that occurs twice the greater rank counts, which is the later one.
    f"penstock_distinct(distribution {_DISTRIBUTION}) RETURNS DOUBLE "
    f"""RETURN aggregate(
        sort_array(transform(distribution, one -> struct(one.index, one.count))),
        named_struct('index', -1L, 'rank', 0L, 'filled', 0D, 'sum', 0D),
        (so_far, one) -> named_struct(
            'index', one.index, 'rank', one.count,
            'filled', so_far.filled + if(one.index = so_far.index, 0D, 1D),
            'sum', so_far.sum + pow(2D, -one.count) - if(one.index = so_far.index, pow(2D, -so_far.rank), 0D)),
        so_far -> if(so_far.filled = 0, 0D, round(
            pow({_REGISTERS}, 2) / (2 * ln(2D) * (so_far.sum + {_REGISTERS} * aggregate(
                sequence(1, 30), 1 - so_far.filled / {_REGISTERS},
                (sum, n) -> sum + pow(1 - so_far.filled / {_REGISTERS}, pow(2D, n)) * pow(2D, n - 1)))))))""",
)


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
    for function in FUNCTIONS:
        yield f"CREATE OR REPLACE TEMPORARY FUNCTION {function}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
