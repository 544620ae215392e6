"""Folding: increments and final rows of the same series and buckets become final rows, file by file.

    files of one date ── plan_folds ──► tasks ── fold_files, on any machine ──► reports ──► one commit

    minute     00:00      01:00      02:00            a final file covers an hour (of hours and days: a day)
    files      [ final ][ final ][ final ]            sorted by metric, series and bucket
    increments             ·  · ·········             files of batches

A task rewrites the final files that have buckets of increments, and no others. It takes a range of series, so that
what it holds stays within `TASK_BYTES`, and texts are held once for each series. Any number of tasks run at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import RowsMissing
from penstock.model.level import Level
from penstock.tables.labels import first_of_each_text, table_label_maps
from penstock.tables.landing import GROUP_ROWS, TableFileLanding, WrittenTableFile
from penstock.tables.table_rows import LEVEL_ROWS, SORTED_BY, TOP_N, folded_records, folded_rows, sorted_table_rows

TASK_BYTES = 384 * 2**20  # what a task may hold, by the estimate of `_memory_of`
TEXT_BYTES = 32 * 2**20  # labels that are written at once
SMALL_BYTES = 64 * 2**20  # a day that is over and takes no more than this becomes one file
DAY = timedelta(days=1)
WIDTHS = {Level.MINUTE.value: timedelta(hours=1)}  # how much time a final file covers; else a day
CODED = ("metric", "function", "series")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table."""

    path: str
    date: date
    rows: int
    size_bytes: int
    first: datetime  # buckets
    last: datetime
    is_final: bool

    def meets(self, start: datetime, end: datetime) -> bool:
        return self.first < end and self.last >= start


@dataclass(frozen=True, slots=True)
class FoldTask:
    """What one task makes of some files: final rows of a range of buckets and a share of the series."""

    table: str
    paths: tuple[str, ...]
    start: datetime
    end: datetime
    share: int
    shares: int
    landing: TableFileLanding


