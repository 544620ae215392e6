"""The tables as they are this second: final rows and increments merged, in pieces that any machine reads.

    files ── plan_pieces ──► pieces ── read_piece, anywhere ──► rows as the views of every engine have them

A final file whose buckets got nothing new is read as it is. Others are folded with their increments while they are
read: the code that folds tables is the code that answers. Rows are those of the tables, with three differences: there
is one per series and bucket, `is_final` is left out, and an entry of a distribution says what it stands for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset

from penstock.errors import ConfigError
from penstock.model.exponential import percentile_part_middles
from penstock.model.function import Function
from penstock.model.grouping import one_array
from penstock.tables.fold import TableFile, fold_rows, plan_folds
from penstock.tables.landing import GROUP_ROWS, TableFileLanding
from penstock.tables.table_rows import ENTRY, LEVEL_ROWS, SCHEMAS, TOP_N, TOP_N_ROWS, entries_of_table_column

VIEW_ENTRY = pa.struct([*ENTRY, pa.field("value", pa.float64())])
VIEW_DISTRIBUTION = pa.list_(VIEW_ENTRY)
_PLACE = LEVEL_ROWS.get_field_index("distribution")
_LEVEL_VIEW = LEVEL_ROWS.set(_PLACE, pa.field("distribution", VIEW_DISTRIBUTION))
VIEW_SCHEMAS: dict[str, Any] = dict.fromkeys(SCHEMAS, _LEVEL_VIEW) | {TOP_N: TOP_N_ROWS}
VIEW_SCHEMAS = {name: rows.remove(rows.get_field_index("is_final")) for name, rows in VIEW_SCHEMAS.items()}
# Columns by which rows are told apart, so that leaving rows out by them changes no other row.
KEYS = frozenset({"date", "bucket", "metric", "function", "series", "level"})
_LONG_AGO = date(1970, 1, 3)  # nothing is folded only to have fewer files


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asks for. Rows that it leaves out need not be read; it may get more."""

    start: datetime | None = None  # of buckets: the first
    end: datetime | None = None  # and the last
    keys: Any = None  # an expression of pyarrow over `KEYS`
    labels: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())  # names, and the texts that each may have

    def meets(self, first: datetime, last: datetime) -> bool:
        return (self.end is None or first <= self.end) and (self.start is None or last >= self.start)


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    """What one task reads: files of one date, and which of their rows."""

    table: str
    date: date
    paths: tuple[str, ...]
    is_folded: bool  # the files are final and none of their buckets has increments
    keys: Any
    labels: tuple[tuple[str, tuple[str, ...]], ...]


