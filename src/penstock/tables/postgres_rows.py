"""Rows as PostgreSQL takes and gives them: labels and distributions are `jsonb` there.

jsonb has no NUL, so labels with one are kept whole, under the empty name, like an entity that is no JSON.
"""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from penstock.tables.labels import LABELS, entity_from_table_labels, first_of_each_text
from penstock.tables.table_rows import DISTRIBUTION, SCHEMAS

TYPES = {
    "string": 'text collate "C"',  # compared byte by byte, as everywhere else
    "int64": "bigint",
    "double": "double precision",
    "bool": "boolean",
    "date32[day]": "date",
    "timestamp[us, tz=UTC]": "timestamptz",
    str(LABELS): "jsonb",
    str(DISTRIBUTION): "jsonb",
}
_NUL = "\N{REPLACEMENT CHARACTER}"


def postgres_rows_as_csv(rows: pa.Table) -> bytes:
    """Rows for COPY in the form csv: texts quoted, nulls bare."""
    for place, field in enumerate(rows.schema):
        column = rows[field.name]
        if field.type == LABELS:
            column = _labels_as_json(column, rows["record_id" if field.name == "record" else "series"])
        elif field.type == DISTRIBUTION:
            column = pa.array([None if one is None else json.dumps(one) for one in column.to_pylist()], pa.string())
        elif field.type == pa.string():
            column = pc.replace_substring(column, "\0", _NUL)
        else:
            continue
        rows = rows.set_column(place, field.name, column)
    text = pa.BufferOutputStream()
    pa_csv.write_csv(rows, text, pa_csv.WriteOptions(include_header=False))
    return bytes(text.getvalue())


def table_from_postgres_rows(name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Rows of a query as a table."""
    schema = SCHEMAS[name]
    columns: list[Any] = list(map(list, zip(*rows))) or [[] for _ in schema]
    for place, field in enumerate(schema):
        if field.type == LABELS:
            columns[place] = [sorted(labels.items()) for labels in columns[place]]
    return pa.table(columns, schema=schema)


def _labels_as_json(maps: Any, known_by: Any) -> Any:
    """Each set of labels is written once."""
    known, first = first_of_each_text(known_by)
    pairs = maps.take(pa.array(first)).to_pylist()
    texts = [json.dumps(_storable(some), ensure_ascii=False) for some in pairs]
    return pa.array(texts, pa.string()).take(known.indices)


def _storable(pairs: list[tuple[str, str]]) -> dict[str, str]:
    has_nul = any("\0" in name or "\0" in text for name, text in pairs)
    return {"": entity_from_table_labels(pairs)} if has_nul else dict(pairs)
