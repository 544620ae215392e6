"""`format("penstock")`: segments as a streaming source.

    spark.readStream.format("penstock").option("path", folder).load()

The offset is {writer: last sequence}: what a sealed segment's name says, so planning a batch opens no file. Tasks read
whole segments and merge their rows before Spark sees them: a row that never reaches the JVM is the cheapest one.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.model.partial import merged
from penstock.model.segment import Segment, read, sealed

# The schema `PARTIALS`, in Spark's words; a test holds the two together.
SCHEMA = "metric string, entity string, bucket timestamp, count bigint, sum double, min double, max double"
MAX_FILES = 200  # of up to 1000 blocks each: a backlog is worked off in batches that fit in memory


class SegmentSource(DataSource):
    """The folder of segments that `option("path")` names."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> "SegmentStream":  # noqa: N802 - Spark's name
        path = self.options.get("path")
        if not path:
            raise ConfigError("the penstock source needs option('path'): the folder of the segments")
        return SegmentStream(Path(path), int(self.options.get("maxFilesPerTrigger", MAX_FILES)))


class SegmentGroup(InputPartition):
    """The segments that one task reads."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class SegmentStream(DataSourceStreamReader):
    """Batches of whole segments, each segment in exactly one batch."""

    def __init__(self, folder: Path, max_files: int) -> None:
        self._folder = folder
        self._max_files = max_files

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxFiles(self._max_files)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        fresh = self._after(start)
        if not isinstance(limit, ReadAllAvailable):
            fresh = fresh[: self._max_files]
        return start | {segment.writer: segment.last for segment in fresh}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        names = [segment.name for segment in self._after(start) if segment.last <= end.get(segment.writer, -1)]
        tasks = min(len(names), os.cpu_count() or 2)
        return [SegmentGroup(names[task::tasks]) for task in range(tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SegmentGroup)
        tables = [read(self._folder / name) for name in partition.names]
        return iter(merged(pa.concat_tables(tables)).combine_chunks().to_batches())

    def _after(self, offset: dict[str, int]) -> list[Segment]:
        return [segment for segment in sealed(self._folder) if segment.last > offset.get(segment.writer, -1)]
