"""Statements that make the views of a place in an engine's catalog: DuckDB, PostgreSQL, Spark, Databricks, Trino.

Files with the statements lie beside this module. DuckDB and PostgreSQL need nothing else than the tables. Spark,
Databricks and Trino name the Delta tables (`penstock.hour_rows`) and make the views over them, so that each query reads
the newest version; they need their own Delta connector.
"""

from collections.abc import Iterator
from pathlib import Path

from penstock.errors import ConfigError
from penstock.model.level import Level
from penstock.tables.location import local_tables_folder
from penstock.tables.postgres_views import view_statements

ENGINES = ("databricks", "duckdb", "postgres", "spark", "trino")
_HERE = Path(__file__).parent


def catalog_sql(engine: str, location: str) -> str:
    """What `penstock tables sql` prints. ConfigError where an engine cannot read tables of that kind."""
    is_database = location.startswith(("postgresql://", "postgres://"))
    if (engine == "postgres") != is_database:
        raise ConfigError(
            f"must be postgres for tables in PostgreSQL, and for no others, got {engine!r}: the tables are at "
            f"{'postgresql://…' if is_database else location}",
            field="--engine",
        )
    if engine == "postgres":
        return "".join(f"{statement.strip()};\n\n" for statement in view_statements())
    if engine == "duckdb":
        folder = local_tables_folder(location.removeprefix("parquet:"), "--tables").absolute()
        return f"set variable penstock_tables = {_quoted(str(folder))};\n\n{(_HERE / 'duckdb.sql').read_text()}"
    if location.startswith("parquet:"):
        raise ConfigError(
            f"must be duckdb for plain Parquet tables, got {engine!r}: only a Delta log tells other engines which "
            "files hold a table now",
            field="--engine",
        )
    return _over_delta(engine, local_tables_folder(location, "--tables").absolute().as_uri())


def spark_functions() -> Iterator[str]:
    """The functions as those of one session."""
    for statement in (_HERE / "spark.sql").read_text().split(";\n"):
        _, is_function, rest = statement.partition("create or replace function penstock.")
        if is_function:
            yield f"create or replace temporary function {rest}"


def _over_delta(engine: str, location: str) -> str:
    text = (_HERE / ("trino.sql" if engine == "trino" else "spark.sql")).read_text()
    once, _, for_level = text.partition("\n-- for each level\n")
    made = [once, *(for_level.replace("$level", one.value).replace("$minutes", str(one.minutes)) for one in Level)]
    return "\n".join(made).replace("$location", location.replace("'", "%27"))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
