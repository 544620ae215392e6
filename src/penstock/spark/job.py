"""The streaming job: one stateless query from segments to all tables."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import TableConflict
from penstock.model.level import Level
from penstock.spark import small
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.rollup import at, merged, series_of, top_n, without
from penstock.spark.segment_folder import MARK, Offset, SegmentFolder, lasts
from penstock.tables.port import SCHEMAS, TOP_N, Batch, Rows, Tables, queue_application

log = logging.getLogger(__name__)
TRIGGER = "2 seconds"  # a batch costs about 0.2 s even when it is small; more often only burns CPU

# By these words Spark tells a batch that was interrupted by a stop from one that failed, and reports no failure.
_INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling a batch: java.lang.InterruptedException"
DRIVER_ROWS = 2_000_000  # about 200 MB; beyond it, Spark's price for a job is small beside the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What a job reads, where it writes and how it paces itself."""

    segments: Path
    checkpoint: str | Path  # on any file system that Spark knows
    trigger: str = TRIGGER
    available_now: bool = False  # work off what is there, then end
    max_files: int | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    retain_segments: float | None = None  # seconds; committed segments older than this are deleted
    not_at: Mapping[Level, tuple[str, ...]] = field(default_factory=dict)  # metrics that a level does without
    driver_rows: int = DRIVER_ROWS  # batches of at most so many rows are merged and written by the driver

    def left_out(self, table: str) -> tuple[str, ...]:
        """The metrics that a table does without."""
        return () if table == TOP_N else self.not_at.get(Level(table), ())

    def options(self) -> dict[str, str]:
        named = {
            "path": self.segments,
            "maxFilesPerTrigger": self.max_files,
            "maxRowsPerTrigger": self.max_rows,
            "maxBytesPerTrigger": self.max_bytes,
            "retainSeconds": self.retain_segments,
        }
        return {name: str(value) for name, value in named.items() if value is not None}


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a batch was sent back at the gate, which py4j would report as an error, with a traceback."""
    return record.exc_info is None or _INTERRUPTED not in str(record.exc_info[1])


class BatchGate:
    """Lets batches through until it is closed; the next one then waits at it, and the query can be stopped there.

    At that moment the batch before is wholly in Spark's log, and the one that waits has not begun.
    """

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._released = threading.Event()
        self.waits = False
        self.reached: Offset = {}  # the end of the last batch that went through

    def close(self) -> None:
        self._closed.set()

    def release(self) -> None:
        """Let go of a batch that waits, once its query is stopped."""
        self._released.set()

    def enter(self) -> bool:
        """Whether the batch may run; returns only after `release` if not."""
        if not self._closed.is_set():
            return True
        self.waits = True
        self._released.wait()
        return False


def start_job(spark: SparkSession, tables: Tables, config: JobConfig, gate: BatchGate | None = None) -> StreamingQuery:
    """Follow the segments and keep the tables up to date until the query is stopped.

    Exactly once: a segment never changes, Spark's log says which segments a batch has, and every append is guarded in
    its own commit. If the checkpoint was deleted, the query goes on from what the tables hold. TableConflict if the
    checkpoint is that of other segments, SegmentVanished if a table misses what no segment has any more.
    """
    logging.getLogger("py4j.clientserver").addFilter(_is_news)
    config.segments.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = SegmentFolder(config.segments)
    checkpoint, gate = Checkpoint(spark, str(config.checkpoint)), gate or BatchGate()
    held, ahead = resume_point(tables, folder)
    check_queues(tables, folder, held)
    gate.reached = held
    if checkpoint.is_new():
        check_past(folder, held, ahead)
        checkpoint.begin(folder.identity(), held, ahead)
    elif checkpoint.source() not in (None, folder.identity()):
        raise TableConflict(
            f"checkpoint {checkpoint.location} is of other segments than {folder.folder} holds: their sequences would "
            "be taken for those that it has seen. Give the job a new checkpoint, the tables say where it goes on; or, "
            f"if these are the same segments, write {checkpoint.source()} into {folder.folder / MARK}"
        )
    start, first_end = checkpoint.beginning()
    tasks = str(spark.sparkContext.defaultParallelism)
    options = {
        **config.options(),
        "tasks": tasks,
        "startingOffset": json.dumps(start),
        "firstEnd": json.dumps(first_end),
    }
    partials = spark.readStream.format("penstock").options(**options).load()
    writing = (
        partials.writeStream.queryName("penstock")
        .foreachBatch(_into(tables, folder, checkpoint, config, gate))
        .option("checkpointLocation", str(config.checkpoint))
    )
    if config.available_now:
        return writing.trigger(availableNow=True).start()
    return writing.trigger(processingTime=config.trigger).start()


def resume_point(tables: Tables, folder: SegmentFolder) -> tuple[Offset, Offset]:
    """Where a query without a checkpoint begins, and where its first batch must end.

    After a crash between two tables one of them is a batch ahead of the other: the first batch ends where the first
    table is, so that those which have it skip it, and the others get exactly what they miss.
    """
    writers = sorted({segment.writer for segment in folder.after({})})
    batch = Batch("", 0, folder.identity())
    applications = {writer: batch.application(writer) for writer in writers}
    held = [tables.held(name, applications.values()) for name in SCHEMAS]
    behind, ahead = {}, {}
    for writer, application in applications.items():
        positions = [one.get(application, -1) for one in held]
        if max(positions) >= 0:
            behind[writer] = {"last": min(positions), "segments": 0}
        if max(positions) > min(positions):
            count = sum(segment.writer == writer for segment in folder.after(behind) if segment.last <= max(positions))
            ahead[writer] = {"last": max(positions), "segments": count}
    return behind, (behind | ahead if ahead else {})


def check_past(folder: SegmentFolder, held: Offset, ahead: Offset) -> None:
    """For a query without a checkpoint: SegmentVanished if a table misses what others have and no segment has now.

    Where no table has anything of a writer they begin with what is there; that something was there before is logged.
    """
    folder.check_whole(held, ahead)
    first: dict[str, int] = {}
    for segment in folder.after({}):
        first.setdefault(segment.writer, segment.first)
    for writer, sequence in first.items():
        if writer not in held and sequence > 0:
            log.warning("Tables begin without what was cleaned up before. writer=%s first=%d", writer, sequence)


def check_queues(tables: Tables, folder: SegmentFolder, held: Offset) -> None:
    """TableConflict if segments that would be passed over are of another queue than those that the tables hold."""
    passed_over = {s.writer: s for s in folder.after({}) if s.last <= held.get(s.writer, {"last": -1})["last"]}
    origins = folder.origins(list(passed_over.values()))
    applications = {writer: queue_application(writer, origin) for writer, origin in origins.items()}
    known = {application for name in SCHEMAS for application in tables.held(name, applications.values())}
    for writer, application in applications.items():
        if application not in known:
            raise TableConflict(
                f"{passed_over[writer].name} in {folder.folder} is of another queue than what the tables hold of "
                f"writer {writer!r}: its sequences would be taken for those. Give that queue a writer name of its own "
                "(segments.writer), and its segments that name"
            )


def _into(
    tables: Tables, folder: SegmentFolder, checkpoint: Checkpoint, config: JobConfig, gate: BatchGate
) -> Callable[[DataFrame, int], None]:
    source = folder.identity()

    def write(rows: DataFrame, number: int) -> None:
        if not gate.enter():
            raise RuntimeError(_INTERRUPTED)
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query, "Spark names the query of every batch"
        start, end = checkpoint.batch_range(number)
        moved = [segment for segment in folder.after(start) if segment.last <= lasts(end).get(segment.writer, -1)]
        batch = Batch(query, number, source, lasts(start), lasts(end), folder.origins(moved))
        wanted = [name for name in SCHEMAS if batch.wanted_by(name, tables.held(name, batch.versions))]
        if not wanted:
            gate.reached = end
            return
        is_small = folder.rows_between(start, end) <= config.driver_rows
        with _here(rows, config) if is_small else _on_executors(rows, config) as added:
            for name in wanted:
                tables.append(name, added[name], batch)
        gate.reached = end

    return write


@contextmanager
def _here(rows: DataFrame, config: JobConfig) -> Iterator[dict[str, Rows]]:
    found = small.tables_of(rows.toArrow())
    yield {name: small.without(found[name], config.left_out(name)) for name in SCHEMAS}


@contextmanager
def _on_executors(rows: DataFrame, config: JobConfig) -> Iterator[dict[str, Rows]]:
    minutes = rows.transform(merged).persist()
    # Hours hardly weigh anything beside their minutes, and days are made of them.
    hours = minutes.transform(series_of).transform(at(Level.HOUR)).persist()
    frames = {
        Level.MINUTE.value: minutes.transform(series_of),
        Level.HOUR.value: hours,
        Level.DAY.value: hours.transform(at(Level.DAY)),
        TOP_N: minutes.transform(top_n),
    }
    try:
        yield {name: frame.transform(without(*config.left_out(name))) for name, frame in frames.items()}
    finally:
        hours.unpersist()
        minutes.unpersist()
