"""The tables: Delta folders that anyone can read, written by appending partials. No JVM is needed here.

    <folder>/minute  <folder>/hour  <folder>/day  <folder>/top_n

An append carries its guard (query id, batch id) in the same commit, so a batch that Spark runs again after a crash
changes nothing. A series may have several rows in one bucket; reading merges them.
"""

from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from penstock.model.level import Level
from penstock.model.partial import merged, with_finals

TOP_N = pa.schema(
    [
        pa.field("metric", pa.string()),
        pa.field("bucket", pa.timestamp("us", tz="UTC")),
        pa.field("entity", pa.string()),
        pa.field("max", pa.float64()),
    ]
)


class Tables:
    """The tables below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name

    def size_bytes(self, name: str) -> int:
        """What the table's files take on disk."""
        return sum(file.stat().st_size for file in self.path(name).rglob("*") if file.is_file())

    def append(self, name: str, rows: pa.Table, query: str, batch: int) -> bool:
        """Add `rows` unless this batch of this query has added its rows already; say whether it did."""
        path = str(self.path(name))
        if DeltaTable.is_deltatable(path):
            done = DeltaTable(path).transaction_version(query)
            if done is not None and done >= batch:
                return False
        guard = CommitProperties(app_transactions=[Transaction(app_id=query, version=batch)])
        write_deltalake(path, rows, mode="append", commit_properties=guard)
        return True

    def read(self, level: Level) -> pa.Table:
        """The merged rows of a level with their final values, sorted by metric, entity and bucket."""
        rows = DeltaTable(str(self.path(level.value))).to_pyarrow_table()
        order = [("metric", "ascending"), ("entity", "ascending"), ("bucket", "ascending")]
        return with_finals(merged(rows), level).sort_by(order)

    def read_top_n(self, n: int) -> pa.Table:
        """Per metric and bucket the `n` greatest, greatest first; ties go to the entity that sorts first."""
        rows = DeltaTable(str(self.path("top_n"))).to_pyarrow_table()
        keys = ["metric", "bucket", "entity"]
        greatest = rows.group_by(keys).aggregate([("max", "max")]).rename_columns([*keys, "max"])
        order = [("metric", "ascending"), ("bucket", "ascending"), ("max", "descending"), ("entity", "ascending")]
        return _first_of_each(greatest.sort_by(order), n)


def _first_of_each(ordered: pa.Table, n: int) -> pa.Table:
    """The first `n` rows of each (metric, bucket) of a table that is sorted by them."""
    keep: list[bool] = []
    previous, rank = None, 0
    for group in zip(ordered["metric"].to_pylist(), ordered["bucket"].to_pylist()):
        rank = rank + 1 if group == previous else 1
        previous = group
        keep.append(rank <= n)
    return ordered.filter(pa.array(keep, pa.bool_()))
