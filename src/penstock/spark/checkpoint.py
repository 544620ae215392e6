"""What we read from, and keep beside, Spark's checkpoint, on whatever file system it lies.

<checkpoint>/offsets/<batch>        Spark's log: written before a batch runs; its last line is our offset
<checkpoint>/penstock-start.json    ours: where the query began, written once before its first batch
"""

import json
from typing import Any

from pyspark.sql import SparkSession

from penstock.spark.segment_folder import Offset, checked_offset

_START = "penstock-start.json"


class Checkpoint:
    """One query's checkpoint folder."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        self._files = self._path("").getFileSystem(spark._jsc.hadoopConfiguration())

    def is_new(self) -> bool:
        """Whether no batch was ever planned with it."""
        return not self._files.exists(self._path("offsets"))

    def begin(self, source: str, start: Offset, first_end: Offset) -> None:
        """Remember whose segments it is for, where the query begins and where its first batch ends; when it is new."""
        scratch, path = self._path(f".{_START}"), self._path(_START)
        stream = self._files.create(scratch, True)
        stream.write(json.dumps({"source": source, "start": start, "first_end": first_end}).encode())
        stream.close()
        self._files.delete(path, False)  # left by a start that never came to plan a batch
        self._files.rename(scratch, path)

    def source(self) -> str | None:
        """Whose segments it is for; None if it does not say."""
        found = json.loads(self._text(_START)) if self._files.exists(self._path(_START)) else {}
        return found.get("source")

    def beginning(self) -> tuple[Offset, Offset]:
        """Where the query began, and where its first batch had to end (empty: anywhere)."""
        if not self._files.exists(self._path(_START)):
            return {}, {}
        found = json.loads(self._text(_START))
        return checked_offset(found["start"]), checked_offset(found["first_end"])

    def batch_range(self, number: int) -> tuple[Offset, Offset]:
        """After which offset a batch begins and with which it ends."""
        start = self._offset(number - 1) if number else self.beginning()[0]
        return start, self._offset(number)

    def _offset(self, number: int) -> Offset:
        return checked_offset(json.loads(self._text(f"offsets/{number}").splitlines()[-1]))

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.location}/{name}" if name else self.location)

    def _text(self, name: str) -> str:
        stream = self._files.open(self._path(name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()
