"""How the job goes, as Spark and the job itself report it: for `/metrics`, the status page and progress lines."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from penstock.telemetry import Sample

# What Spark calls the phases of a batch, and what they are to a reader. `addBatch` is ours: write and commit.
_PHASES = {
    "latestOffset": "list",
    "queryPlanning": "plan",
    "walCommit": "log_begin",
    "commitOffsets": "log_end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedBatch:
    """What a batch has added to the tables."""

    end: Mapping[str, int]  # of each writer that moved: the last sequence
    rows: int
    files: int
    phases: Mapping[str, float]  # seconds


@dataclass(slots=True)
class JobProgress:
    """Totals since the job began, and the phases of its last batch in seconds."""

    batches: int = 0
    rows: int = 0
    rows_written: int = 0
    files: int = 0
    rows_per_second: float = 0.0
    batch_seconds: float = 0.0
    restarts: int = 0
    overtaken: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, batch: AddedBatch) -> None:
        self.rows_written += batch.rows
        self.files += batch.files
        self.phases |= batch.phases

    def samples(self) -> Iterable[Sample]:
        yield Sample("penstock_spark_batches_total", self.batches)
        yield Sample("penstock_spark_rows_total", self.rows)
        yield Sample("penstock_spark_rows_written_total", self.rows_written)
        yield Sample("penstock_spark_files_written_total", self.files)
        yield Sample("penstock_spark_rows_per_second", self.rows_per_second)
        yield Sample("penstock_spark_batch_seconds", self.batch_seconds)
        for phase, seconds in sorted(self.phases.items()):
            yield Sample("penstock_spark_phase_seconds", seconds, (phase,))
        yield Sample("penstock_spark_restarts_total", self.restarts)
        yield Sample("penstock_spark_overtaken_total", self.overtaken)


class ProgressListener(StreamingQueryListener):
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
        durations = found.durationMs
        self._progress.phases |= {ours: durations.get(theirs, 0) / 1000 for theirs, ours in _PHASES.items()}
        self._show(self._progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        pass
