"""`format("penstock")`: segments as a streaming source, and for backfills as a table.

    spark.readStream.format("penstock").option("path", folder).load()
    spark.read.format("penstock").option("path", folder).load()

    path                     the folder of the segments, as a path or file:// URI
    maxFilesPerTrigger       how much one batch takes at most: in segments (200), rows (10 million), bytes (1 GiB);
    maxRowsPerTrigger        all three hold
    maxBytesPerTrigger
    retainSeconds            committed segments older than this are deleted (unset: none are)
    tasks                    how many tasks read a batch (as many as this machine has cores)
    startingOffset           where a query without a checkpoint begins (JSON)
    firstEnd                 where its first batch ends (JSON)
    marks                    for spark.readStream: true adds what a batch covers to its rows (`penstock.spark.coverage`)
    upTo                     for spark.read: only segments up to this offset (JSON)
    packed                   for spark.read: true gives `penstock.model.packed`, one row per series and bucket

Planning a batch needs only names and headers. Tasks read whole segments and merge their rows before Spark sees them: a
row that never reaches the JVM is the cheapest one.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.clock import Clock, SystemClock
from penstock.errors import ConfigError
from penstock.model.packed import PACKED, packed_partials
from penstock.model.partial import merged
from penstock.spark.coverage import SparkBatchCoverage, spark_coverage_mark, spark_points_of
from penstock.spark.piece_reading import read_piece
from penstock.spark.pieces import SparkReadPiece, spark_read_pieces
from penstock.spark.segment_folder import Offset, SegmentSourceFolder, checked_spark_offset
from penstock.tables.location import local_tables_folder

# The schema `PARTIALS`, in Spark's words; a test holds the two together.
SCHEMA = (
    "metric string, function string, entity string, bucket timestamp, part bigint, record string, "
    "count bigint, sum double, min double, max double"
)
PACKED_SCHEMA = from_arrow_schema(PACKED)  # words cannot say that lists have no nulls
# A backlog of any size is worked off in batches like these. Tasks merge in steps and spill, so it is time that they
# bound, and what a batch that fails has to do again.
LIMITS = {"files": 200, "rows": 10_000_000, "size_bytes": 2**30}


class SegmentSource(DataSource):
    """The folder of segments that `option("path")` names."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str | StructType:
        return PACKED_SCHEMA if _is_packed(self.options) else SCHEMA

    def reader(self, schema: StructType) -> "SegmentReader":
        up_to = self.options.get("upTo")
        offset = checked_spark_offset(json.loads(up_to)) if up_to else None
        return SegmentReader(_folder(self.options), offset, _tasks(self.options), packs=_is_packed(self.options))

    def streamReader(self, schema: StructType) -> "SegmentStream":  # noqa: N802 - Spark's name
        start, first_end = (
            checked_spark_offset(json.loads(self.options.get(name) or "{}")) for name in ("startingOffset", "firstEnd")
        )
        limits, retain, tasks = _limits(self.options), _retain(self.options), _tasks(self.options)
        marks = self.options.get("marks", "false").lower() == "true"
        return SegmentStream(_folder(self.options), limits, start, first_end, retain, tasks, marks=marks)


def _folder(options: Mapping[str, str]) -> SegmentSourceFolder:
    path = options.get("path")
    if not path:
        raise ConfigError("the penstock source needs option('path'): the folder of the segments")
    return SegmentSourceFolder(local_tables_folder(path, "option('path')"))


def _limits(options: Mapping[str, str]) -> dict[str, int]:
    """The limits of a batch: those that were set, else the defaults."""
    limits = dict(LIMITS)
    for option, name in (("Files", "files"), ("Rows", "rows"), ("Bytes", "size_bytes")):
        text = options.get(f"max{option}PerTrigger")
        if text is not None:
            if not text.isdigit() or int(text) < 1:
                raise ConfigError(f"max{option}PerTrigger must be a whole number >= 1, got {text!r}")
            limits[name] = int(text)
    return limits


def _retain(options: Mapping[str, str]) -> float | None:
    text = options.get("retainSeconds")
    try:
        return float(text) if text is not None else None
    except ValueError:
        raise ConfigError(f"retainSeconds must be a number of seconds, got {text!r}") from None


def _tasks(options: Mapping[str, str]) -> int:
    text = str(options.get("tasks", os.cpu_count() or 2))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"tasks must be a whole number >= 1, got {text!r}")
    return int(text)


def _is_packed(options: Mapping[str, str]) -> bool:
    return options.get("packed", "false").lower() == "true"


class SegmentReader(DataSourceReader):
    """Everything that is sealed, once."""

    def __init__(self, folder: SegmentSourceFolder, up_to: Offset | None, tasks: int, *, packs: bool = False) -> None:
        self._packs = packs
        self._folder = folder
        self._tasks = tasks
        self._up_to = up_to

    def partitions(self) -> Sequence[InputPartition]:
        found = self._folder.after({})
        if self._up_to is not None:
            found = [s for s in found if s.last <= self._up_to.get(s.writer, {}).get("last", -1)]
        return spark_read_pieces({segment: self._folder.outline(segment) for segment in found}, self._tasks) or [
            SparkReadPiece([])
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SparkReadPiece)
        return read_piece(self._folder.folder, partition, packed_partials if self._packs else merged)


class SegmentStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Batches of whole segments, each segment in exactly one batch."""

    def __init__(
        self,
        folder: SegmentSourceFolder,
        limits: dict[str, int],
        start: Offset,
        first_end: Offset,
        retain: float | None,
        tasks: int,
        *,
        marks: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._start = start
        self._first_end = first_end
        self._retain = retain
        self._tasks = tasks
        self._clock: Clock = clock or SystemClock()
        self._marks = marks
        self._target: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._start

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxFiles(self._limits["files"])  # Spark knows one limit at a time; `latestOffset` keeps to all

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = self._folder.reach()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        if self._first_end and checked_spark_offset(start) == self._start:
            return self._first_end
        limits: dict[str, Any] = {} if isinstance(limit, ReadAllAvailable) else self._limits
        return self._folder.admit(checked_spark_offset(start), up_to=self._target, **limits)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._folder.reach()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, reach = checked_spark_offset(start), checked_spark_offset(end)
        batch = self._folder.between(begin, reach)
        found = spark_read_pieces({segment: self._folder.outline(segment) for segment in batch}, self._tasks) or [
            SparkReadPiece([])
        ]
        if self._marks:
            moved = [writer for writer in reach if reach[writer]["last"] > begin.get(writer, {"last": -1})["last"]]
            coverage = SparkBatchCoverage(
                self._folder.identity(),
                {writer: begin[writer]["last"] for writer in moved if writer in begin},
                {writer: reach[writer]["last"] for writer in moved},
                self._folder.origins(batch),
                len(found),
            ).to_text()
            found = [SparkReadPiece(piece.names, piece.share, coverage) for piece in found]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SparkReadPiece)
        points = 0
        for batch in read_piece(self._folder.folder, partition):
            points += spark_points_of(batch) if partition.coverage else 0
            yield batch
        if partition.coverage:
            yield spark_coverage_mark(partition.coverage, points)

    def commit(self, end: dict[str, Any]) -> None:
        if self._retain is not None:
            self._folder.clean(checked_spark_offset(end), self._clock.time() - self._retain)
