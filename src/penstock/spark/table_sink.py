"""`format("penstock-sink")`: the rows of a batch into files of every table, written by the executors.

    frame.transform(rolled_up).write.format("penstock-sink").mode("append").option("exchange", folder).save()

    exchange/order       driver → tasks: where to write and what to leave out (`SinkOrder`)
    exchange/reports     tasks → driver: what was written, by every task that Spark counts (`SinkReport`)

Nothing is committed here: Spark runs a data source's commit in a process of its own, and the tables stay open in the
driver's. Files of attempts that failed or were overtaken are in no report, so no table ever has them.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - the usual name for it
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.errors import RowsMissing
from penstock.model.level import Level
from penstock.spark.coverage import MARK, SparkBatchCoverage, spark_points_of
from penstock.spark.rollup import PLACE, PLACES
from penstock.tables.landing import TableLanding, TableWriter, WrittenTableFile
from penstock.tables.port import SCHEMAS, TOP_N
from penstock.tables.table_rows import (
    RECORDS,
    increment_table_rows,
    increment_top_n_rows,
    packed_once,
    records_kept,
    sorted_table_rows,
    top_records,
)

CHUNK_ROWS = 500_000  # about 60 MB: what a task holds before it writes
TEXT_BYTES = 32 * 2**20  # labels that are written at once


@dataclass(frozen=True, slots=True)
class SinkOrder:
    """What the tasks of one batch are told."""

    landing: TableLanding
    left_out: Mapping[Level, tuple[str, ...]] = field(default_factory=dict)  # of levels: metrics that they do without


@dataclass(frozen=True, slots=True)
class SinkMarks:
    """The marks of a batch, merged, as they reached one table."""

    table: str
    coverage: str
    tasks: int
    points: int


@dataclass(frozen=True)
class SinkReport(WriterCommitMessage):
    """What one task was given and has written: rows, points of each level (or left out there), the batch's marks."""

    written: tuple[WrittenTableFile, ...] = ()
    rows: int = 0
    points: Mapping[str, int] = field(default_factory=dict)
    marked: tuple[SinkMarks, ...] = ()


class TableSink(DataSource):
    """Where `option("exchange")` says."""

    @classmethod
    def name(cls) -> str:
        return "penstock-sink"

    def writer(self, schema: StructType, overwrite: bool) -> "TableSinkWriter":
        exchange = Path(self.options["exchange"])
        order = pickle.loads((exchange / "order").read_bytes())  # noqa: S301 - the driver has written it
        return TableSinkWriter(order, exchange)


