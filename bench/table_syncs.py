"""What it costs that a batch is on the disk before its guard says so: the same batches with syncs and without.

python -m bench.table_syncs [folder] [batches]
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from penstock import durable
from penstock.model.function import AVG
from penstock.model.partial import merged, partials_of_columns
from penstock.tables import delta, delta_log, landing, parquet
from penstock.tables.landing import WrittenTableFile, close_all
from penstock.tables.port import TableBatch, Tables, open_tables
from penstock.tables.table_rows import increment_table_rows, packed_table_rows

LEVELS = ("minute", "hour", "day")
SERIES = 10_000
TASKS = 2


def main(folder: str, batches: int) -> None:
    rows = increment_table_rows(packed_table_rows(_partials()))
    print(f"{SERIES:,} rows into each of {len(LEVELS)} tables by {TASKS} tasks, {batches} batches, median (p90)")
    for form in ("", "parquet:"):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            arms = {syncs: open_tables(f"{form}{scratch}/{syncs}") for syncs in ("with", "without")}
            took: dict[str, list[float]] = {syncs: [] for syncs in arms}
            for number in range(batches):
                for syncs, tables in arms.items():
                    took[syncs].append(_add(tables, rows, number, is_synced=syncs == "with"))
            for tables in arms.values():
                assert tables.describe("day").rows == batches * rows.num_rows
            texts = [f"{syncs} {_text(seconds[2:])}" for syncs, seconds in took.items()]
            more = statistics.median(took["with"][2:]) - statistics.median(took["without"][2:])
            print(f"  {form or 'delta:':<9} {', '.join(texts)}: {1000 * more:.0f} ms a batch")


def _add(tables: Tables, rows: pa.Table, number: int, *, is_synced: bool) -> float:
    with ExitStack() as stack:
        if not is_synced:
            for module in (durable, landing, delta, delta_log, parquet):
                stack.enter_context(patch.object(module, "sync_to_disk", lambda _: None))
        began = time.perf_counter()
        place, share = tables.landing(f"batch-{number}"), rows.num_rows // TASKS
        written: list[WrittenTableFile] = []
        for task in range(TASKS):
            writers = [place.writer(name) for name in LEVELS]
            for writer in writers:
                writer.write(rows.slice(task * share, share))
            written += close_all(writers)
        batch = TableBatch("bench", {"edge": number - 1} if number else {}, {"edge": number})
        for name in LEVELS:
            tables.append(name, [one for one in written if one.table == name], batch)
        return time.perf_counter() - began


def _partials() -> pa.Table:
    moments = pa.array(np.full(SERIES, 1_800_000_000_000_000), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    entities = pa.array([f'{{"host":"h{number}"}}' for number in range(SERIES)])
    return merged(partials_of_columns("cpu", AVG, entities, moments, pa.array(np.random.default_rng(7).random(SERIES))))


def _text(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ({1000 * statistics.quantiles(seconds, n=10)[-1]:.0f}) ms"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".", int(sys.argv[2]) if len(sys.argv) > 2 else 30)
