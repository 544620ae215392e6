"""The `penstock` command: one thin layer that parses and prints; the work is done elsewhere.

Exit codes:
  0  done; `run`: ended in good order
  1  it ran and something is wrong: a point or a requirement is missing, a queue is damaged, a port is taken
  2  the call or the configuration is wrong: nothing was done
  4  `run`: ended, but not everything was drained in time; it stays in the durable queues
  130  Ctrl-C, where a command does not end in good order by itself, as `run` and `relay` do
"""

import sys
from pathlib import Path

import click

from penstock.errors import ConfigError, PenstockError
from penstock.service.bench_commands import bench
from penstock.service.completion_commands import completion
from penstock.service.config_commands import config
from penstock.service.exit_codes import INTERRUPTED
from penstock.service.query_commands import query
from penstock.service.queue_commands import queue
from penstock.service.relay import relay
from penstock.service.run_commands import run
from penstock.service.spark_commands import spark


class _Group(click.Group):
    """Turns our own errors into one line that says what to do; a traceback is for what we did not foresee."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except PenstockError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                click.echo(err=True)  # the prompt goes below the ^C
            ctx.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="penstock", prog_name="penstock")
def main() -> None:
    """Takes telemetry in, holds it under pressure without losing any, and turns it into tables on Spark.

    \b
    Examples:
      penstock demo                    the whole pipeline on this machine, in half a minute
      penstock run                     receive OTLP and Prometheus, make tables of it
      penstock query                   what the tables hold
      penstock doctor                  what this machine has, what is missing, what to do
      penstock completion bash         completion for your shell (zsh, fish too)
    \b
    Exit codes:
      0  done
      1  it ran and something is wrong: a point missing, a queue damaged, a port taken
      2  the call or the configuration is wrong
      4  run: not everything was drained in time; it stays in the durable queues
      130  interrupted with Ctrl-C; run and relay end in good order, with 0, 1 or 4
    """


@main.command()
@click.option("--points", default=600_000, show_default=True, type=click.IntRange(10_000), help="How many to generate.")
@click.option(
    "--dir",
    "folder",
    default="penstock-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything goes; an earlier demo there is replaced.",
)
def demo(points: int, folder: Path) -> None:
    """Run the whole pipeline: generator, L1, durable queue, segments, Spark, tables.

    Nothing needs to be configured or running. At the end every generated point must be found in the minute, the hour
    and the day table; the exit code is 1 if one is missing.

    \b
    Examples:
      penstock demo
      penstock demo --points 5000000 --dir /tmp/demo
    """
    from rich.console import Console

    from penstock.service.doctor import require_extra

    require_extra("spark", "pyspark", "pyarrow", "deltalake")
    from penstock.service.demo import claimed, run_demo
    from penstock.service.demo_screen import Screen, summary
    from penstock.service.generator import Day

    console = Console()
    try:
        with claimed(folder):
            with Screen(console, points) as screen:
                outcome = run_demo(folder, Day(points=points), screen.show)
            summary(console, outcome)
    except OSError as error:
        raise click.ClickException(f"{error}: name a folder where you may write, with --dir") from error
    sys.exit(1 if outcome.problems else 0)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def doctor(as_json: bool) -> None:
    """Say what this machine has, what is missing, and what to do about it.

    The exit code is 0 if the embedded default (`penstock demo`) can run here, else 1.

    \b
    Examples:
      penstock doctor
      penstock doctor --json
    """
    from penstock.service.doctor import examine, render

    findings = examine()
    click.echo(render(findings, as_json=as_json))
    sys.exit(0 if all(finding.ok for finding in findings if finding.required) else 1)


main.add_command(bench)
main.add_command(completion)
main.add_command(config)
main.add_command(query)
main.add_command(queue)
main.add_command(relay)
main.add_command(run)
main.add_command(spark)
