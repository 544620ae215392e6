"""Tables of format 1 as tables of this one: exact, and begun again where it was cut off.

    format 1    metric function entity bucket part count sum min max    one row for each part; a top-n had entities

    files       <folder>/.upgrade/minute    what is being made; begun anew each time
                <folder>/.format-1/minute   what it replaces: moved away when the new one is complete and checked
    database    one transaction a table

Rows become increments, so the next fold makes them final. Guards stay, so the job goes on where it was.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
from deltalake import DeltaTable

from penstock.errors import RowsMissing, TableConflict, TablesOutdated
from penstock.model.function import is_function
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.tables.delta import MAINTENANCE, DeltaTables
from penstock.tables.parquet import ParquetTables
from penstock.tables.port import Tables
from penstock.tables.table_rows import (
    RECORDS,
    SCHEMAS,
    TOP_N,
    increment_table_rows,
    increment_top_n_rows,
    packed_table_rows,
    records_kept,
    top_records,
)

BATCH_ROWS = 100_000
OLD_LEVEL = [name for name in PARTIALS.names if name != "record"]
OLD_TOP = ["metric", "function", "bucket", "entity", "record", "max"]
Points = Counter[tuple[str, str]]  # by metric and function


def upgrade_tables(tables: Tables) -> Iterator[tuple[str, int]]:
    """Convert every table that has format 1; its name and how many points it holds."""
    if tables.location.startswith("postgres"):
        from penstock.tables.postgres import PostgresTables

        assert isinstance(tables, PostgresTables)
        for name in SCHEMAS:
            if tables.is_outdated(name):
                with tables.converting(name, old_table_columns(name), BATCH_ROWS) as (batches, write):
                    before, after = Points(), Points()
                    for rows in batches:
                        before += points_of_old_table(rows)
                        made = converted_table_rows(name, rows)
                        after += points_of_old_table(made)
                        write(made)
                    _check(name, before, after)
                yield name, sum(before.values())
        return
    assert isinstance(tables, DeltaTables | ParquetTables)
    folder = tables.folder
    for name in SCHEMAS:
        place, made, old = folder / name, folder / ".upgrade" / name, folder / ".format-1" / name
        if old.exists() and not place.exists():  # cut off between the two renames: what was made is complete
            made.rename(place)
        if not place.exists() or not _is_outdated(tables, name):
            continue
        shutil.rmtree(made, ignore_errors=True)
        points = _convert_delta(tables, name) if isinstance(tables, DeltaTables) else _convert_parquet(tables, name)
        old.parent.mkdir(exist_ok=True)
        place.rename(old)
        made.rename(place)
        yield name, points
    for rest in (".upgrade", ".format-1"):
        shutil.rmtree(folder / rest, ignore_errors=True)


def old_table_columns(name: str) -> list[str]:
    return OLD_TOP if name == TOP_N else OLD_LEVEL


def converted_table_rows(name: str, rows: pa.Table) -> pa.Table:
    """Rows of format 1 as increments. Entities of a top-n are left out: they are ranked when they are read."""
    if name != TOP_N:
        record = pa.nulls(rows.num_rows, pa.string())
        partials = rows.append_column("record", record).select(PARTIALS.names).cast(PARTIALS)
        return increment_table_rows(packed_table_rows(partials))
    rows = rows.filter(pc.is_valid(rows["record"]))
    found = []
    for level in Level:
        moments = rows["bucket"].cast(pa.timestamp("us"))
        buckets = pc.floor_temporal(moments, unit=level.value).cast(PARTIALS.field("bucket").type)
        placed = rows.set_column(rows.schema.get_field_index("bucket"), "bucket", buckets)
        placed = placed.append_column("level", pa.repeat(pa.scalar(level.value), rows.num_rows))
        found.append(top_records(placed.select(RECORDS.names).cast(RECORDS), records_kept))
    return increment_top_n_rows(pa.concat_tables(found))


def points_of_old_table(rows: pa.Table) -> Points:
    """The points of each metric; not of functions of which rows come and go without any loss."""
    if "count" not in rows.column_names or not rows.num_rows:
        return Points()
    kept = rows.filter(pc.invert(is_function(rows["function"], lambda spec: spec.keeps_newest)))
    found = kept.select(["metric", "function", "count"]).group_by(["metric", "function"]).aggregate([("count", "sum")])
    return Points({(row["metric"], row["function"]): row["count_sum"] for row in found.to_pylist()})


def _check(name: str, before: Points, after: Points) -> None:
    for key in before.keys() | after.keys():
        if before[key] != after[key]:
            raise RowsMissing(
                f"table {name!r} has {before[key]} points of {key[0]!r}, its conversion {after[key]}: nothing changed"
            )


def _is_outdated(tables: DeltaTables | ParquetTables, name: str) -> bool:
    try:
        tables.describe(name)
    except TablesOutdated:
        return True
    return False


def _written(tables: DeltaTables | ParquetTables, name: str, batches: Iterable[pa.Table]) -> tuple[Any, Points]:
    """What is written of old rows for the new table, once it is checked that its files hold all points."""
    writer, before, after = tables.landing("upgrade").writer(name), Points(), Points()
    for rows in batches:
        before += points_of_old_table(rows)
        writer.write(converted_table_rows(name, rows))
    written = writer.close()
    if name != TOP_N:
        for file in written:
            columns = ["metric", "function", "count"]
            for batch in pq.ParquetFile(file.place).iter_batches(columns=columns):
                after += points_of_old_table(pa.Table.from_batches([batch]))
        _check(name, before, after)
    return written, before


def _batches(dataset: Any, name: str) -> Iterator[pa.Table]:
    for batch in dataset.to_batches(columns=old_table_columns(name), batch_size=BATCH_ROWS):
        if batch.num_rows:
            yield pa.Table.from_batches([batch])


def _convert_delta(tables: DeltaTables, name: str) -> int:
    old, fresh = DeltaTable(str(tables.path(name))), DeltaTables(tables.folder / ".upgrade")
    written, points = _written(fresh, name, _batches(old.to_pyarrow_dataset(), name))
    fresh.adopt(name, written, _guards(tables.path(name) / "_delta_log"))
    if DeltaTable(str(tables.path(name))).version() != old.version():
        raise TableConflict(f"table {name!r} was changed during its conversion: stop the job, then try again")
    return sum(points.values())


def _guards(log_folder: Path) -> dict[str, int]:
    """What Delta's log says of all guards: deltalake tells only of those that are asked for by name."""
    found: dict[str, int] = {}
    actions: list[Any] = []
    for path in sorted(log_folder.glob("*.checkpoint*.parquet")):
        with suppress(KeyError):
            actions += pq.read_table(path, columns=["txn"], partitioning=None)["txn"].to_pylist()
    for path in sorted(log_folder.glob("*.json")):
        actions += [json.loads(line).get("txn") for line in path.read_text().splitlines()]
    for action in actions:
        if action and action["appId"] and action["appId"] != MAINTENANCE:
            found[action["appId"]] = max(action["version"], found.get(action["appId"], -1))
    return found


def _convert_parquet(tables: ParquetTables, name: str) -> int:
    fresh = ParquetTables(str(tables.folder / ".upgrade"))
    with tables.locked(name):
        folders = [path for path in sorted((tables.folder / name).iterdir()) if path.name[0] not in "._"]
        guards = {folder: json.loads((folder / "_guard.json").read_text()) for folder in folders}
        replaced = {gone for guard in guards.values() for gone in guard["replaces"]}
        live = [folder for folder in folders if folder.name not in replaced]
        versions: dict[str, int] = {}
        for folder in live:
            for application, version in guards[folder]["versions"].items():
                versions[application] = max(version, versions.get(application, -1))
        files = [str(file) for folder in live for file in folder.glob("*.parquet")]
        batches = _batches(pa_dataset.dataset(files, format="parquet", partitioning=None), name) if files else iter(())
        written, points = _written(fresh, name, batches)
        fresh.adopt(name, written, versions)
    return sum(points.values())
