"""Spark's micro-batch engine in a few lines: the job's own source and sink, without a JVM, cut off where a test says.

    plan: offset into the log ─► run the batch ─► note that it is done

What Spark promises is modelled: a batch that was planned and is not noted as done runs again with the same offsets.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.model.partial import IDENTITY, PARTIALS, STATES
from penstock.spark.job import JobConfig, commit_spark_batch, job_beginning
from penstock.spark.rollup import PLACE, PLACES
from penstock.spark.segment_folder import Offset, SegmentSourceFolder, checked_spark_offset
from penstock.spark.source import SegmentStream
from penstock.spark.table_sink import SinkOrder, SinkReport, TableSinkWriter
from penstock.tables import delta, parquet, postgres
from penstock.tables.port import TOP_N, TableBatch, Tables

_ALL = ReadAllAvailable()


class PowerCut(Exception):
    """What stands for the end of a process."""


class Faults:
    """Cuts the power at the commit point that a test has armed: before or after what makes a table's rows seen."""

    def __init__(self) -> None:
        self.armed: tuple[str, str] | None = None  # table, before or after

    def around(self, table: str, commit: Callable[[], Any]) -> Any:
        if self.armed == (table, "before"):
            self.armed = None
            raise PowerCut(f"before {table}")
        result = commit()
        if self.armed == (table, "after"):
            self.armed = None
            raise PowerCut(f"after {table}")
        return result


@contextmanager
def faults() -> Iterator[Faults]:
    """Faults at the commit points of every place: Delta's log entry, PostgreSQL's commit, the rename of a folder."""
    found = Faults()
    commit, publish, append, transaction = (
        delta._commit, parquet._publish, postgres.PostgresTables.append, postgres.PostgresTables._merge,
    )  # fmt: skip

    def committing(table: Any, name: str, *rest: Any) -> None:
        found.around(name, lambda: commit(table, name, *rest))

    def publishing(scratch: Path, folder: Path, guard: Any) -> None:
        found.around(folder.parent.name, lambda: publish(scratch, folder, guard))

    def merging(self: Any, connection: Any, name: str, written: Any) -> None:
        transaction(self, connection, name, written)
        if found.armed == (name, "before"):  # the rows are in the transaction, which never commits
            found.around(name, lambda: None)

    def appending(self: Any, name: str, written: Any, batch: TableBatch) -> bool:
        added = append(self, name, written, batch)
        if added and found.armed == (name, "after"):
            found.around(name, lambda: None)
        return added

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_commit", committing)
        patch.setattr(parquet, "_publish", publishing)
        patch.setattr(postgres.PostgresTables, "_merge", merging)
        patch.setattr(postgres.PostgresTables, "append", appending)
        yield found


class _Log:
    """What Spark keeps of one run."""

    def __init__(self, start: Offset, first_end: Offset) -> None:
        self.start, self.first_end = start, first_end
        self.offsets: list[Offset] = []
        self.done = 0

    def batch_range(self, number: int) -> tuple[Offset, Offset]:
        return (self.offsets[number - 1] if number else self.start), self.offsets[number]


class Engine:
    """The job on `folder` (segments and tables), run batch by batch."""

    def __init__(self, folder: Path, tables: Tables) -> None:
        self.tables = tables
        self.config = JobConfig(segments=folder, checkpoint="")
        self.forget()

    def forget(self) -> None:
        """Delete the checkpoint."""
        self._noted: set[str] = set()
        self._log: _Log | None = None

    def run(self, cut_after_plan: bool = False, resume: bool = False, **changes: Any) -> None:
        """Work off what is sealed, as a run of its own or (`resume`) with Spark's log; PowerCut where one is armed."""
        config = replace(self.config, **changes)
        folder = SegmentSourceFolder(config.segments)
        if not resume or self._log is None:
            self._log = _Log(*job_beginning(self.tables, folder, self._noted))
        log = self._log
        limits = {"files": config.max_files} if config.max_files else {}
        source = SegmentStream(
            SegmentSourceFolder(config.segments),
            limits,
            log.start,
            log.first_end,
            config.retain_segments,
            tasks=2,
            marks=True,
        )
        while True:
            if len(log.offsets) == log.done:
                start = log.offsets[-1] if log.offsets else log.start
                end = checked_spark_offset(source.latestOffset(start, source.getDefaultReadLimit() if limits else _ALL))
                if end == start:
                    return
                if log.offsets:
                    source.commit(log.offsets[-1])
                log.offsets.append(end)
                if cut_after_plan:
                    raise PowerCut("after the plan")
            start, end = log.batch_range(log.done)
            batches = [b for piece in source.partitions(start, end) for b in source.read(piece)]
            order = SinkOrder(self.tables.landing("test"), dict(config.not_at))
            covered = commit_spark_batch(self.tables, written(pa.Table.from_batches(batches, PARTIALS), order))
            self._noted |= set(covered.end)
            log.done += 1


def written(partials: pa.Table, order: SinkOrder, tasks: int = 2) -> list[SinkReport]:
    """What the tasks of a batch report: the plan's aggregate in pyarrow, the sink's own writer."""
    rows = aggregated(partials)
    keys = pc.binary_join_element_wise(rows["metric"], rows["function"], rows["entity"], "|").to_pylist()
    homes = pa.array([zlib.crc32(key.encode()) % tasks for key in keys], pa.int64())
    writer = TableSinkWriter(order, Path())
    shares = [rows.filter(pc.equal(homes, task)) for task in range(tasks)]
    return [writer.write(iter(share.to_batches(max_chunksize=100))) for share in shares]


def aggregated(partials: pa.Table) -> pa.Table:
    """A model of `rollup.rolled_up`."""
    record, found = pc.is_valid(partials["record"]), []
    for number, (table, level) in enumerate(PLACES):
        rows = partials.filter(record if table == TOP_N else pc.invert(record))
        moments = rows["bucket"].cast(pa.timestamp("us"))
        buckets = pc.floor_temporal(moments, unit=level.value).cast(rows["bucket"].type)
        rows = rows.set_column(3, "bucket", buckets)
        states = [(state.name, state.merge) for state in STATES]
        merged = rows.group_by(list(IDENTITY)).aggregate(states)
        merged = merged.select([*IDENTITY, *("_".join(state) for state in states)]).rename_columns(PARTIALS.names)
        placed = pa.repeat(pa.scalar(number, pa.int8()), merged.num_rows)
        found.append(merged.cast(PARTIALS).add_column(0, PLACE, placed))
    return pa.concat_tables(found)
