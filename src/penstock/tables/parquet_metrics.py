"""The `metrics` table of a folder of Parquet tables: one file, replaced by a rename."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.durable import sync_to_disk
from penstock.tables.metrics_table import METRIC_ROWS

_FILE = "metrics.parquet"


def read_metrics_file(folder: Path) -> pa.Table:
    path = folder / _FILE
    return pq.read_table(path, schema=METRIC_ROWS, partitioning=None) if path.exists() else METRIC_ROWS.empty_table()


def change_metrics_file(folder: Path, change: Callable[[pa.Table], pa.Table]) -> int:
    """Put a changed table in the place of the one that is there; how many rows it lost."""
    there = read_metrics_file(folder)
    made = change(there)
    if not made.equals(there):
        scratch = folder / f".{uuid.uuid4().hex}.parquet"
        pq.write_table(made, scratch, compression="zstd")
        sync_to_disk([scratch])
        scratch.rename(folder / _FILE)
        sync_to_disk([folder])
    return int(there.num_rows - made.num_rows)
