"""Keeps the job running: restarts a failed query with growing pauses, stops it between batches, shows how it goes."""

import logging
import random
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from penstock.clock import Clock, SystemClock
from penstock.errors import MissingRequirement, PenstockError, SegmentVanished, TableConflict
from penstock.spark.job import BatchGate, JobConfig, start_job
from penstock.spark.segment_folder import SegmentFolder
from penstock.tables.port import Tables
from penstock.telemetry import Sample

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# A query that failed with one of these fails again: an operator has to decide. Spark hands them on as text.
_FINAL: dict[str, type[PenstockError]] = {kind.__name__: kind for kind in (TableConflict, SegmentVanished)}
_FINAL_TEXT = re.compile(rf"({'|'.join(_FINAL)}): (.+)")


@dataclass(slots=True)
class JobProgress:
    """How the job goes, for metrics and progress bars."""

    batches: int = 0
    rows: int = 0
    rows_per_second: float = 0.0
    batch_seconds: float = 0.0
    restarts: int = 0


class Supervisor:
    """Runs one job until it is told to stop, or (with `available_now`) until everything is worked off.

    Threads: `run` belongs to one thread, `stop` may be called from any, also from a signal handler.
    """

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        config: JobConfig,
        *,
        show: Callable[[JobProgress], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self._tables = tables
        self._config = config
        self._show = show
        self._clock: Clock = clock or SystemClock()
        self._folder = SegmentFolder(config.segments)
        self._gate = BatchGate()
        self._stopping = threading.Event()
        self._has_run = False
        self.progress = JobProgress()

    def stop(self) -> None:
        """Let the batch that runs finish, then end."""
        self._stopping.set()
        self._gate.close()

    def run(self) -> None:
        """Raises what no restart can mend."""
        listener = _Listener(self.progress, self._show)
        self._spark.streams.addListener(listener)
        pause, done = FIRST_PAUSE, 0
        try:
            while not self._stopping.is_set():
                try:
                    self._run_once()
                    return
                except (StreamingQueryException, MissingRequirement) as error:
                    if isinstance(error, MissingRequirement) and not self._has_run:
                        raise  # better said at once; later on, a database that is away comes back
                    if final := _FINAL_TEXT.search(str(error)):
                        raise _FINAL[final[1]](final[2]) from error
                    pause = FIRST_PAUSE if self.progress.batches > done else min(pause * 2, LONGEST_PAUSE)
                    done = self.progress.batches
                    self.progress.restarts += 1
                    log.warning("Query failed and is started again. pause=%.1f reason=%s", pause, _first_line(error))
                    self._stopping.wait(pause * random.uniform(0.5, 1.0))
        finally:
            self._spark.streams.removeListener(listener)
            self._say_what_waits()

    def _say_what_waits(self) -> None:
        with suppress(OSError):  # a missing folder is reported where the job starts
            if waiting := len(self._folder.after(self._gate.reached)):
                log.info("Segments wait for the next start: they are not in the tables yet. segments=%d", waiting)

    def _run_once(self) -> None:
        query = start_job(self._spark, self._tables, self._config, self._gate)
        self._has_run = True
        try:
            while not query.awaitTermination(1):
                if self._stopping.is_set() and (self._gate.waits or not query.status["isTriggerActive"]):
                    return
        finally:
            stopping = threading.Thread(target=query.stop, name="penstock-spark-stop")
            stopping.start()
            while query.isActive and stopping.is_alive():
                stopping.join(0.01)
            self._gate.release()  # not before: to Spark the batch would have failed
            stopping.join()

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_spark_batches_total", self.progress.batches)
        yield Sample("penstock_spark_rows_total", self.progress.rows)
        yield Sample("penstock_spark_rows_per_second", self.progress.rows_per_second)
        yield Sample("penstock_spark_batch_seconds", self.progress.batch_seconds)
        yield Sample("penstock_spark_restarts_total", self.progress.restarts)
        yield Sample("penstock_spark_lag_segments", len(self._folder.after(self._gate.reached)))
        yield Sample("penstock_spark_quarantined_segments", len(self._folder.quarantined()))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


class _Listener(StreamingQueryListener):
    """Fills a `JobProgress` with what Spark reports of each batch."""

    def __init__(self, progress: JobProgress, show: Callable[[JobProgress], None]) -> None:
        self._progress = progress
        self._show = show

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        found = event.progress
        self._progress.batches += 1
        self._progress.rows += found.numInputRows
        self._progress.rows_per_second = found.processedRowsPerSecond
        self._progress.batch_seconds = found.batchDuration / 1000
        self._show(self._progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        pass
