"""What `penstock demo` shows: live progress while it runs, a summary at the end."""

import json
import os
import sys
from datetime import datetime
from typing import Any

import plotext
import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from penstock.model.function import RANKS
from penstock.model.level import Level
from penstock.model.point import entity_of
from penstock.service import demo
from penstock.service.generator import DURATION
from penstock.tables.port import read_level, read_top_n
from penstock.units import format_bytes

SICK = entity_of({"service": "checkout", "endpoint": "POST /orders"})


class DemoScreen:
    """Draws a demo's progress while it is entered."""

    def __init__(self, console: Console, expected: int) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._edge = self._bars.add_task("generator ─► L1 ─► durable queue", total=expected, note="")
        self._segments = self._bars.add_task("durable queue ─► segments", total=None, note="")
        self._spark = self._bars.add_task("segments ─► Spark ─► tables", total=None, note="")

    def __enter__(self) -> "DemoScreen":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, progress: demo.DemoProgress) -> None:
        points, done = progress.generated, progress.spark == "done"
        if progress.fed:
            self._bars.update(self._edge, total=points)
            self._bars.update(self._segments, total=1, completed=1)
        self._bars.update(self._edge, completed=points, note=f"{points:,} points")
        self._bars.update(self._segments, note=f"{progress.segments} segments, {progress.partials:,} rows")
        self._bars.update(self._spark, total=1 if done else None, completed=int(done), note=progress.spark)


def demo_summary_on_screen(console: Console, outcome: demo.DemoOutcome) -> None:
    """Tables, a plot, the account, where everything is and what to try next."""
    console.print()
    console.print(_tables(outcome))
    console.print(_top_n(outcome))
    console.print(_percentiles(outcome))
    console.print(f"[bold]{_label(SICK)}: mean duration by hour, ms[/bold] (the peak is a bad deployment)")
    console.print(Text.from_ansi(_plot(outcome, min(console.width, 100))))
    console.print(_account(outcome))
    if not outcome.problems:
        console.print(_next_steps(outcome), soft_wrap=True)


def _tables(outcome: demo.DemoOutcome) -> Table:
    table = Table(title="Tables", title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("table")
    for column in ("rows", "points", "on disk", "newest bucket", "mean ms", "max ms", "per min"):
        table.add_column(column, justify="right", no_wrap=True)
    for level in Level:
        rows = read_level(outcome.tables, level)
        newest = _rows_of_faulty_service(rows)[-1]
        once = rows.filter(pc.not_equal(rows["metric"], demo.PERCENTILE))  # made of points that are in the others too
        table.add_row(
            level.value,
            f"{rows.num_rows:,}",
            f"{pc.sum(once['count']).as_py():,}",
            format_bytes(outcome.tables.describe(level.value).size_bytes),
            f"{newest['bucket']:%d %b %H:%M}",
            f"{newest['avg']:.1f}",
            f"{newest['max']:.1f}",
            f"{newest['cpm']:.2f}",
        )
    table.caption = f"values: {DURATION} of {_label(SICK)}"
    return table


def _top_n(outcome: demo.DemoOutcome) -> Table:
    rows = read_top_n(outcome.tables, 3).to_pylist()
    worst: datetime = max((row for row in rows if row["metric"] == DURATION), key=lambda row: row["max"])["bucket"]
    table = Table(title=f"Top 3 of the worst minute, {worst:%d %b %H:%M} UTC", title_justify="left")
    table.add_column("metric")
    table.add_column("entity")
    table.add_column("max", justify="right")
    for row in rows:
        if row["bucket"] == worst:
            table.add_row(row["metric"], _label(row["entity"]), f"{row['max']:.2f}")
    return table


def _percentiles(outcome: demo.DemoOutcome) -> Table:
    hours = read_level(outcome.tables, Level.HOUR)
    rows = hours.filter(pc.equal(hours["metric"], demo.PERCENTILE)).to_pylist()
    worst: datetime = max(rows, key=lambda row: row["p99"])["bucket"]
    table = Table(title=f"Percentiles of the worst hour, {worst:%d %b %H:%M} UTC, ms", title_justify="left")
    table.add_column("service")
    ranks = [f"p{rank}" for rank in RANKS]
    for name in ("requests", *ranks):
        table.add_column(name, justify="right")
    for row in rows:
        if row["bucket"] == worst:
            table.add_row(_label(row["entity"]), f"{row['count']:,}", *(f"{row[rank]:.1f}" for rank in ranks))
    return table


def _label(entity: str) -> str:
    """An entity for display: its labels' values, the service first."""
    labels = json.loads(entity)
    return ", ".join([labels.pop("service"), *labels.values()])


def _rows_of_faulty_service(rows: Any) -> list[dict[str, Any]]:
    one = rows.filter(pc.and_(pc.equal(rows["metric"], DURATION), pc.equal(rows["entity"], SICK)))
    found: list[dict[str, Any]] = one.to_pylist()
    return found


def _plot(outcome: demo.DemoOutcome, width: int) -> str:
    hours = _rows_of_faulty_service(read_level(outcome.tables, Level.HOUR))
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 12)
    figure.theme("colorless")
    figure.draw(figure.bar([f"{row['bucket']:%H}" for row in hours], [row["avg"] for row in hours]))
    return str(figure.build())


def _account(outcome: demo.DemoOutcome) -> Panel:
    generated = sum(outcome.generated.values())
    if outcome.problems:
        return Panel("\n".join(outcome.problems), title="NOT every point is accounted for", border_style="red")
    here = escape(str(outcome.folder))
    lines = [
        f"[bold]{generated:,} points generated = {generated:,} points in each table[/bold]",
        f"(minute, hour and day), merged to {outcome.partials:,} rows at the edge",
        f"({generated / outcome.partials:.1f} points a row) and sealed in {outcome.segments} segments.",
        "The top-n table is that of the minute table.",
        f"{outcome.seconds:.0f} s in all; Spark was up after {outcome.spark_seconds:.0f} s.",
        "",
        f"tables       {here}/tables/{{minute,hour,day,top_n,metrics}}",
        "             (Delta: Spark, DuckDB, Polars and pandas read them)",
        f"segments     {here}/segments",
        f"queue        {here}/queue",
        f"Spark's log  {here}/spark.log",
    ]
    return Panel("\n".join(lines), title="Every point is accounted for", border_style="green", expand=False)


def _next_steps(outcome: demo.DemoOutcome) -> Text:
    """Without a frame and unbroken, so that they can be copied from a narrow terminal."""
    here, command = outcome.folder, os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else "penstock"
    commands = [
        "demo --points 5000000",
        f"queue inspect {here}/queue",
        f"query {DURATION} --tables {here}/tables --by service --since 2d --plot",
        f"spark tables --tables {here}/tables",
        "doctor",
    ]
    text = Text("Try next\n", "bold", no_wrap=True, overflow="ignore")
    return text.append("\n".join(f"  {command} {rest}" for rest in commands), "not bold")
