"""Answers of `penstock query` in a terminal: a table, a plot."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.model.function import Function
from penstock.service.printable import printable
from penstock.tables.query import MetricSummary, QueryRow

MOST_LINES = 6  # of a plot: more cannot be distinguished
_MARKS = "o+x*#@"  # what lines are drawn with where colours do not tell them apart
_HEIGHT = 16
_FAR_OFF = 0.25  # of a percentile, relative to its value: beyond it, its range is said


def rows_on_screen(rows: Sequence[QueryRow], title: str, *, is_top: bool) -> Table:
    """One line per row, the labels of its group first."""
    labels = list(dict.fromkeys(label for row in rows for label in row.group))
    functions = {row.function for row in rows}
    table = Table(title=_text(title), title_justify="left", header_style="bold")
    if not is_top:
        table.add_column("time (UTC)", no_wrap=True)
    for label in labels:
        table.add_column(_text(label), overflow="fold")
    if len(functions) > 1:
        table.add_column("function")
    heading = _heading(Function.parse(functions.pop())) if len(functions) == 1 else "value"
    has_last = any(row.last is not None for row in rows)
    named = ("points", heading, "min", "max", *(["last"] if has_last else []), *(rows[0].ranks if rows else ()))
    for name in named:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells: list[str | Text] = [] if is_top else [f"{row.time:%Y-%m-%d %H:%M}"]
        cells += [_text(row.group.get(label, "")) for label in labels]
        cells += [row.function] if heading == "value" else []
        values = (row.value, row.min, row.max, *([row.last] if has_last else []), *row.ranks.values())
        cells += [f"{row.points:,}", *map(number, values)]
        table.add_row(*cells)
    return table


def resolution_notes_on_screen(rows: Sequence[QueryRow]) -> list[str]:
    """A line for each percentile that may be far off because a sender's buckets are wide, with its worst row."""
    notes = []
    for name in rows[0].ranks if rows else ():
        worst, of_row = max(((_error(row, name), row) for row in rows), key=lambda pair: pair[0])
        if worst > _FAR_OFF:
            low, high = of_row.ranges[name] or (math.nan, math.nan)
            group = f" of {group_text(of_row)}" if of_row.group else ""
            notes.append(
                f"{name}{group} lies between {number(low)} and {number(high)}: the sender's buckets are too wide to "
                "say more. Narrower bounds or exponential histograms do"
            )
    return notes


def _error(row: QueryRow, name: str) -> float:
    """How far off a percentile may be, relative to its value."""
    value, range_ = row.ranks[name], row.ranges.get(name)
    if value is None or range_ is None:
        return 0.0
    distance = max(value - range_[0], range_[1] - value)
    return distance / abs(value) if value else math.inf * (distance > 0)


def _heading(function: Function) -> str:
    """A percentile's value is the mean: the percentiles have columns of their own."""
    return "avg" if function.spec.has_percentiles else function.name


def metrics_on_screen(found: Sequence[MetricSummary]) -> Table:
    table = Table(title="Metrics", title_justify="left", header_style="bold")
    table.add_column("metric", overflow="fold")
    table.add_column("function")
    for name in ("points", "series"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(_text(one.metric), one.function, f"{one.points:,}", f"{one.series:,}")
    return table


def _text(text: str) -> Text:
    """As it is: not as markup, and not as commands to the terminal."""
    return Text(printable(text))


def plot_on_screen(rows: Sequence[QueryRow], title: str, width: int, *, has_colour: bool = False) -> str:
    """The value (or the first percentile) over time, a line for each group; bars where there is one bucket only."""
    import plotext

    is_mixed = len({row.function for row in rows}) > 1
    groups: dict[str, list[QueryRow]] = {}
    for row in rows:
        groups.setdefault(_line_name(row, is_mixed=is_mixed), []).append(row)
    shown = sorted(groups.items(), key=lambda item: -max(_height(row) for row in item[1]))[:MOST_LINES]
    figure: Any = plotext.figure
    figure.clear()
    figure.plot_size(width, _HEIGHT)
    figure.theme("simple" if len(shown) > 1 and has_colour else "colorless")  # one line needs no colour
    figure.title(printable(title))
    times = sorted({row.time for row in rows})
    if len(times) == 1:
        figure.draw(figure.bar([name for name, _ in shown], [_height(members[0]) for _, members in shown]))
        return str(figure.build())
    place = {time: number for number, time in enumerate(times)}
    for mark, (name, members) in zip(_MARKS, shown):
        spots = [place[row.time] for row in members]
        heights = [_height(row) for row in members]
        line = figure.signal(spots, heights, marker="hd" if has_colour or len(shown) == 1 else mark).lines()
        figure.draw(line.label(name) if len(shown) > 1 else line)
    step = max(1, len(times) // 6)
    ticks = list(range(0, len(times), step))
    is_long = (times[-1] - times[0]).total_seconds() > 2 * 86400
    figure.ruler().ticks(ticks, [f"{times[tick]:{'%d %b' if is_long else '%H:%M'}}" for tick in ticks])
    return str(figure.build())


def _line_name(row: QueryRow, *, is_mixed: bool) -> str:
    """Values of two functions are two lines: a sum and a mean have nothing to do with each other."""
    group = group_text(row)
    return f"{group} ({row.function})" if group and is_mixed else group or row.function


def group_text(row: QueryRow) -> str:
    return printable(", ".join(row.group.values()))


def number(value: float | None) -> str:
    """Four significant digits."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _height(row: QueryRow) -> float:
    value = next(iter(row.ranks.values()), row.value)
    return value or 0.0
