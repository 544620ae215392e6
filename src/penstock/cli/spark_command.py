"""`penstock spark …`: run the job, make days anew, keep the tables small, look at them."""

import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from penstock.cli.config_command import config_option, configured_tables, load_config, named_config_option
from penstock.errors import ConfigError
from penstock.units import format_bytes, parse_bytes, parse_duration

# How long a table keeps its buckets if neither a definition nor the command says so. Records are the largest.
KEEP = {"minute": "7d", "hour": "30d", "day": "365d", "top_n": "3d"}

TABLES = "Where the tables are: a folder (Delta), parquet:FOLDER or postgresql://…"


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return parse_duration(value, param.name if param and param.name else "duration")


class _Folder(click.ParamType[Path]):
    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from penstock.tables.location import local_folder

        folder = local_folder(value, f"--{param.name}" if param else "the folder")
        if folder.is_file():
            raise ConfigError(f"--{param.name if param else 'folder'} must be a folder, got the file {str(folder)!r}")
        return folder


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_bytes(value, param.name if param and param.name else "size")


def _tables_option(command: Any) -> Any:
    """Said each time, or by -c: a command that changes tables must not find some by itself."""
    named = click.option("--tables", "location", envvar="PENSTOCK_TABLES", help=f"{TABLES} Or -c.")(command)
    return named_config_option(named)


def _segments_option(command: Any) -> Any:
    return click.option(
        "--segments",
        envvar="PENSTOCK_SEGMENTS",
        type=_Folder(),
        help="The folder of sealed segments: a path or a file:// URI. Or -c.",
    )(command)


def _definitions_option(command: Any) -> Any:
    return click.option(
        "--definitions",
        envvar="PENSTOCK_DEFINITIONS",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Metric definitions, for the levels and lifetimes that they name.",
    )(command)


def _session_options(command: Any) -> Any:
    command = click.option("--master", envvar="PENSTOCK_MASTER", help="local[*] (default), spark://…, yarn, k8s://…")(
        command
    )
    command = click.option("--ui", is_flag=True, help="Open Spark's own page, on loopback.")(command)
    command = click.option("--event-log", help="A folder or URI for Spark's event log.")(command)
    return click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting for Spark; may be repeated.")(
        command
    )


@click.group()
def spark() -> None:
    """The data pipeline on Spark: from segments to tables.

    \b
    Examples:
      penstock spark run --segments penstock-demo/segments --tables /tmp/tables --available-now
      penstock spark tables --tables penstock-demo/tables
    """
    from penstock.service.doctor import require_extra

    require_extra("spark", "pyspark", "pyarrow", "deltalake")


@spark.command()
@_segments_option
@_tables_option
@click.option("--checkpoint", help="Where Spark keeps its log [default: beside the segments, in .checkpoint].")
@click.option("--available-now", is_flag=True, help="Work off what is there, then end.")
@click.option("--trigger", default="2s", show_default=True, type=_Duration(), help="How often a batch begins.")
@click.option("--max-files", type=click.IntRange(1), help="Segments in one batch at most [default: 200].")
@click.option("--max-rows", type=click.IntRange(1), help="Rows in one batch at most [default: 10 M].")
@click.option("--max-bytes", type=_Size(), help="Bytes in one batch at most, like 512Mi [default: 1Gi].")
@click.option("--keep-segments", type=_Duration(), help="Delete segments of this age that are in all tables, like 1d.")
@_definitions_option
@_session_options
def run(
    file: Path | None,
    segments: Path | None,
    location: str | None,
    checkpoint: str | None,
    available_now: bool,
    trigger: float,
    max_files: int | None,
    max_rows: int | None,
    max_bytes: int | None,
    keep_segments: float | None,
    definitions: Path | None,
    master: str | None,
    ui: bool,
    event_log: str | None,
    conf: tuple[str, ...],
) -> None:
    """Follow the segments and keep the tables up to date.

    A query that fails is started again with growing pauses. SIGTERM lets the batch that runs finish.

    \b
    Examples:
      penstock spark run --segments segments --tables tables
      penstock spark run --segments segments --tables postgresql://me@db/metrics --available-now
      penstock spark run --segments /shared/segments --tables /shared/tables --master spark://host:7077
    """
    from penstock.model.level import Level
    from penstock.spark.job import JobConfig
    from penstock.spark.progress import JobProgress
    from penstock.spark.supervisor import Supervisor
    from penstock.tables.port import open_tables

    segments, location = _segments(segments, file), _tables(location, file)
    defined = _definitions(definitions, file)
    config = JobConfig(
        segments=segments.absolute(),
        checkpoint=checkpoint or (segments.absolute() / ".checkpoint").as_uri(),
        trigger=f"{int(trigger * 1000)} milliseconds",
        available_now=available_now,
        max_files=max_files,
        max_rows=max_rows,
        max_bytes=max_bytes,
        retain_segments=keep_segments,
        not_at={level: defined.not_at(level) for level in Level},
    )

    def show(progress: JobProgress) -> None:
        click.echo(
            f"batch {progress.batches}: {progress.rows:,} rows so far, {progress.rows_per_second:,.0f} rows/s, "
            f"{progress.batch_seconds:.2f} s"
        )

    if not segments.exists():  # on a cluster it may be the first to come; elsewhere it is misspelt
        click.echo(f"note: there is no folder {segments} yet; it is made, and watched for segments", err=True)
    session = _session(master, conf, ui=ui, event_log=event_log)
    try:
        supervisor = Supervisor(session, open_tables(location), config, show=show)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        supervisor.run()
    finally:
        session.stop()