@dataclass(frozen=True, slots=True)
class FoldReport:
    """What a task has written, and how many rows of its files it has read for it."""

    written: tuple[WrittenTableFile, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class TableFold:
    """One commit: the files of a date that are replaced, and the tasks that make the new ones."""

    date: date
    replaced: tuple[TableFile, ...]
    tasks: tuple[FoldTask, ...]


Run = Callable[[Sequence[FoldTask]], list[FoldReport]]


def run_folds_here(tasks: Sequence[FoldTask]) -> list[FoldReport]:
    """One task after another, in this process."""
    return [fold_files(task) for task in tasks]


def plan_folds(table: str, files: Iterable[TableFile], landing: TableFileLanding, today: date) -> Iterator[TableFold]:
    """What there is to fold, newest date first."""
    dates: dict[date, list[TableFile]] = defaultdict(list)
    for file in files:
        dates[file.date].append(file)
    for day in sorted(dates, reverse=True):
        found = dates[day]
        increments = [file for file in found if not file.is_final]
        if increments:
            ranges = _ranges(table, day, increments, [file for file in found if file.is_final])
        elif _is_worth_joining(found) and day < today - DAY:
            ranges = [_day_of(day)]
        else:
            continue
        taken = [file for file in found if not file.is_final or any(file.meets(*one) for one in ranges)]
        tasks = tuple(task for one in ranges for task in _tasks(table, taken, one, landing))
        yield TableFold(day, tuple(taken), tasks)


def checked_fold_reports(table: str, fold: TableFold, reports: list[FoldReport]) -> list[WrittenTableFile]:
    """What was written. RowsMissing unless every row of the replaced files was read exactly once."""
    expected, read = sum(file.rows for file in fold.replaced), sum(report.rows for report in reports)
    if read != expected:
        raise RowsMissing(
            f"the files of table {table!r} and {fold.date} have {expected} rows, {read} were read: nothing was folded"
        )
    return [written for report in reports for written in report.written]


def _ranges(
    table: str, day: date, increments: list[TableFile], finals: list[TableFile]
) -> list[tuple[datetime, datetime]]:
    """The stretches of time that increments lie in, each as wide as the final files that it meets."""
    width = WIDTHS.get(table, DAY)
    start, end = _day_of(day)
    if width == DAY:
        return [(start, end)]
    micros = width // timedelta(microseconds=1)
    hit: set[int] = set()
    for file in increments:
        first, last = ((moment - start) // width for moment in (file.first, file.last))
        if first == last:
            hit.add(first)
            continue
        moments = pq.read_table(file.path, columns=["bucket"], partitioning=None)["bucket"].cast(pa.int64()).to_numpy()
        hit.update(np.unique((moments - int(start.timestamp() * 1e6)) // micros).tolist())
    ranges = [(start + number * width, start + (number + 1) * width) for number in sorted(hit)]
    for file in finals:
        met = [one for one in ranges if file.meets(*one)]
        if met:
            wide = (min(file.first, met[0][0]), max(file.last + timedelta(minutes=1), met[-1][1]))
            ranges = sorted([one for one in ranges if one not in met] + [wide])
    if any(before[1] > after[0] for before, after in pairwise(ranges)) or not _apart(finals, ranges):
        return [(start, end)]
    return ranges


def _apart(finals: list[TableFile], ranges: list[tuple[datetime, datetime]]) -> bool:
    """Whether each final file lies within one range or outside of all."""
    for file in finals:
        met = [one for one in ranges if file.meets(*one)]
        if met and not (len(met) == 1 and met[0][0] <= file.first and file.last < met[0][1]):
            return False
    return True


def _day_of(day: date) -> tuple[datetime, datetime]:
    start = datetime.combine(day, time(), UTC)
    return start, start + DAY


def _is_worth_joining(files: list[TableFile]) -> bool:
    return len(files) > _shares(files) and sum(file.size_bytes for file in files) <= SMALL_BYTES


def _memory_of(file: TableFile) -> int:
    """About what the rows of a file take while they are folded; entries of distributions are well compressed."""
    return 250 * file.rows + 8 * file.size_bytes


def _shares(files: Sequence[TableFile]) -> int:
    return 1 + sum(map(_memory_of, files)) // TASK_BYTES


def _tasks(
    table: str, files: list[TableFile], stretch: tuple[datetime, datetime], landing: TableFileLanding
) -> Iterator[FoldTask]:
    met = [file for file in files if file.meets(*stretch)]
    shares = _shares(met)
    for share in range(shares):
        yield FoldTask(table, tuple(file.path for file in met), *stretch, share, shares, landing)


def fold_files(task: FoldTask) -> FoldReport:
    """Read the task's rows, fold them, write final files."""
    writer = task.landing.writer(task.table)
    if task.table == TOP_N:
        read = [rows for rows in _read(task, coded=()) if rows.num_rows]
        if not read:
            return FoldReport((), 0)
        together = pa.concat_tables(read)
        day = pa.repeat(pa.scalar(task.start.date(), pa.date32()), together.num_rows)
        writer.write(folded_records(together.append_column("date", day)))
        return FoldReport(tuple(writer.close()), together.num_rows)
    labels: dict[str, Any] = {}
    read = [_without_labels(rows, labels) for rows in _read(task, CODED) if rows.num_rows]
    if not read:
        return FoldReport((), 0)
    rows = pa.concat_tables(read).unify_dictionaries()
    del read
    count = rows.num_rows
    rows = folded_rows(sorted_table_rows(rows, SORTED_BY[task.table]), Level(task.table))
    for chunk in _chunks(rows, labels):
        writer.write(_with_labels(chunk, labels, task.start.date()))
    return FoldReport(tuple(writer.close()), count)


def fold_rows(table: str, rows: pa.Table) -> pa.Table:
    """Whole rows of one date, made final."""
    if table == TOP_N:
        return folded_records(rows)
    labels: dict[str, Any] = {}
    day = rows["date"][0].as_py()
    bare = _without_labels(rows.drop_columns(["date"]), labels)
    return _with_labels(folded_rows(sorted_table_rows(bare, SORTED_BY[table]), Level(table)), labels, day)


def _read(task: FoldTask, coded: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of a task, one row group after another."""
    start, end = (pa.scalar(moment, pa.timestamp("us", tz="UTC")) for moment in (task.start, task.end))
    for path in task.paths:
        with pq.ParquetFile(path, read_dictionary=list(coded)) as file:
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number)
                if "date" in rows.column_names:
                    rows = rows.drop_columns(["date"])
                within = pc.and_(pc.greater_equal(rows["bucket"], start), pc.less(rows["bucket"], end))
                if task.shares > 1:
                    within = pc.and_(within, _is_own(rows["series"], task.share, task.shares))
                yield rows.filter(within)


def _is_own(series: Any, share: int, shares: int) -> Any:
    """Whether each series is in a share: they are hashes, so their first digits are as good as any other numbers."""
    known, _ = first_of_each_text(series)
    owners = [int(text[:8], 16) * shares >> 32 == share for text in known.dictionary.to_pylist()]
    return pa.array(owners, pa.bool_()).take(known.indices)


def _without_labels(rows: pa.Table, labels: dict[str, Any]) -> pa.Table:
    """Rows without their labels, which are noted once for each series."""
    known, first = first_of_each_text(rows["series"])
    new = [(row, text) for row, text in zip(first.tolist(), known.dictionary.to_pylist()) if text not in labels]
    pairs = rows["labels"].take(pa.array([row for row, _ in new], pa.int64())).to_pylist()
    labels.update((text, tuple(some)) for (_, text), some in zip(new, pairs))
    return rows.drop_columns(["labels"])


def _chunks(rows: pa.Table, labels: dict[str, Any]) -> Iterator[pa.Table]:
    """As many rows at once as one row group has, fewer if their labels are long."""
    longest = max((sum(len(name) + len(text) for name, text in pairs) for pairs in labels.values()), default=0)
    step = max(1, min(GROUP_ROWS, TEXT_BYTES // max(1, longest)))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def _with_labels(rows: pa.Table, labels: dict[str, Any], day: date) -> pa.Table:
    known, _ = first_of_each_text(rows["series"])
    maps = table_label_maps([labels[text] for text in known.dictionary.to_pylist()]).take(known.indices)
    rows = rows.append_column("labels", maps)
    rows = rows.append_column("date", pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows))
    return rows.select(LEVEL_ROWS.names).cast(LEVEL_ROWS)
