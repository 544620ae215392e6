"""Rows added to a table as a batch's tasks and its driver do it."""

import pyarrow as pa

from penstock.tables.landing import Written
from penstock.tables.port import SCHEMAS, Batch, Tables


def land(tables: Tables, name: str, rows: pa.Table) -> list[Written]:
    """What one task writes."""
    writer = tables.landing("test").writer(name)
    writer.write(rows.select(SCHEMAS[name].names).cast(SCHEMAS[name]))
    written = writer.close()
    return [written] if written else []


def add(tables: Tables, name: str, rows: pa.Table, batch: Batch) -> bool:
    return tables.append(name, land(tables, name, rows), batch)