@spark.command()
@_segments_option
@_tables_option
@click.option("--from", "first", required=True, type=click.DateTime(["%Y-%m-%d"]), help="The first day (UTC).")
@click.option("--to", "until", required=True, type=click.DateTime(["%Y-%m-%d"]), help="The day after the last.")
@click.option("--allow-loss", is_flag=True, help="Also if the segments hold fewer points than the tables.")
@_definitions_option
@_session_options
def backfill(
    file: Path | None,
    segments: Path | None,
    location: str | None,
    first: datetime,
    until: datetime,
    allow_loss: bool,
    definitions: Path | None,
    master: str | None,
    ui: bool,
    event_log: str | None,
    conf: tuple[str, ...],
) -> None:
    """Make whole days of all tables anew from the segments that are still there.

    Stop the job first: a backfill that it overtakes is refused.

    \b
    Examples:
      penstock spark backfill --segments segments --tables tables --from 2026-11-01 --to 2026-11-03
    """
    from penstock.model.level import Level
    from penstock.spark.backfill import backfill as run_backfill

    if first >= until:
        raise ConfigError(f"--from must be before --to, got {first:%Y-%m-%d} and {until:%Y-%m-%d}")
    segments = _segments(segments, file)
    defined, tables = _definitions(definitions, file), _existing(_tables(location, file))
    session = _session(master, conf, ui=ui, event_log=event_log)
    try:
        done = run_backfill(
            session,
            tables,
            segments.absolute(),
            first.date(),
            until.date(),
            allow_loss=allow_loss,
            not_at={level: defined.not_at(level) for level in Level},
        )
    finally:
        session.stop()
    click.echo(f"{done.before:,} points before, {done.after:,} after")


@spark.command()
@_tables_option
@click.option(
    "--vacuum", default=24, show_default=True, type=click.IntRange(1), help="Remove dead files this old, hours."
)
def compact(file: Path | None, location: str | None, vacuum: int) -> None:
    """Fold the rows of each series and bucket into one. The job may keep running; no answer changes.

    \b
    Examples:
      penstock spark compact --tables tables
      penstock spark compact -c penstock.yaml
    """
    from penstock.tables.port import SCHEMAS

    tables = _existing(_tables(location, file))
    for name in SCHEMAS:
        done = tables.compact(name)
        click.echo(
            f"{name:<7} {done.rows_before:>12,} rows -> {done.rows_after:>12,}   "
            f"{done.files_before:>6,} files -> {done.files_after:>6,}"
        )
    click.echo(f"{tables.vacuum(vacuum):,} files removed")


@spark.command()
@_tables_option
@_definitions_option
@click.option(
    "--keep",
    multiple=True,
    metavar="TABLE=AGE",
    help=f"How long [default: {', '.join(f'{table}={age}' for table, age in KEEP.items())}].",
)
@click.option("--now", type=click.DateTime(), help="Pretend that it is this time (UTC).")
def expire(
    file: Path | None, location: str | None, definitions: Path | None, keep: tuple[str, ...], now: datetime | None
) -> None:
    """Delete what is older than its lifetime: by table, or as a metric's definition says.

    \b
    Examples:
      penstock spark expire --tables tables
      penstock spark expire --tables tables --keep minute=3d --keep day=730d
    """
    from penstock.tables.maintenance import expire as expire_tables
    from penstock.tables.port import SCHEMAS

    ages: dict[str, float | str] = dict(KEEP)
    if file is not None:
        kept = _configured(file).tables.keep
        ages = {name: getattr(kept, name) for name in KEEP}
    for text in keep:
        table, _, age = text.partition("=")
        if table not in SCHEMAS or not age:
            raise ConfigError(f"--keep must be TABLE=AGE with one of {', '.join(SCHEMAS)}, got {text!r}")
        ages[table] = age
    tables = _existing(_tables(location, file))
    moment = (now or datetime.now(UTC)).replace(tzinfo=UTC)
    seconds = {name: parse_duration(age, f"--keep {name}") for name, age in ages.items()}
    for name, gone in expire_tables(tables, seconds, _definitions(definitions, file), moment):
        click.echo(f"{name:<7} {gone:>12,} rows deleted")