class TableSinkWriter(DataSourceArrowWriter):
    """One file for each table and task; tasks hold `CHUNK_ROWS` rows at most."""

    def __init__(self, order: SinkOrder, exchange: Path) -> None:
        self._order = order
        self._exchange = exchange

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkReport:
        writers: dict[str, TableWriter] = {name: self._order.landing.writer(name) for name in SCHEMAS}
        points = {level.value: 0 for level in Level}
        marked: list[SinkMarks] = []
        given = 0
        for chunk in _chunks(iterator):
            given += chunk.num_rows
            for number, (table, level) in enumerate(PLACES):
                rows = chunk.filter(pc.equal(chunk[PLACE], pa.scalar(number, pa.int8())))
                left_out = self._order.left_out.get(level, ())
                if table == TOP_N:
                    writers[TOP_N].write(increment_top_n_rows(_records(_kept(rows, left_out), level)))
                    continue
                is_mark = pc.equal(rows["function"], MARK)
                marked += _marks(level.value, rows.filter(is_mark))
                rows = rows.filter(pc.invert(is_mark))
                kept = _kept(rows, left_out)
                points[level.value] += spark_points_of(rows) - spark_points_of(kept)
                for some in _portions(kept):
                    made = increment_table_rows(some)
                    writers[level.value].write(made)
                    points[level.value] += spark_points_of(made)
        written = tuple(one for writer in writers.values() for one in writer.close())
        return SinkReport(written, given, points, tuple(marked))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        (self._exchange / "reports").write_bytes(pickle.dumps(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        pass  # files that no report names are removed by vacuum


def written_by_spark(rows: DataFrame, order: SinkOrder, exchange: Path) -> list[SinkReport]:
    """Write rolled-up rows as one Spark job; what its tasks report.

    RowsMissing unless they were given exactly the rows that Spark's aggregate has made.
    """
    counted = Observation()
    (exchange / "order").write_bytes(pickle.dumps(order))
    (exchange / "reports").unlink(missing_ok=True)
    written = rows.observe(counted, F.count(F.lit(1)).alias("rows")).write.format(TableSink.name()).mode("append")
    try:
        written.option("exchange", str(exchange)).save()
    finally:
        (exchange / "order").unlink()  # it may hold the tables' password
    reports = _reports(exchange)
    made, given = counted.get["rows"], sum(report.rows for report in reports)
    if made != given:
        raise RowsMissing(f"Spark has aggregated {made} rows, its tasks report {given}: nothing was committed")
    return reports


def _reports(exchange: Path) -> list[SinkReport]:
    found: list[SinkReport | None] = pickle.loads((exchange / "reports").read_bytes())  # noqa: S301 - the sink's own
    return [report for report in found if report is not None]


def checked_spark_reports(reports: list[SinkReport]) -> SparkBatchCoverage:
    """What the batch covers. RowsMissing unless every task has read its part, and every level has all of its points."""
    marks = {mark.table: mark for report in reports for mark in report.marked}
    if {mark.coverage for mark in marks.values()} != {next(iter(marks.values())).coverage} if marks else True:
        raise RowsMissing("what the tasks that read have said of the batch did not reach the tasks that write")
    coverage = SparkBatchCoverage.from_text(next(iter(marks.values())).coverage)
    for level in Level:
        mark, points = marks.get(level.value), sum(report.points[level.value] for report in reports)
        if mark is None or (mark.tasks, mark.points) != (coverage.tasks, points):
            read = f"{mark.points} points, by {mark.tasks} tasks" if mark else "nothing"
            raise RowsMissing(
                f"of a batch that {coverage.tasks} tasks read, {points} points were written for table {level.value!r}, "
                f"but read were {read}: nothing was committed"
            )
    return coverage


def spark_files_for(reports: list[SinkReport], table: str) -> list[WrittenTableFile]:
    return [written for report in reports for written in report.written if written.table == table]


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.num_rows for one in held) >= CHUNK_ROWS:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _marks(table: str, rows: pa.Table) -> list[SinkMarks]:
    found: list[dict[str, Any]] = rows.to_pylist()
    return [SinkMarks(table, row["entity"], int(row["sum"]), row["count"]) for row in found]


def _kept(rows: pa.Table, left_out: tuple[str, ...]) -> pa.Table:
    """Without metrics that a level does without."""
    return rows.filter(pc.invert(pc.is_in(rows["metric"], pa.array(left_out, pa.string())))) if left_out else rows


def _records(rows: pa.Table, level: Level) -> pa.Table:
    """What a task keeps of the records of each series and bucket."""
    levels = pa.repeat(pa.scalar(level.value), rows.num_rows)
    return top_records(rows.append_column("level", levels).select(RECORDS.names).cast(RECORDS), records_kept)


def _portions(rows: pa.Table) -> Iterator[pa.Table]:
    """The rows of a level in their order, so many at once that their labels stay within bounds."""
    if not rows.num_rows:
        return
    rows = sorted_table_rows(packed_once(rows), ("metric", "entity", "bucket"))
    longest = pc.max(pc.binary_length(rows["entity"])).as_py()
    step = max(1, min(CHUNK_ROWS, TEXT_BYTES // max(1, longest)))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)
