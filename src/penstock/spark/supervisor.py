"""Keeps the job running: restarts a failed query with growing pauses, stops it between batches, shows how it goes."""

import logging
import random
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from penstock.clock import Clock, SystemClock
from penstock.errors import (
    MissingRequirement,
    PenstockError,
    RowsMissing,
    SegmentVanished,
    TableConflict,
    TableOvertaken,
)
from penstock.model.segment import Segment
from penstock.spark.job import JobBatchGate, JobConfig, job_resume_point, start_job
from penstock.spark.progress import JobProgress, ProgressListener
from penstock.spark.segment_folder import Offset, SegmentSourceFolder
from penstock.tables.port import Tables
from penstock.telemetry import Sample

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
QUIET = 30.0  # seconds without a change of the tables after which another job is taken to be gone
# A query that failed with one of these fails again: an operator has to decide. Spark hands them on as text.
_FINAL: dict[str, type[PenstockError]] = {kind.__name__: kind for kind in (TableConflict, SegmentVanished, RowsMissing)}
_FINAL_TEXT = re.compile(rf"({'|'.join(_FINAL)}): (.+)")


class JobSupervisor:
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
        self._folder = SegmentSourceFolder(config.segments, admits=False)
        self._looking = threading.Lock()  # for the folder: `run` looks into it, and so does `samples`
        self.progress = JobProgress()
        self._gate = JobBatchGate(self.progress.add)
        self._stopping = threading.Event()
        self._has_run = False

    def stop(self) -> None:
        """Let the batch that runs finish, then end."""
        self._stopping.set()
        self._gate.close()

    def run(self) -> None:
        """Raises what no restart can mend."""
        listener = ProgressListener(self.progress, self._show)
        self._spark.streams.addListener(listener)
        pause, done = FIRST_PAUSE, 0
        try:
            while not self._stopping.is_set():
                try:
                    self._run_once()
                    return
                except (PySparkException, Py4JJavaError, MissingRequirement) as error:
                    if not isinstance(error, StreamingQueryException) and not self._has_run:
                        raise  # better said at once; later on, a database that is away or a process that died is back
                    if TableOvertaken.__name__ in str(error):
                        self._wait_until_alone(error)
                        continue
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

    def _wait_until_alone(self, error: Exception) -> None:
        """Until the tables no longer move while segments wait: the other job is gone, or has nothing to do either."""
        reason = re.search(rf"{TableOvertaken.__name__}: (.+)", str(error))
        log.warning(
            "Another job adds to these tables, so this one waits until it is gone. tables=%s reason=%s",
            self._tables.location, reason[1] if reason else _first_line(error),
        )  # fmt: skip
        self.progress.overtaken += 1
        held = self._held()
        while not self._stopping.wait(QUIET):
            before, held = held, self._held()
            if held is not None and held == before:
                log.info(
                    "No other job adds to the tables any more, so this one goes on. tables=%s", self._tables.location
                )
                return

    def _held(self) -> tuple[Offset, Offset] | None:
        """What the tables hold; None while their database is away."""
        with self._looking:
            try:
                return job_resume_point(self._tables, self._folder)
            except MissingRequirement:
                return None

    def _waiting(self) -> list[Segment]:
        """Segments that are not in the tables yet."""
        self._folder.refresh()
        return self._folder.after(self._gate.reached)

    def _say_what_waits(self) -> None:
        with suppress(OSError), self._looking:  # a missing folder is reported where the job starts
            if waiting := len(self._waiting()):
                log.info("Segments wait for the next start: they are not in the tables yet. segments=%d", waiting)

    def _run_once(self) -> None:
        self._gate.prepare()
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
        yield from self.progress.samples()
        with self._looking:
            waiting = self._waiting()
            age, quarantined = self._folder.age(waiting, self._clock.time()), len(self._folder.quarantined())
        yield Sample("penstock_spark_lag_segments", len(waiting))
        yield Sample("penstock_spark_lag_seconds", age)
        yield Sample("penstock_spark_quarantined_segments", quarantined)
        yield Sample("penstock_tables_commit_conflicts_total", self._tables.conflicts)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
