"""The `penstock` command: one thin layer that parses and prints; the work is done elsewhere.

Exit codes:
  0  done; `run`: ended in good order
  1  it ran and something is wrong: a point or a requirement is missing, a queue is damaged, a port is taken
  2  the call or the configuration is wrong: nothing was done
  4  `run`: ended, but not everything was drained in time; it stays in the durable queues
  130  Ctrl-C, where a command does not end in good order by itself, as `run` and `relay` do
"""

import os
import sys

import click

from penstock.cli.bench_command import bench_command
from penstock.cli.completion_command import completion_command
from penstock.cli.config_command import config_command
from penstock.cli.definitions_command import definitions_command
from penstock.cli.demo_command import demo_command
from penstock.cli.doctor_command import doctor_command
from penstock.cli.query_command import query_command
from penstock.cli.queue_command import queue_command
from penstock.cli.relay_command import relay_command
from penstock.cli.run_command import run_command
from penstock.cli.spark_command import spark_command
from penstock.cli.tables_command import tables_command
from penstock.errors import ConfigError, PenstockError
from penstock.secret_text import redacted
from penstock.service.exit_codes import INTERRUPTED


class _PenstockGroup(click.Group):
    """Turns our own errors into one line that says what to do; a traceback is for what we did not foresee."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.UsageError(redacted(str(error))) from error
        except PenstockError as error:
            raise click.ClickException(redacted(str(error))) from error
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                click.echo(err=True)  # the prompt goes below the ^C
            ctx.exit(INTERRUPTED)


@click.group(cls=_PenstockGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="penstock", prog_name="penstock")
@click.pass_context
def main(ctx: click.Context) -> None:
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
    if ctx.invoked_subcommand != "spark":  # its tables are made with the umask of the shell
        os.umask(0o077)


main.add_command(bench_command)
main.add_command(completion_command)
main.add_command(config_command)
main.add_command(definitions_command)
main.add_command(demo_command)
main.add_command(doctor_command)
main.add_command(query_command)
main.add_command(queue_command)
main.add_command(relay_command)
main.add_command(run_command)
main.add_command(spark_command)
main.add_command(tables_command)
