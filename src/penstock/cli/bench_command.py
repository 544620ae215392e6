"""`penstock bench`: a quick measurement here, or the project's own benchmarks where there is a checkout."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click

from penstock.errors import PenstockError
from penstock.machine import how_to_install


@click.command("bench")
@click.argument("name", required=False)
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.1), help="For each measurement.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_command(name: str | None, seconds: float, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Measure what this machine does: the durable queue and ingest, some seconds each.

    NAME runs one of the project's benchmarks instead (a checkout is needed), with ARGUMENTS behind `--`.

    \b
    Examples:
      penstock bench
      penstock bench --seconds 10 --json
      penstock bench durable_queue
      penstock bench spark_rollup -- --help
    """
    if name is not None:
        sys.exit(_run_own(name, arguments))
    from penstock.service.quick_bench import quick_bench_measurements

    has_receivers = all(importlib.util.find_spec(one) for one in ("pyarrow", "numpy", "opentelemetry.proto"))
    results = []
    chosen = quick_bench_measurements(seconds, has_receivers=has_receivers)
    is_quiet = as_json or not sys.stderr.isatty()
    with click.progressbar(chosen, label="Measuring", file=sys.stderr, hidden=is_quiet) as steps:
        for _, measure in steps:
            results.append(measure())
    if as_json:
        click.echo(json.dumps([{**asdict(one), "rate": one.rate} for one in results], indent=2))
        return
    for one in results:
        cost = f"{one.cpu_per_million:,.1f} CPU-seconds per million"
        click.echo(f"{one.name:<16} {one.rate:>12,.0f} {one.unit}/s   {cost}")
    if not has_receivers:
        click.echo(f"ingest is left out: {how_to_install('receive')}", err=True)
    click.echo("one process; figures of record: `penstock bench NAME` in a checkout", err=True)


def _run_own(name: str, arguments: tuple[str, ...]) -> int:
    """One of the benchmarks in the checkout that we are in, or that this package is installed from."""
    roots = (Path.cwd(), Path(__file__).parents[3])
    root = next((root for root in roots if (root / "bench" / "__init__.py").exists()), None)
    if root is None:
        raise PenstockError("the benchmarks come with a checkout: clone the project, and run this in its folder")
    known = sorted(path.stem for path in (root / "bench").glob("*.py") if "__main__" in path.read_text())
    if name not in known:
        raise PenstockError(f"there is no benchmark {name!r}; there are {', '.join(known)}")
    return subprocess.run([sys.executable, "-m", f"bench.{name}", *arguments], cwd=root, check=False).returncode
