"""`penstock spark …`: run the job, make days anew, keep the tables small, look at them."""

import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from penstock.cli.config_command import config_option, tables_of_command
from penstock.cli.spark_options import (
    TABLES,
    DurationOption,
    SizeOption,
    definitions_by_options,
    definitions_option,
    keep_option,
    lifetimes_by_options,
    maintenance_options,
    pauses_by_options,
    segments_folder_by_options,
    segments_option,
    session_options,
    tables_by_option,
    tables_location_by_options,
    tables_option,
)
from penstock.errors import ConfigError
from penstock.units import format_bytes


@click.group("spark")
def spark_command() -> None:
    """The data pipeline on Spark: from segments to tables.

    \b
    Examples:
      penstock spark run --segments penstock-demo/segments --tables /tmp/tables --available-now
      penstock spark tables --tables penstock-demo/tables
    """
    from penstock.service.doctor import require_extra

    require_extra("spark", "pyspark", "pyarrow", "deltalake")


@spark_command.command("run")
@segments_option
@tables_option
@click.option("--checkpoint", help="Where Spark keeps its log [default: beside the segments, in .checkpoint].")
@click.option("--available-now", is_flag=True, help="Work off what is there, then end.")
@click.option("--trigger", default="2s", show_default=True, type=DurationOption(), help="How often a batch begins.")
@click.option("--max-files", type=click.IntRange(1), help="Segments in one batch at most [default: 200].")
@click.option("--max-rows", type=click.IntRange(1), help="Rows in one batch at most [default: 10 M].")
@click.option("--max-bytes", type=SizeOption(), help="Bytes in one batch at most, like 512Mi [default: 1Gi].")
@click.option(
    "--keep-segments", type=DurationOption(), help="Delete segments of this age that are in all tables, like 1d."
)
@maintenance_options
@definitions_option
@session_options
def spark_run_command(
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
    fold_every: float | None,
    maintain_every: float | None,
    keep: tuple[str, ...],
    definitions: Path | None,
    master: str | None,
    ui: bool,
    event_log: str | None,
    conf: tuple[str, ...],
) -> None:
    """Follow the segments and keep the tables up to date.

    A query that fails is started again with growing pauses. SIGTERM lets the batch that runs finish. Beside the batches
    the tables are kept small: increments become final rows, old rows are deleted. With --available-now only at the end
    are rows made final.

    \b
    Examples:
      penstock spark run --segments segments --tables tables
      penstock spark run --segments segments --tables postgresql://me@db/metrics --available-now
      penstock spark run --segments /shared/segments --tables /shared/tables --master spark://host:7077
    """
    from penstock.model.level import Level
    from penstock.spark.fold_tasks import run_folds_on_spark
    from penstock.spark.job import JobConfig
    from penstock.spark.progress import JobProgress
    from penstock.spark.supervisor import JobSupervisor
    from penstock.tables.maintenance import Maintenance
    from penstock.tables.port import open_tables

    segments, location = segments_folder_by_options(segments, file), tables_location_by_options(location, file)
    defined = definitions_by_options(definitions, file)
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
    ages = lifetimes_by_options(keep, file)
    fold_every, maintain_every = pauses_by_options(fold_every, maintain_every, file)
    session = _session(master, conf, ui=ui, event_log=event_log)
    try:
        tables = open_tables(location)
        supervisor = JobSupervisor(session, tables, config, show=show)
        maintenance = Maintenance(
            tables, maintain_every, ages, lambda: defined, fold_every=fold_every, run=run_folds_on_spark(session)
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        if not available_now:
            maintenance.start()
        supervisor.run()
        maintenance.stop()
        if available_now and fold_every:
            maintenance.fold()
    finally:
        session.stop()


@spark_command.command("backfill")
@segments_option
@tables_option
@click.option("--from", "first", required=True, type=click.DateTime(["%Y-%m-%d"]), help="The first day (UTC).")
@click.option("--to", "until", required=True, type=click.DateTime(["%Y-%m-%d"]), help="The day after the last.")
@click.option("--allow-loss", is_flag=True, help="Also if the segments hold fewer points than the tables.")
@definitions_option
@session_options
def spark_backfill_command(
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
    segments = segments_folder_by_options(segments, file)
    defined, tables = (
        definitions_by_options(definitions, file),
        tables_by_option(tables_location_by_options(location, file)),
    )
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


@spark_command.command("compact")
@tables_option
@click.option(
    "--vacuum", default=24, show_default=True, type=click.IntRange(1), help="Remove dead files this old, hours."
)
def spark_compact_command(file: Path | None, location: str | None, vacuum: int) -> None:
    """Fold the rows of each series and bucket into one. The job may keep running; no answer changes.

    \b
    Examples:
      penstock spark compact --tables tables
      penstock spark compact -c penstock.yaml
    """
    from penstock.tables.port import SCHEMAS

    tables = tables_by_option(tables_location_by_options(location, file))
    for name in SCHEMAS:
        done = tables.compact(name)
        click.echo(
            f"{name:<7} {done.rows_before:>12,} rows -> {done.rows_after:>12,}   "
            f"{done.files_before:>6,} files -> {done.files_after:>6,}"
        )
    click.echo(f"{tables.vacuum(vacuum):,} files removed")


@spark_command.command("expire")
@tables_option
@definitions_option
@keep_option
@click.option("--now", type=click.DateTime(), help="Pretend that it is this time (UTC).")
def spark_expire_command(
    file: Path | None, location: str | None, definitions: Path | None, keep: tuple[str, ...], now: datetime | None
) -> None:
    """Delete what is older than its lifetime: by table, or as a metric's definition says.

    \b
    Examples:
      penstock spark expire --tables tables
      penstock spark expire --tables tables --keep minute=3d --keep day=730d
    """
    from penstock.tables.maintenance import expire_tables

    seconds = lifetimes_by_options(keep, file)
    tables = tables_by_option(tables_location_by_options(location, file))
    moment = (now or datetime.now(UTC)).replace(tzinfo=UTC)
    for name, gone in expire_tables(tables, seconds, definitions_by_options(definitions, file), moment):
        click.echo(f"{name:<7} {gone:>12,} rows deleted")


@spark_command.command("tables")
@click.option("--tables", "location", envvar="PENSTOCK_TABLES", help=f"{TABLES} [default: as the configuration says].")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@config_option
def spark_tables_command(location: str | None, as_json: bool, file: Path | None) -> None:
    """Show what there is: rows, files, sizes and the time that they cover.

    \b
    Examples:
      penstock spark tables
      penstock spark tables --tables penstock-demo/tables
    """
    import json

    from penstock.tables.port import SCHEMAS

    tables = tables_by_option(location or tables_of_command(file))
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


@spark_command.command("archive")
def spark_archive_command() -> None:
    """Make the class-data archive once, so that Java starts Spark in about half the time from then on.

    \b
    Examples:
      penstock spark archive
    """
    from penstock.spark.session import make_archive

    path = make_archive()
    click.echo(f"{path} ({format_bytes(path.stat().st_size)})")


def _session(master: str | None, conf: tuple[str, ...], *, ui: bool, event_log: str | None) -> Any:
    from penstock.spark.session import spark_page_settings, start_session

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which knows the master
    master = master or (None if submitted else "local[*]")
    settings = spark_page_settings(master, ui=ui, event_log=event_log)
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
    spark_command()
