"""The streaming job: one stateless query from segments to all tables.

    readStream("penstock") ─► foreachBatch: rolled_up ─► write("penstock-sink") ─► commit what was reported

A batch is one Spark job of two stages, then one commit to each table. A run begins where the tables are: Spark's own
checkpoint is only good for the run that made it.
"""

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import TableConflict
from penstock.model.level import Level
from penstock.spark.checkpoint import SparkCheckpoint
from penstock.spark.coverage import SparkBatchCoverage
from penstock.spark.progress import AddedBatch
from penstock.spark.rollup import rolled_up
from penstock.spark.segment_folder import Offset, SegmentSourceFolder
from penstock.spark.session import use_all_cores
from penstock.spark.table_sink import SinkOrder, SinkReport, checked_spark_reports, spark_files_for, written_by_spark
from penstock.tables.port import SCHEMAS, TableBatch, Tables, table_application_of_queue

log = logging.getLogger(__name__)
TRIGGER = "2 seconds"  # a batch costs about 0.2 s even when it is small; more often only burns CPU

# By these words Spark tells a batch that was interrupted by a stop from one that failed, and reports no failure.
_INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling a batch: java.lang.InterruptedException"


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


class JobBatchGate:
    """Lets batches through until it is closed; the next one then waits at it, and the query can be stopped there.

    At that moment the batch before is wholly in Spark's log, and the one that waits has not begun.
    """

    def __init__(self, on_added: Callable[[AddedBatch], None] = lambda _: None) -> None:
        self._on_added = on_added
        self._closed = threading.Event()
        self._released = threading.Event()
        self.waits = False
        self.reached: Offset = {}  # the end of the last batch that went through

    def prepare(self) -> None:
        """For the next query: what waited at the gate before is gone."""
        self._released.clear()
        self.waits = False

    def close(self) -> None:
        self._closed.set()

    def note_added(self, batch: AddedBatch) -> None:
        """A batch is in all tables."""
        self.reached = self.reached | {writer: {"last": last, "segments": 0} for writer, last in batch.end.items()}
        self._on_added(batch)

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


def start_job(
    spark: SparkSession, tables: Tables, config: JobConfig, gate: JobBatchGate | None = None
) -> StreamingQuery:
    """Follow the segments and keep the tables up to date until the query is stopped.

    Exactly once: a segment never changes, the tables say which sequences they hold, and every append is guarded in its
    own commit. TableConflict if the tables have lost what they held, or segments are of another queue; SegmentVanished
    if a table misses what no segment has any more.
    """
    logging.getLogger("py4j.clientserver").addFilter(_is_news)
    config.segments.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = SegmentSourceFolder(config.segments)
    checkpoint, gate = SparkCheckpoint(spark, str(config.checkpoint)), gate or JobBatchGate()
    start, first_end = job_beginning(tables, folder, checkpoint.noted(folder.identity()))
    gate.reached = start
    options = {
        **config.options(),
        "marks": "true",
        "tasks": str(spark.sparkContext.defaultParallelism),
        "startingOffset": json.dumps(start),
        "firstEnd": json.dumps(first_end),
    }
    writing = (
        spark.readStream.format("penstock")
        .options(**options)
        .load()
        .writeStream.queryName("penstock")
        .foreachBatch(_into(tables, checkpoint, config, gate))
        .option("checkpointLocation", checkpoint.new_run())
    )
    if config.available_now:
        return writing.trigger(availableNow=True).start()
    return writing.trigger(processingTime=config.trigger).start()


def job_beginning(tables: Tables, folder: SegmentSourceFolder, noted: set[str]) -> tuple[Offset, Offset]:
    """Where a run begins and where its first batch must end (empty: anywhere), once it is sure that it may.

    `noted` are writers that the tables have held something of.
    """
    held, ahead = job_resume_point(tables, folder)
    lost = TableBatch(folder.identity(), end=dict.fromkeys(noted, 0))
    if noted and not any(tables.held(name, lost.versions) for name in SCHEMAS):
        raise TableConflict(
            f"the tables at {tables.location} held something of writer {min(noted)!r} and hold nothing now: this job "
            "would go on without the past. Restore the tables, or delete the checkpoint of this job and run it again "
            "over the segments"
        )
    check_job_past(folder, held, ahead)
    queues = check_job_queues(tables, folder, held)
    return tuple(_with_queues(offset, queues) for offset in (held, ahead))  # type: ignore[return-value]


