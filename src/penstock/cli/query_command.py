"""`penstock query`: the tables from the command line, without a JVM."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from penstock.cli.config_command import config_option, tables_of_command
from penstock.units import parse_duration

_EVER = 1e10  # seconds: centuries
SHOWN = 100  # rows of a table in a terminal; the newest


@click.command("query")
@click.argument("metric", required=False)
@click.option(
    "--by", multiple=True, metavar="LABEL", help="One group per value of it; '*': per series. May be repeated."
)
@click.option("--since", default="1h", show_default=True, metavar="DURATION", help="How far back: 30m, 6h, 7d.")
@click.option(
    "--level",
    type=click.Choice(["minute", "hour", "day"]),
    help="Which table [default: minute up to 6h back, hour up to 7d, else day].",
)
@click.option("--percentile", multiple=True, type=click.FloatRange(0, 100), metavar="P", help="As 95. May be repeated.")
@click.option("--top", type=click.IntRange(1), metavar="N", help="The N groups with the greatest value over the time.")
@click.option("--plot", "as_plot", is_flag=True, help="Draw it over time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated, with a header.")
@click.option(
    "--tables", "location", envvar="PENSTOCK_TABLES", help="Where they are [default: as the configuration says]."
)
@config_option
def query_command(
    metric: str | None,
    by: tuple[str, ...],
    since: str,
    level: str | None,
    percentile: tuple[float, ...],
    top: int | None,
    as_plot: bool,
    as_json: bool,
    as_csv: bool,
    location: str | None,
    file: Path | None,
) -> None:
    """Ask the tables for METRIC; without it, list the metrics that there are.

    Series are merged into one, or into one per value of the labels given with --by: counts add up, averages and
    percentiles are those of all points together.

    \b
    Columns of --csv and --json, the same for every metric:
      LABEL…     of --by, one column each (label_LABEL if it is called like one of the others)
      time       when the bucket begins, UTC; with --top: where the time that was asked for begins
      function   how the metric is kept: avg, sum, percentile(6), …
      points     how many: reports of a counter, values of a gauge, measurements of a histogram
      value      what the function gives; of a percentile the mean
      min        the least of the points
      max        the greatest of them
      last       the newest, where it is kept; empty where a group has several series
      p95        of --percentile 95, and so on
      p95_low    where a sender's buckets are wide: the true value is not below that
      p95_high   and not above that
    \b
    Examples:
      penstock query --tables penstock-demo/tables
      penstock query http.server.request.duration --by service --since 6h
      penstock query service_percentile --by service --percentile 95 --percentile 99 --top 5
      penstock query cpu --by host --since 2d --plot
      penstock query cpu --level hour --csv > cpu.csv
    """
    if as_plot + as_json + as_csv > 1:
        raise click.UsageError("--plot, --json and --csv exclude each other")
    if as_plot and top:
        raise click.UsageError(
            "--top is one row per group over the whole time, which --plot cannot draw: leave one out"
        )
    from penstock.service.doctor import require_extra

    require_extra("spark", "pyarrow", "deltalake")
    from datetime import timedelta

    from penstock.cli.query_screen import resolution_notes_on_screen
    from penstock.errors import PenstockError
    from penstock.model.level import Level
    from penstock.tables.port import open_tables
    from penstock.tables.query import Question, answer_from_tables, has_tables, metrics_in_tables, no_tables_yet

    place = location or tables_of_command(file)
    with _readable(place):
        tables = open_tables(place)
        if metric is None and not has_tables(tables):
            raise PenstockError(no_tables_yet(tables))
        found = metrics_in_tables(tables) if metric is None else []
    if metric is None:
        _list(found, as_json=as_json, as_csv=as_csv)
        return
    question = Question(
        metric=metric,
        since=timedelta(seconds=min(parse_duration(since, "--since"), _EVER)),
        by=by,
        level=Level(level) if level else None,
        ranks=percentile,
        top=top,
    )
    with _readable(place):
        rows = answer_from_tables(tables, question)
    for note in resolution_notes_on_screen(rows):
        click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps([row.flat() for row in rows], indent=2, ensure_ascii=False))
    elif as_csv:
        _write_csv([row.flat() for row in rows])
    else:
        title = f"{metric} by {question.level_read().value}" + (f", the last {since}" if top else "")
        _show(rows, title, as_plot=as_plot, is_top=top is not None)


@contextmanager
def _readable(location: str) -> Iterator[None]:
    """What a store says of a place that it cannot read, as an error with that place."""
    from deltalake.exceptions import DeltaError
    from pyarrow import ArrowException

    from penstock.errors import PenstockError

    try:
        yield
    except (DeltaError, ArrowException, OSError) as error:
        raise PenstockError(f"the tables at {location} cannot be read: {error}") from error


def _list(found: list[Any], *, as_json: bool, as_csv: bool) -> None:
    names = ("metric", "function", "unit", "points", "series")
    flat = [{name: getattr(one, name) for name in names} for one in found]
    if as_json:
        click.echo(json.dumps(flat, indent=2, ensure_ascii=False))
    elif as_csv:
        _write_csv(flat)
    else:
        from rich.console import Console

        from penstock.cli.query_screen import metrics_on_screen

        Console().print(metrics_on_screen(found))


def _show(rows: list[Any], title: str, *, as_plot: bool, is_top: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from penstock.cli.query_screen import plot_on_screen, rows_on_screen

    console = Console()
    if as_plot:
        has_colour = console.color_system is not None and not console.no_color
        console.print(Text.from_ansi(plot_on_screen(rows, title, min(console.width, 120), has_colour=has_colour)))
        return
    newest = sorted(rows, key=lambda row: row.time)[-SHOWN:] if not is_top else rows
    console.print(rows_on_screen(newest, title, is_top=is_top))
    if len(newest) < len(rows):
        click.echo(f"the newest {SHOWN} of {len(rows)} rows: --csv and --json give all, --top N sums up", err=True)


def _write_csv(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    sys.stdout.write(out.getvalue())
