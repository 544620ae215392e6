"""A process that has read tables ends as it should, however many times.

The soak (`make soak PART=tables`) ends 500 of them in a row.
"""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.tables.delta import DeltaTables
from penstock.tables.port import SCHEMAS, TableBatch

READ = """
import sys
from datetime import datetime, UTC
from penstock.tables.port import open_tables
tables = open_tables(sys.argv[1])
print(tables._rows("hour", datetime(2026, 1, 1, tzinfo=UTC), metric="m").num_rows)
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """An hour table of some files with many row groups, so that reading ahead has something to do."""
    bucket = datetime(2026, 2, 1, tzinfo=UTC)
    rows = {"function": "sum", "labels": [], "series": "", "bucket": bucket, "date": bucket.date(), "is_final": False}
    numbers = {"count": 1, "sum": 1.0, "min": 1.0, "max": 1.0}
    # The metric that is asked for lies between these two: no file is left out for it.
    both = [rows | numbers | {"metric": metric} for metric in ("a", "z")]
    table = pa.Table.from_pylist(both * 10_000, schema=SCHEMAS["hour"])
    made = DeltaTables(tmp_path / "tables")
    for number in range(4):
        writer = made.landing("test").writer("hour")
        writer.write(table)
        made.append("hour", writer.close(), TableBatch("test", {"edge": number - 1}, {"edge": number}))
    return tmp_path / "tables"


def ended_well(tables: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", READ, str(tables)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr


def test_no_thread_that_reads_a_table_calls_python(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    make = ds.ParquetFileFormat.make_fragment

    class Noting(ds.ParquetFileFormat):  # type: ignore[misc]
        def make_fragment(self, file: str, filesystem: object = None, **more: object) -> object:
            used.append(filesystem)
            return make(self, file, filesystem=filesystem, **more)

    monkeypatch.setattr("pyarrow.dataset.ParquetFileFormat", Noting)
    monkeypatch.setattr("deltalake.table.ParquetFileFormat", Noting, raising=False)
    assert DeltaTables(tables)._rows("hour").num_rows == 80_000
    assert used
    for one in used:
        assert isinstance(one, SubTreeFileSystem)
        assert isinstance(one.base_fs, LocalFileSystem)


def test_processes_that_have_read_tables_end_without_a_crash(tables: Path) -> None:
    for _ in range(3):
        ended_well(tables)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_500_processes_in_a_row_end_without_a_crash(tables: Path) -> None:
    for _ in range(500):
        ended_well(tables)
