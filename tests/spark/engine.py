"""Spark's micro-batch engine in a few lines: the job's own source and writer, without a JVM, cut off where a test says.

    plan: offset into the log ─► run the batch ─► note that it is done

What Spark promises is modelled: a batch that was planned and is not noted as done runs again with the same offsets.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.model.partial import PARTIALS
from penstock.spark import job
from penstock.spark.job import BatchGate, JobConfig, resume_point
from penstock.spark.segment_folder import Offset, SegmentFolder, checked_offset
from penstock.spark.source import SegmentStream
from penstock.tables import delta, parquet, postgres
from penstock.tables.port import Batch, Tables

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

    def merging(self: Any, connection: Any, name: str, data: Any) -> None:
        transaction(self, connection, name, data)
        if found.armed == (name, "before"):  # the rows are in the transaction, which never commits
            found.around(name, lambda: None)

    def appending(self: Any, name: str, rows: Any, batch: Batch) -> bool:
        added = append(self, name, rows, batch)
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
    """What Spark keeps in a checkpoint, and we beside it."""

    def __init__(self) -> None:
        self.query = uuid.uuid4().hex
        self.offsets: list[Offset] = []
        self.done = 0
        self.start: Offset | None = None
        self.first_end: Offset = {}

    def batch_range(self, number: int) -> tuple[Offset, Offset]:
        assert self.start is not None
        return (self.offsets[number - 1] if number else self.start), self.offsets[number]


class Engine:
    """The job on `folder` (segments and tables), run batch by batch."""

    def __init__(self, folder: Path, tables: Tables) -> None:
        self.tables = tables
        self.config = JobConfig(segments=folder, checkpoint="")
        self.forget()

    def forget(self) -> None:
        """Delete the checkpoint."""
        self._log = _Log()

    def run(self, cut_after_plan: bool = False, **changes: Any) -> None:
        """Work off what is sealed; PowerCut where a fault is armed."""
        config = replace(self.config, **changes)
        folder, log = SegmentFolder(config.segments), self._log
        held, ahead = resume_point(self.tables, folder)
        job.check_queues(self.tables, folder, held)
        if not log.offsets:
            job.check_past(folder, held, ahead)
            log.start, log.first_end = held, ahead
        assert log.start is not None
        limits = {"files": config.max_files} if config.max_files else {}
        source = SegmentStream(folder, limits, log.start, log.first_end, config.retain_segments, tasks=2)
        write = job._into(self.tables, folder, log, config, BatchGate())  # type: ignore[arg-type]
        while True:
            if len(log.offsets) == log.done:
                start = log.offsets[-1] if log.offsets else log.start
                end = checked_offset(source.latestOffset(start, source.getDefaultReadLimit() if limits else _ALL))
                if end == start:
                    return
                if log.offsets:
                    source.commit(log.offsets[-1])
                log.offsets.append(end)
                if cut_after_plan:
                    raise PowerCut("after the plan")
            start, end = log.batch_range(log.done)
            batches = [b for piece in source.partitions(start, end) for b in source.read(piece)]
            write(_Rows(pa.Table.from_batches(batches, PARTIALS), log.query), log.done)  # type: ignore[arg-type]
            log.done += 1


class _Rows:
    """What the job asks of a frame when the driver does the work."""

    def __init__(self, rows: pa.Table, query: str) -> None:
        self._rows = rows
        self.sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(getLocalProperty=lambda _: query))

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        return self._rows
