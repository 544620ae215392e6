"""The folder that Spark needs for its log, and one note of ours in it, on any file system that Spark knows.

<checkpoint>/run-<id>/          Spark's log of one run: disposable, since the tables say where the next run goes on
<checkpoint>/penstock.json      {source: [writers]}: of which segments the tables of this job hold something
"""

import json
import time
import uuid
from typing import Any

from pyspark.sql import SparkSession

_NOTE, _RUN = "penstock.json", "run-"
_RUN_KEPT = 86_400.0  # seconds since the last batch: another job may be at work in a younger one


class SparkCheckpoint:
    """One job's checkpoint folder."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        self._files = self._path("").getFileSystem(spark._jsc.hadoopConfiguration())
        self._noted = self._read_note()

    def new_run(self) -> str:
        """A folder for one run; those of long ago are removed."""
        if self._files.exists(self._path("")):
            for status in self._files.listStatus(self._path("")):
                path = status.getPath()
                if path.getName().startswith(_RUN) and self._last_batch(path) < time.time() - _RUN_KEPT:
                    self._files.delete(path, True)
        return f"{self.location}/{_RUN}{uuid.uuid4().hex}"

    def _last_batch(self, run: Any) -> float:
        """When a run has begun its last batch: the folder of its own changes no more after the start."""
        offsets = self._jvm.org.apache.hadoop.fs.Path(run, "offsets")
        found = offsets if self._files.exists(offsets) else run
        return float(self._files.getFileStatus(found).getModificationTime()) / 1000

    def noted(self, source: str) -> set[str]:
        """The writers of a source that the tables have held something of."""
        return set(self._noted.get(source, ()))

    def note(self, source: str, writers: set[str]) -> None:
        self._noted[source] = sorted(writers | self.noted(source))
        text = json.dumps(self._noted)
        stream = self._files.create(self._path(_NOTE), True)
        stream.write(text.encode())
        stream.close()

    def _read_note(self) -> dict[str, list[str]]:
        if not self._files.exists(self._path(_NOTE)):
            return {}
        stream = self._files.open(self._path(_NOTE))
        try:
            text = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        found: dict[str, list[str]] = json.loads(text or "{}")  # empty: a crash cut it off, and it says nothing
        return found

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.location}/{name}" if name else self.location)
