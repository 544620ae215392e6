"""The `penstock` command: one thin layer that parses and prints; the work is done elsewhere."""

import click

from penstock import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
def main() -> None:
    """Takes telemetry in, holds it under pressure without losing any, and turns it into tables on Spark."""
