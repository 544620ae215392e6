"""Files without the metrics that have expired: which metrics a file holds, and a copy without some of them."""

from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.tables.landing import TableFileLanding, WrittenTableFile
from penstock.tables.table_rows import SCHEMAS


def metrics_in_table_file(path: str) -> set[str]:
    """The metrics of a file. A row group whose bounds are one metric is not read."""
    found: set[str] = set()
    with pq.ParquetFile(path, read_dictionary=["metric"]) as file:
        columns = [file.metadata.schema.column(n).path for n in range(len(file.metadata.schema))]
        place = columns.index("metric")
        for number in range(file.num_row_groups):
            bounds = file.metadata.row_group(number).column(place).statistics
            if bounds is not None and bounds.has_min_max and bounds.min == bounds.max:
                found.add(bounds.min)
            else:
                found.update(pc.unique(file.read_row_group(number, ["metric"])["metric"].cast(pa.string())).to_pylist())
    return found


def pruned_table_file(path: str, table: str, landing: TableFileLanding, kept: Any, day: date) -> list[WrittenTableFile]:
    """The rows of a file that meet `kept`, written anew, one row group after another."""
    writer = landing.writer(table)
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number).filter(kept)
            if "date" not in rows.column_names:
                rows = rows.append_column("date", pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows))
            if rows.num_rows:
                writer.write(rows.select(SCHEMAS[table].names).cast(SCHEMAS[table]))
    return writer.close()