def plan_pieces(tables: Any, name: str, wanted: Wanted) -> list[SnapshotPiece]:
    """How to read a table as it is now. ConfigError for tables in a database: it has views of its own."""
    if not hasattr(tables, "files"):
        raise ConfigError(
            f"tables must be a folder, got {tables.location}: a database has these views itself, and engines read them "
            "through its own driver (in Spark: the jdbc source)"
        )
    files: list[TableFile] = [file for file in tables.files(name) if wanted.meets(file.first, file.last)]
    pieces, folded = [], set[str]()
    for fold in plan_folds(name, files, TableFileLanding({}), _LONG_AGO):
        folded.update(file.path for file in fold.replaced)
        for task in fold.tasks:
            if task.paths and wanted.meets(task.start, task.end):
                bounds = [wanted.keys, pc.field("bucket") >= task.start, pc.field("bucket") < task.end]
                if task.shares > 1:
                    low, high = ((task.share + more << 32) // task.shares for more in (0, 1))
                    bounds += [pc.field("series") >= f"{low:08x}"]
                    bounds += [pc.field("series") < f"{high:08x}"] if task.share + 1 < task.shares else []
                pieces.append(SnapshotPiece(name, fold.date, task.paths, False, _all(bounds), wanted.labels))
    left = [file for file in files if file.path not in folded]
    return pieces + [SnapshotPiece(name, file.date, (file.path,), True, wanted.keys, wanted.labels) for file in left]


def read_piece(piece: SnapshotPiece) -> Iterator[pa.Table]:
    """The rows of a piece, in the schema of `VIEW_SCHEMAS`. Row groups that its keys rule out are not read."""
    if not all(Path(path).is_file() for path in piece.paths):
        raise FileNotFoundError(
            f"files of table {piece.table!r} and {piece.date} were folded while they were read: ask again"
        )
    schema = SCHEMAS[piece.table].remove(SCHEMAS[piece.table].get_field_index("date"))
    dataset = pa_dataset.dataset(list(piece.paths), schema=schema, format="parquet", partitioning=None)
    scan = dataset.scanner(filter=piece.keys, batch_size=GROUP_ROWS, batch_readahead=2, fragment_readahead=2)
    read = (_labelled(pa.Table.from_batches([batch]), piece) for batch in scan.to_batches())
    if piece.is_folded:
        yield from (_as_seen(rows, piece) for rows in read if rows.num_rows)
        return
    together = pa.concat_tables([schema.empty_table(), *read])
    if together.num_rows:
        yield _as_seen(fold_rows(piece.table, _dated(together, piece)), piece)


def read_snapshot(tables: Any, name: str, wanted: Wanted | None = None) -> pa.Table:
    """A table as it is now, whole."""
    found = [rows for piece in plan_pieces(tables, name, wanted or Wanted()) for rows in read_piece(piece)]
    return pa.concat_tables([VIEW_SCHEMAS[name].empty_table(), *found])


def _all(bounds: Sequence[Any]) -> Any:
    found = None
    for bound in bounds:
        if bound is not None:
            found = bound if found is None else found & bound
    return found


def _labelled(rows: pa.Table, piece: SnapshotPiece) -> pa.Table:
    for name, texts in piece.labels:
        found = pc.map_lookup(one_array(rows["labels"]), pa.scalar(name), "first")
        rows = rows.filter(pc.is_in(found, pa.array(texts, pa.string())))
    return rows


def _dated(rows: pa.Table, piece: SnapshotPiece) -> pa.Table:
    day = pa.repeat(pa.scalar(piece.date, pa.date32()), rows.num_rows)
    return rows.append_column("date", day).select(SCHEMAS[piece.table].names)


def _as_seen(rows: pa.Table, piece: SnapshotPiece) -> pa.Table:
    schema = VIEW_SCHEMAS[piece.table]
    if "date" not in rows.column_names:
        rows = _dated(rows, piece)
    if piece.table != TOP_N:
        rows = rows.set_column(rows.schema.get_field_index("distribution"), "distribution", _with_values(rows))
    return rows.select(schema.names).cast(schema)


def _with_values(rows: pa.Table) -> Any:
    """Distributions whose entries say what they stand for."""
    lists = one_array(rows["distribution"])
    entries = entries_of_table_column(lists)
    owner = np.repeat(np.arange(len(lists)), np.diff(entries.offsets))
    texts = one_array(rows["function"].cast(pa.string())).dictionary_encode()
    own = texts.indices.to_numpy()[owner]
    values, is_known = np.zeros(len(owner)), np.zeros(len(owner), bool)
    for code, text in enumerate(texts.dictionary.to_pylist()):
        mine = own == code
        if mine.any():
            stands_for = _stand_for(Function.parse(text), entries.indexes[mine])
            if stands_for is not None:
                values[mine], is_known[mine] = stands_for, True
    columns = [pa.array(entries.indexes), pa.array(entries.numbers), pa.array(values, mask=~is_known)]
    made = pa.StructArray.from_arrays(columns, fields=list(VIEW_ENTRY))
    offsets, is_null = pa.array(entries.offsets.astype(np.int32)), pc.is_null(lists)
    return pa.ListArray.from_arrays(offsets, made, type=VIEW_DISTRIBUTION, mask=is_null)


def _stand_for(function: Function, indexes: Any) -> Any:
    """The value that a bucket stands for, the greatest that a bound lets in, the registers of a sketch; else None."""
    spec = function.spec
    if spec.has_percentiles:
        return percentile_part_middles(pa.array(indexes), function.parameters[0]).to_numpy()
    if spec.counts_distinct:
        return float(1 << int(function.parameters[0]))
    if spec.has_bounds:
        return np.array([*function.parameters, np.inf])[indexes]
    return None
