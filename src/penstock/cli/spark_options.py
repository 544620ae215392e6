"""Options that commands of `penstock spark` and `penstock tables` share."""

from pathlib import Path
from typing import Any

import click

from penstock.errors import ConfigError
from penstock.units import parse_bytes, parse_duration

# How long a table keeps its buckets if neither a definition nor the command says so. Records are the largest.
KEEP = {"minute": "7d", "hour": "30d", "day": "365d", "top_n": "3d"}

TABLES = "Where the tables are: a folder (Delta), parquet:FOLDER or postgresql://…"


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return parse_duration(value, param.name if param and param.name else "duration")


class Folder(click.ParamType[Path]):
    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from penstock.tables.location import local_folder

        folder = local_folder(value, f"--{param.name}" if param else "the folder")
        if folder.is_file():
            raise ConfigError(f"--{param.name if param else 'folder'} must be a folder, got the file {str(folder)!r}")
        return folder


class Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_bytes(value, param.name if param and param.name else "size")


def tables_option(command: Any) -> Any:
    """Said each time: a command that changes tables must not find some by itself."""
    return click.option("--tables", "location", required=True, envvar="PENSTOCK_TABLES", help=TABLES)(command)


def segments_option(command: Any) -> Any:
    return click.option(
        "--segments",
        required=True,
        envvar="PENSTOCK_SEGMENTS",
        type=Folder(),
        help="The folder of sealed segments: a path or a file:// URI.",
    )(command)


def definitions_option(command: Any) -> Any:
    return click.option(
        "--definitions",
        envvar="PENSTOCK_DEFINITIONS",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Metric definitions, for the levels and lifetimes that they name.",
    )(command)


def keep_option(command: Any) -> Any:
    return click.option(
        "--keep",
        multiple=True,
        metavar="TABLE=AGE",
        help=f"How long rows stay [default: {', '.join(f'{table}={age}' for table, age in KEEP.items())}].",
    )(command)


def maintenance_options(command: Any) -> Any:
    command = keep_option(command)
    command = click.option(
        "--maintain-every", default="1h", show_default=True, type=Duration(), help="Delete old rows so often; 0: never."
    )(command)
    return click.option(
        "--fold-every", default="5m", show_default=True, type=Duration(), help="Make rows final so often; 0: never."
    )(command)


def lifetimes(keep: tuple[str, ...]) -> dict[str, float]:
    """Seconds that each table keeps its rows."""
    ages = dict(KEEP)
    for text in keep:
        table, _, age = text.partition("=")
        if table not in KEEP or not age:
            raise ConfigError(f"--keep must be TABLE=AGE with one of {', '.join(KEEP)}, got {text!r}")
        ages[table] = age
    return {name: parse_duration(age, f"--keep {name}") for name, age in ages.items()}


def session_options(command: Any) -> Any:
    command = click.option("--master", envvar="PENSTOCK_MASTER", help="local[*] (default), spark://…, yarn, k8s://…")(
        command
    )
    command = click.option("--ui", is_flag=True, help="Open Spark's own page, on loopback.")(command)
    command = click.option("--event-log", help="A folder or URI for Spark's event log.")(command)
    return click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting for Spark; may be repeated.")(
        command
    )


def existing_tables(location: str) -> Any:
    """The tables; ConfigError if their folder is not there: a misspelt one would look like empty tables."""
    from penstock.tables.port import open_tables

    tables = open_tables(location)
    folder: Path | None = getattr(tables, "folder", None)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tables must be where a job has put its tables, and there is no folder {str(folder)!r}")
    return tables
