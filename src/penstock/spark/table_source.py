"""The tables as a source for Spark, at their newest whenever a query is planned: `format("penstock-table")`.

    spark.read.format("penstock-table").option("path", "/data/tables").option("table", "hour").load()

Filters on metric, series, function, date and bucket choose files and row groups. Spark does not hand over a filter on
an entry of a map. So labels that are named (`option("labels", "service,host")`) are also fields of a column `label`,
and `label.service = 'x'` leaves rows out while they are read.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.model.grouping import one_array
from penstock.tables.metrics_table import METRIC_ROWS, METRICS
from penstock.tables.port import open_tables
from penstock.tables.snapshot import KEYS, VIEW_SCHEMAS, SnapshotPiece, Wanted, plan_pieces, read_piece

SCHEMAS: dict[str, Any] = {**VIEW_SCHEMAS, METRICS: METRIC_ROWS}
LABEL = "label"  # the column of labels that were named
_BATCH_ROWS = 4096
_COMPARED: dict[type[Filter], Callable[[Any, Any], Any]] = {
    datasource.EqualTo: lambda column, value: column == value,
    datasource.GreaterThan: lambda column, value: column > value,
    datasource.GreaterThanOrEqual: lambda column, value: column >= value,
    datasource.LessThan: lambda column, value: column < value,
    datasource.LessThanOrEqual: lambda column, value: column <= value,
    datasource.In: lambda column, value: column.isin(value),
}


class TableSource(DataSource):
    """One table at `option("path")`: minute, hour, day, top_n or metrics."""

    @classmethod
    def name(cls) -> str:
        return "penstock-table"

    def schema(self) -> StructType:
        return from_arrow_schema(seen_schema(_table(self.options), _labels(self.options)))

    def reader(self, schema: StructType) -> "TableReader":
        path = self.options.get("path")
        if not path:
            raise ConfigError("the penstock-table source needs option('path'): where the tables are")
        return TableReader(path, _table(self.options), _labels(self.options))


def _table(options: Any) -> str:
    name = str(options.get("table", ""))
    if name not in SCHEMAS:
        raise ConfigError(f"option('table') must be one of {', '.join(SCHEMAS)}, got {name!r}")
    return name


def _labels(options: Any) -> tuple[str, ...]:
    return tuple(name for name in str(options.get("labels", "")).split(",") if name)


def seen_schema(table: str, labels: Sequence[str]) -> pa.Schema:
    schema = SCHEMAS[table]
    if not labels or table == METRICS:
        return schema
    return schema.append(pa.field(LABEL, pa.struct([pa.field(name, pa.string()) for name in labels])))


class WholeTable(InputPartition):
    """A table that is read at once: that of the metrics."""


class TablePiece(InputPartition):
    """A piece of a table."""

    def __init__(self, piece: SnapshotPiece) -> None:
        self.piece = piece


class TableReader(DataSourceReader):
    """Reads what the table holds when the query is planned, whatever is folded or vacuumed later."""

    def __init__(self, path: str, table: str, labels: tuple[str, ...]) -> None:
        self._path = path
        self._table = table
        self._labels = labels
        self._wanted = Wanted()

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Note what can be left out. Spark applies all of them again, so that none has to be exact here."""
        self._wanted = wanted_by(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        if self._table == METRICS:
            return [WholeTable(None)]
        pieces = plan_pieces(open_tables(self._path), self._table, self._wanted)
        return [TablePiece(piece) for piece in pieces] or [WholeTable(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = seen_schema(self._table, self._labels)
        for rows in self._rows(partition):
            shown = rows.append_column(LABEL, self._named(rows)) if LABEL in schema.names else rows
            yield from shown.cast(schema).to_batches(max_chunksize=_BATCH_ROWS)

    def _rows(self, partition: InputPartition) -> Iterator[pa.Table]:
        if isinstance(partition, TablePiece):
            yield from read_piece(partition.piece)
        elif self._table == METRICS:
            yield open_tables(self._path).metrics()

    def _named(self, rows: pa.Table) -> Any:
        maps = one_array(rows["labels"])
        columns = [pc.map_lookup(maps, pa.scalar(name), "first") for name in self._labels]
        return pa.StructArray.from_arrays(columns, names=list(self._labels))


def wanted_by(filters: Sequence[Filter]) -> Wanted:
    """What these filters leave of a table."""
    start, end = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    keys, labels = [], []
    for one in filters:
        path: tuple[str, ...] = getattr(one, "attribute", ())
        value: Any = getattr(one, "value", None)
        if type(one) not in _COMPARED:
            continue
        values = list(value) if isinstance(one, datasource.In) else [value]
        if any(some is None for some in values):
            continue
        if path[:1] == (LABEL,) and len(path) == 2 and isinstance(one, datasource.EqualTo | datasource.In):
            labels.append((path[1], tuple(values)))
        elif len(path) == 1 and path[0] in KEYS:
            if path[0] != "date":
                compared = pa.array(values) if isinstance(one, datasource.In) else value
                keys.append(_COMPARED[type(one)](pc.field(path[0]), compared))
            low, high = _bounds(one, path[0], values)
            start, end = max(start, low), min(end, high)
    return Wanted(start, end, reduce(lambda one, other: one & other, keys) if keys else None, tuple(labels))


def _bounds(one: Filter, name: str, values: Sequence[Any]) -> tuple[datetime, datetime]:
    """Between which buckets a filter on dates or buckets leaves rows; wide open for any other."""
    start, end = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    if name not in ("date", "bucket"):
        return start, end
    firsts = [_moment(value, datetime.min) for value in values]
    lasts = [_moment(value, datetime.max) for value in values]
    if not isinstance(one, datasource.LessThan | datasource.LessThanOrEqual):
        start = min(firsts)
    if not isinstance(one, datasource.GreaterThan | datasource.GreaterThanOrEqual):
        end = max(lasts)
    return start, end


def _moment(value: Any, of_day: datetime) -> datetime:
    """A bucket as it is; of a date its first or last moment."""
    if isinstance(value, datetime):
        return value if value.tzinfo else value.astimezone()
    assert isinstance(value, date)
    return datetime.combine(value, of_day.time(), UTC)
