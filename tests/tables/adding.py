"""Rows added to a table as a batch's tasks and its driver do it."""

import pyarrow as pa

from penstock.model.partial import PARTIALS
from penstock.tables.landing import WrittenTableFile
from penstock.tables.port import TOP_N, TableBatch, Tables
from penstock.tables.table_rows import RECORDS, increment_table_rows, increment_top_n_rows, packed_table_rows


def land(tables: Tables, name: str, rows: pa.Table) -> list[WrittenTableFile]:
    """What one task writes: of partials, or of records."""
    writer = tables.landing("test").writer(name)
    writer.write(as_increments(name, rows))
    return writer.close()


def as_increments(name: str, rows: pa.Table) -> pa.Table:
    if name == TOP_N:
        return increment_top_n_rows(rows.select(RECORDS.names).cast(RECORDS))
    return increment_table_rows(packed_table_rows(rows.select(PARTIALS.names).cast(PARTIALS)))


def add(tables: Tables, name: str, rows: pa.Table, batch: TableBatch) -> bool:
    return tables.append(name, land(tables, name, rows), batch)