def _with_queues(offset: Offset, queues: Mapping[str, str]) -> Offset:
    return {
        writer: {**position, "queue": queues[writer]} if writer in queues else position
        for writer, position in offset.items()
    }


def job_resume_point(tables: Tables, folder: SegmentSourceFolder) -> tuple[Offset, Offset]:
    """Where the tables are, and where the first batch must end.

    After a crash between two tables one of them is a batch ahead of the other: the first batch ends where the first
    table is, so that those which have it skip it, and the others get exactly what they miss.
    """
    folder.refresh()
    writers = sorted({segment.writer for segment in folder.after({})})
    batch = TableBatch(folder.identity())
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


def check_job_past(folder: SegmentSourceFolder, held: Offset, ahead: Offset) -> None:
    """SegmentVanished if a table misses what others have and no segment has now.

    Where no table has anything of a writer they begin with what is there; that something was there before is logged.
    """
    folder.check_whole(held, ahead)
    first: dict[str, int] = {}
    for segment in folder.after({}):
        first.setdefault(segment.writer, segment.first)
    for writer, sequence in first.items():
        if writer not in held and sequence > 0:
            log.warning("Tables begin without what was cleaned up before. writer=%s first=%d", writer, sequence)


def check_job_queues(tables: Tables, folder: SegmentSourceFolder, held: Offset) -> dict[str, str]:
    """The queue of each writer, as far as segments that are passed over tell.

    TableConflict if such a segment is of another queue than what the tables hold: it would be passed over for good.
    """
    queues = {}
    for writer, segments in folder.passed_over(held).items():
        origin = folder.outline(segments[-1]).origin if segments else None
        if origin is None:
            continue
        application = table_application_of_queue(writer, origin)
        if not any(tables.held(name, [application]) for name in SCHEMAS):
            raise folder.of_another_queue(segments[-1])
        folder.check_queue(segments, origin[0])
        queues[writer] = origin[0]
    return queues


def _into(
    tables: Tables, checkpoint: SparkCheckpoint, config: JobConfig, gate: JobBatchGate
) -> Callable[[DataFrame, int], None]:
    exchange = tempfile.TemporaryDirectory(prefix="penstock-sink-")

    def write(rows: DataFrame, number: int) -> None:
        if not gate.enter():
            raise RuntimeError(_INTERRUPTED)
        # Adaptive execution would run each stage as a job of its own; there is nothing for it to adapt.
        rows.sparkSession.conf.set("spark.sql.adaptive.enabled", "false")
        use_all_cores(rows.sparkSession)
        began = time.monotonic()
        with closing(tables.landing(f"batch-{number}")) as landing:
            order = SinkOrder(landing, dict(config.not_at))
            reports = written_by_spark(rows.transform(rolled_up), order, Path(exchange.name))
            wrote = time.monotonic()
            covered = commit_spark_batch(tables, reports)
        phases = {"write": wrote - began, "commit": time.monotonic() - wrote}
        if not set(covered.end) <= checkpoint.noted(covered.source):
            checkpoint.note(covered.source, set(covered.end))
        files = [file for report in reports for file in report.written]
        added = sum(file.rows for file in files)
        gate.note_added(AddedBatch(end=covered.end, rows=added, files=len(files), phases=phases))

    return write


def commit_spark_batch(tables: Tables, reports: list[SinkReport]) -> SparkBatchCoverage:
    """Add what tasks report to every table that does not have the batch yet; RowsMissing if points are missing."""
    covered = checked_spark_reports(reports)
    for name in SCHEMAS:
        tables.append(name, spark_files_for(reports, name), covered.batch())
    return covered
