"""`penstock definitions …`: a set to begin with, what a file makes, what it gives with real points."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from penstock.cli.config_command import config_option, load_config_for_command, write_command_output
from penstock.units import parse_duration

SETS = Path(__file__).with_name("definition_sets")
_SHOWN = 5  # series of a definition in a terminal; --json has all
_file = click.argument("definition_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))


@click.group("definitions")
def definitions_command() -> None:
    """Metric definitions: which metrics are made of which points.

    \b
    Examples:
      penstock definitions init services --out definitions.yaml
      penstock definitions check definitions.yaml
      penstock definitions try definitions.yaml --listen 127.0.0.1:14318 --for 2m
    """


@definitions_command.command("init")
@click.argument("name", type=click.Choice(sorted(path.stem for path in SETS.glob("*.yaml"))))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to write it; not over a file.")
def definitions_init_command(name: str, out: Path | None) -> None:
    """Write a set to begin with: `services` speaks OpenTelemetry's conventions, `prometheus` Prometheus' habits.

    \b
    Examples:
      penstock definitions init services
      penstock definitions init prometheus --out definitions.yaml
    """
    text = (SETS / f"{name}.yaml").read_text()
    if out is None:
        click.echo(text, nl=False)
        return
    write_command_output(out, text)
    click.echo(
        f"{out} is written: penstock definitions check {out}, then definitions: {out} in penstock.yaml", err=True
    )


@definitions_command.command("check")
@_file
def definitions_check_command(definition_file: Path) -> None:
    """Say whether the definitions can be used, what each makes, and which metrics it takes out of the tables.

    The exit code is 0 if they can, 2 if they cannot: the message names the place.

    \b
    Examples:
      penstock definitions check definitions.yaml
    """
    from penstock.service.doctor import require_extra

    require_extra("receive", "pyarrow")
    from penstock.model.definition_file import load_definitions

    found = load_definitions(definition_file)
    sources = {metric.source for metric in found.metrics}
    click.echo(f"{definition_file}: fine, {len(found.metrics)} definitions of {len(sources)} metrics")
    width = max((len(metric.name) for metric in found.metrics), default=0)
    for metric in found.metrics:
        click.echo(f"  {metric.name:<{width}}  {_described(metric)}")
    if found.removed:
        click.echo(
            f"note: kept only as these definitions say, and not by their own labels: {', '.join(found.removed)}; "
            "keep_source: true in a definition keeps its source as well",
            err=True,
        )
    if found.undefined == "drop":
        click.echo("note: undefined: drop, so metrics that are no definition's source are left out", err=True)


def _described(metric: Any) -> str:
    by = "by all its labels" if metric.entity is None else f"by {', '.join(metric.entity) or 'nothing: one series'}"
    kept = ", and the source as it is" if metric.keep_source else ""
    return f"{metric.function} of {metric.source} {by}{kept}"


@definitions_command.command("try")
@_file
@click.argument("points", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--listen", metavar="HOST:PORT", help="Take what is sent there over HTTP; it goes nowhere else.")
@click.option("--for", "seconds", default="1m", show_default=True, metavar="DURATION", help="How long to listen.")
@click.option("--segments", type=click.Path(file_okay=False, path_type=Path), help="What a service has sealed.")
@click.option("--since", default="1h", show_default=True, metavar="DURATION", help="How far back, of segments.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read, with every series.")
@config_option
@click.pass_context
def definitions_try_command(
    ctx: click.Context,
    definition_file: Path,
    points: tuple[Path, ...],
    listen: str | None,
    seconds: str,
    segments: Path | None,
    since: str,
    as_json: bool,
    file: Path | None,
) -> None:
    """Apply the definitions to points, and say what each takes, what it gives, and which labels never occur.

    POINTS are files with recorded requests: OTLP (protobuf or JSON, one or one a line, as a collector's file exporter
    writes them) or JSON events. Without them, --listen takes what senders send now, and --segments what a service has
    sealed; left out: in the folder that the configuration names. Segments hold only what is kept by own labels.

    The exit code is 0 if every definition takes points, 1 if one does not, or a label of its entity never occurs.

    \b
    Examples:
      penstock definitions try definitions.yaml
      penstock definitions try definitions.yaml recorded.jsonl
      penstock definitions try definitions.yaml --listen 127.0.0.1:14318 --for 2m
    """
    if bool(points) + (listen is not None) + (segments is not None) > 1:
        raise click.UsageError("POINTS, --listen and --segments exclude each other")
    from penstock.service.doctor import require_extra

    require_extra("receive", "aiohttp", "numpy", "pyarrow")
    from dataclasses import replace

    from penstock.model.definition_file import load_definitions
    from penstock.service.definition_trial import DefinitionTrial
    from penstock.service.trial_points import try_on_live_points, try_on_requests, try_on_segments
    from penstock.units import parse_address

    trial = DefinitionTrial(load_definitions(definition_file))
    config = load_config_for_command(ctx, file).config
    if points:
        try_on_requests(trial, list(points), replace(config.intake, initial_value="keep"))
    elif listen is not None:
        host, port = parse_address(listen, "--listen")
        duration = parse_duration(seconds, "--for", is_positive=True)

        def on_listening(chosen: int) -> None:
            click.echo(f"listening on {host}:{chosen} for {duration:g} s, or until Ctrl-C: send points there", err=True)

        with suppress(KeyboardInterrupt):
            try_on_live_points(trial, host, port, duration, config.intake, on_listening)
    else:
        folder = segments or config.resolved(config.segments.location)
        try_on_segments(trial, folder, time.time() - parse_duration(since, "--since"))
    results = trial.results()
    if as_json:
        click.echo(json.dumps([_flat(one) for one in results], indent=2, ensure_ascii=False))
    else:
        _show(definition_file, trial, results)
    sys.exit(1 if any(one.problems for one in results) or not trial.metrics else 0)


def _flat(one: Any) -> dict[str, Any]:
    return {
        "definition": one.definition.name,
        "source": one.definition.source,
        "function": str(one.definition.function),
        "points": one.points,
        "taken": one.taken,
        "series": [{"labels": series.labels, "value": series.value, **series.ranks} for series in one.series],
        "problems": one.problems,
        "notes": one.notes,
    }


def _show(file: Path, trial: Any, results: list[Any]) -> None:
    from penstock.service.printable import printable

    total = sum(metric.points for metric in trial.metrics.values())
    click.echo(f"{file}: {len(results)} definitions, tried with {total:,} points of {len(trial.metrics)} metrics")
    for one in results:
        click.echo(f"\n{one.definition.name}: {_described(one.definition)}")
        if one.points:
            click.echo(f"  takes {one.taken:,} of {one.points:,} points, {len(one.series):,} series")
        for series in one.series[:_SHOWN]:
            ranks = "".join(f"  {name} {_number(value)}" for name, value in series.ranks.items())
            labels = ", ".join(f"{label}={value!r}" for label, value in series.labels.items()) or "(all)"
            click.echo(printable(f"    {_number(series.value):>10}{ranks}  {labels}"))
        if len(one.series) > _SHOWN:
            click.echo(f"    … and {len(one.series) - _SHOWN:,} more: --json has all")
        for text in one.problems:
            click.echo(printable(f"  problem: {text}"))
        for text in one.notes:
            click.echo(printable(f"  note: {text}"))
    undefined = sorted(trial.metrics.keys() - {one.definition.source for one in results})
    if undefined:
        what = "kept by their own labels" if trial.definitions.undefined == "keep" else "left out (undefined: drop)"
        click.echo()
        click.echo(printable(f"no definition's source, so {what}: {', '.join(undefined)}"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
