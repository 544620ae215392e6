"""`penstock tables …`: what concerns the tables alone, without Spark."""

from pathlib import Path

import click

from penstock.cli.spark_options import tables_option
from penstock.errors import ConfigError


@click.group("tables")
def tables_command() -> None:
    """The tables by themselves: no Spark, no JVM.

    \b
    Examples:
      penstock tables upgrade --tables /data/tables
      penstock tables sql --engine duckdb --tables /data/tables
    """
    from penstock.service.doctor import require_extra

    require_extra("spark", "pyarrow", "deltalake")


@tables_command.command("upgrade")
@tables_option
def tables_upgrade_command(file: Path | None, location: str | None) -> None:
    """Convert tables of the format before. Stop the job first.

    Exact: every point is counted before and after. What was cut off is done when the command is called again.

    \b
    Examples:
      penstock tables upgrade --tables tables
      penstock tables upgrade -c penstock.yaml
    """
    from penstock.cli.spark_options import tables_by_option, tables_location_by_options
    from penstock.tables.upgrade import upgrade_tables

    found = 0
    for name, points in upgrade_tables(tables_by_option(tables_location_by_options(location, file))):
        click.echo(f"{name:<7} {points:>12,} points converted")
        found += 1
    click.echo("rows become final with the next fold" if found else "all tables have the format of this version")


@tables_command.command("sql")
@click.option("--engine", required=True, help="duckdb, postgres, spark, databricks or trino.")
@tables_option
def tables_sql_command(engine: str, file: Path | None, location: str | None) -> None:
    """Print the statements that make the views in an engine: penstock.minute, .hour, .day, .top_n, .metrics.

    DuckDB reads the files of Delta and Parquet tables without an extension. Spark, Databricks and Trino need their own
    Delta connector. In PostgreSQL, the job makes the views by itself.

    \b
    Examples:
      penstock tables sql --engine duckdb -c penstock.yaml > penstock.sql
      duckdb -init penstock.sql
      penstock tables sql --engine spark --tables /data/tables
    """
    from penstock.cli.spark_options import tables_location_by_options
    from penstock.tables.catalog_sql import ENGINES, catalog_sql
    from penstock.tables.location import local_tables_folder

    if engine not in ENGINES:
        raise ConfigError(f"must be one of {', '.join(ENGINES)}, got {engine!r}", field="--engine")
    place = tables_location_by_options(location, file)
    click.echo(catalog_sql(engine, place))
    if (
        engine == "duckdb"
        and not ((folder := local_tables_folder(place.removeprefix("parquet:"), "--tables")) / "minute").is_dir()
    ):
        click.echo(f"Warning: there are no tables at {folder} on this machine yet; DuckDB will find none.", err=True)
