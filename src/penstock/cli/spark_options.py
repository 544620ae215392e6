"""Options that commands of `penstock spark` and `penstock tables` share."""

from pathlib import Path
from typing import Any

import click

from penstock.cli.config_command import load_config_for_command, named_config_option
from penstock.errors import ConfigError
from penstock.units import parse_bytes, parse_duration

# How long a table keeps its buckets if neither a definition nor the command says so. Records are the largest.
KEEP = {"minute": "7d", "hour": "30d", "day": "365d", "top_n": "3d"}
FOLD_EVERY, MAINTAIN_EVERY = "5m", "1h"

TABLES = "Where the tables are: a folder (Delta), parquet:FOLDER or postgresql://…"


class DurationOption(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return parse_duration(value, param.name if param and param.name else "duration")


class FolderOption(click.ParamType[Path]):
    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from penstock.tables.location import local_tables_folder

        folder = local_tables_folder(value, f"--{param.name}" if param else "the folder")
        if folder.is_file():
            raise ConfigError(f"--{param.name if param else 'folder'} must be a folder, got the file {str(folder)!r}")
        return folder


class SizeOption(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_bytes(value, param.name if param and param.name else "size")


def tables_option(command: Any) -> Any:
    """Said each time, or by -c: a command that changes tables must not find some by itself."""
    named = click.option("--tables", "location", envvar="PENSTOCK_TABLES", help=f"{TABLES} Or -c.")(command)
    return named_config_option(named)


def segments_option(command: Any) -> Any:
    return click.option(
        "--segments",
        envvar="PENSTOCK_SEGMENTS",
        type=FolderOption(),
        help="The folder of sealed segments: a path or a file:// URI. Or -c.",
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
        "--maintain-every",
        type=DurationOption(),
        help=f"Delete old rows so often; 0: never [default: {MAINTAIN_EVERY}].",
    )(command)
    return click.option(
        "--fold-every", type=DurationOption(), help=f"Make rows final so often; 0: never [default: {FOLD_EVERY}]."
    )(command)


def pauses_by_options(fold: float | None, maintain: float | None, file: Path | None) -> tuple[float, float]:
    """Seconds between folds and between expiries, as the options or the file of -c say."""
    every: tuple[float | str, float | str] = FOLD_EVERY, MAINTAIN_EVERY
    if file is not None:
        configured = _configured(file).tables
        every = configured.fold_every, configured.maintain_every
    return (
        parse_duration(every[0] if fold is None else fold, "--fold-every"),
        parse_duration(every[1] if maintain is None else maintain, "--maintain-every"),
    )


def lifetimes_by_options(keep: tuple[str, ...], file: Path | None = None) -> dict[str, float]:
    """Seconds that each table keeps its rows, as --keep or the file of -c says."""
    ages: dict[str, float | str] = dict(KEEP)
    if file is not None:
        configured = _configured(file).tables.keep
        ages = {name: getattr(configured, name) for name in KEEP}
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


def tables_by_option(location: str) -> Any:
    """The tables; ConfigError if their folder is not there: a misspelt one would look like empty tables."""
    from penstock.tables.port import open_tables

    tables = open_tables(location)
    folder: Path | None = getattr(tables, "folder", None)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tables must be where a job has put its tables, and there is no folder {str(folder)!r}")
    return tables


def tables_location_by_options(location: str | None, file: Path | None) -> str:
    """Where the tables are, as --tables or the file of -c says."""
    if location or file:
        return location or str(_configured(file).tables_location)
    raise ConfigError("must be set, or -c FILE for tables.location", field="--tables")


def segments_folder_by_options(folder: Path | None, file: Path | None) -> Path:
    """Where the segments are, as --segments or the file of -c says."""
    if folder or file:
        return folder or _configured(file).resolved(_configured(file).segments.location)
    raise ConfigError("must be set, or -c FILE for segments.location", field="--segments")


def definitions_by_options(path: Path | None, file: Path | None) -> Any:
    """The definitions, as --definitions or the file of -c says; none if neither does."""
    from penstock.model.definition import Definitions
    from penstock.model.definition_file import load_definitions

    if path is None and file is not None and (named := _configured(file).definitions):
        path = Path(named)
    return load_definitions(path) if path else Definitions()


def _configured(file: Path | None) -> Any:
    return load_config_for_command(click.get_current_context(), file).config
