"""`penstock demo`: the whole pipeline on this machine."""

import sys
from pathlib import Path

import click


@click.command("demo")
@click.option("--points", default=600_000, show_default=True, type=click.IntRange(10_000), help="How many to generate.")
@click.option(
    "--dir",
    "folder",
    default="penstock-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything goes; an earlier demo there is replaced.",
)
def demo_command(points: int, folder: Path) -> None:
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
    from penstock.cli.demo_screen import DemoScreen, demo_summary_on_screen
    from penstock.service.demo import claim_demo_folder, run_demo
    from penstock.service.generator import DemoDay

    console = Console()
    try:
        with claim_demo_folder(folder):
            with DemoScreen(console, points) as screen:
                outcome = run_demo(folder, DemoDay(points=points), screen.show)
            demo_summary_on_screen(console, outcome)
    except OSError as error:
        raise click.ClickException(f"{error}: name a folder where you may write, with --dir") from error
    sys.exit(1 if outcome.problems else 0)