@spark.command("tables")
@click.option("--tables", "location", envvar="PENSTOCK_TABLES", help=f"{TABLES} [default: as the configuration says].")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@config_option
def show_tables(location: str | None, as_json: bool, file: Path | None) -> None:
    """Show what there is: rows, files, sizes and the time that they cover.

    \b
    Examples:
      penstock spark tables
      penstock spark tables --tables penstock-demo/tables
    """
    import json

    from penstock.tables.port import SCHEMAS

    tables = _existing(location or configured_tables(file))
    found = {name: tables.describe(name) for name in SCHEMAS}
    if as_json:
        rows = {
            name: {
                "rows": one.rows,
                "files": one.files,
                "bytes": one.size_bytes,
                "oldest": one.oldest and one.oldest.isoformat(),
                "newest": one.newest and one.newest.isoformat(),
            }
            for name, one in found.items()
        }
        click.echo(json.dumps({"location": tables.location, "tables": rows}, indent=2))
        return
    click.echo(f"{'table':<7} {'rows':>12} {'files':>7} {'size':>10}  {'oldest':<16}  {'newest':<16}")
    for name, one in found.items():
        times = [f"{moment:%Y-%m-%d %H:%M}" if moment else "-" for moment in (one.oldest, one.newest)]
        size = format_bytes(one.size_bytes)
        click.echo(f"{name:<7} {one.rows:>12,} {one.files:>7,} {size:>10}  {times[0]:<16}  {times[1]:<16}")


@spark.command()
def archive() -> None:
    """Make the class-data archive once, so that Java starts Spark in about half the time from then on.

    \b
    Examples:
      penstock spark archive
    """
    from penstock.spark.session import make_archive

    path = make_archive()
    click.echo(f"{path} ({format_bytes(path.stat().st_size)})")


def _existing(location: str) -> Any:
    """The tables; ConfigError if their folder is not there: a misspelt one would look like empty tables."""
    from penstock.tables.port import open_tables

    tables = open_tables(location)
    folder: Path | None = getattr(tables, "folder", None)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--tables must be where a job has put its tables, and there is no folder {str(folder)!r}")
    return tables


def _configured(file: Path | None) -> Any:
    return load_config(click.get_current_context(), file).config


def _tables(location: str | None, file: Path | None) -> str:
    """Where the tables are, as --tables or the file of -c says."""
    if location or file:
        return location or str(_configured(file).tables_location)
    raise ConfigError("must be set, or -c FILE for tables.location", field="--tables")


def _segments(folder: Path | None, file: Path | None) -> Path:
    """Where the segments are, as --segments or the file of -c says."""
    if folder or file:
        return folder or _configured(file).resolved(_configured(file).segments.location)
    raise ConfigError("must be set, or -c FILE for segments.location", field="--segments")


def _definitions(path: Path | None, file: Path | None = None) -> Any:
    from penstock.model.definition import Definitions
    from penstock.model.definition_file import load_definitions

    if path is None and file is not None and (named := _configured(file).definitions):
        path = Path(named)
    return load_definitions(path) if path else Definitions()


def _session(master: str | None, conf: tuple[str, ...], *, ui: bool, event_log: str | None) -> Any:
    from penstock.spark.session import shown_by, start_session

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which knows the master
    master = master or (None if submitted else "local[*]")
    settings = shown_by(master, ui=ui, event_log=event_log)
    for text in conf:
        key, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"--conf must be KEY=VALUE, got {text!r}")
        settings[key] = value
    session = start_session(master, settings)
    if session.sparkContext.uiWebUrl:
        click.echo(f"Spark's own page: {session.sparkContext.uiWebUrl}", err=True)
    return session


if __name__ == "__main__":  # spark-submit runs a file
    spark()
