"""The rows of the tables: one per series and bucket, with final values as plain columns. docs/reference/tables.md.

    partials ── increments ──► rows that are not final ── folded ──► final rows, one per series and bucket
                                         │                               │
                                         └────────── as_partials ◄───────┘

A row that is not final is an increment: what one batch has added since the last fold. Increments and final rows of one
series and bucket merge like partials. Places that keep tables have no other columns than these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import TablesOutdated
from penstock.model.finals import MERGES, Entries, merged_series_of_partials, partials_with_values, rank_name
from penstock.model.function import RANKS, Function, is_function
from penstock.model.grouping import group_starts, grouped_partials, one_array
from penstock.model.level import Level
from penstock.model.partial import PARTIALS, SERIES, STATES, TOP_N_ORDER, first_of_each
from penstock.tables.labels import LABELS, entity_column, label_columns

FORMAT = 2  # of the layout; 1 had one row for each part
TOP_N = "top_n"
TOP_KEPT = 10  # entities of a metric and minute that `read_top_n` gives
ENTRY = pa.struct([pa.field("index", pa.int64()), pa.field("count", pa.int64())])
DISTRIBUTION = pa.list_(ENTRY)
VALUES = ("value", "avg", *(rank_name(rank) for rank in RANKS))
_BUCKET = PARTIALS.field("bucket")
_KNOWN_BY = [pa.field("metric", pa.string()), pa.field("function", pa.string()), pa.field("labels", LABELS)]
_KNOWN_BY += [pa.field("series", pa.string())]

LEVEL_ROWS = pa.schema(
    [
        pa.field("date", pa.date32()),
        _BUCKET,
        *_KNOWN_BY,
        *(PARTIALS.field(state.name) for state in STATES),
        pa.field("distribution", DISTRIBUTION),
        *(pa.field(name, pa.float64()) for name in VALUES),
        pa.field("is_final", pa.bool_()),
    ]
)
TOP_N_ROWS = pa.schema(
    [
        pa.field("date", pa.date32()),
        pa.field("level", pa.string()),
        _BUCKET,
        *_KNOWN_BY,
        pa.field("record", LABELS),
        pa.field("record_id", pa.string()),
        pa.field("value", pa.float64()),
        pa.field("rank", pa.int64()),
        pa.field("is_final", pa.bool_()),
    ]
)
SCHEMAS: dict[str, Any] = {level.value: LEVEL_ROWS for level in Level} | {TOP_N: TOP_N_ROWS}
# What increments are made of: series and bucket once, labels as an entity.
PACKED_ROWS = pa.schema(
    [
        *(PARTIALS.field(name) for name in SERIES),
        *(PARTIALS.field(state.name) for state in STATES),
        pa.field("distribution", DISTRIBUTION),
    ]
)
# Records of a top-n, labels as an entity.
RECORDS = pa.schema([pa.field("level", pa.string()), *(PARTIALS.field(name) for name in (*SERIES, "record", "max"))])
IDENTITY_OF = {TOP_N: ("level", "metric", "function", "series", "bucket", "record_id")} | {
    level.value: ("metric", "function", "series", "bucket") for level in Level
}
SORTED_BY = {TOP_N: ("metric", "level", "series", "bucket", "function", "record_id")} | {
    level.value: ("metric", "series", "bucket", "function") for level in Level
}


def check_format(found: int, location: str, table: str) -> None:
    """TablesOutdated unless a table has the format that is written here."""
    if found < FORMAT:
        raise TablesOutdated(
            f"table {table!r} at {location} has format {found}, and this version of Penstock keeps format {FORMAT}: "
            "stop the job, then convert the tables with `penstock tables upgrade`"
        )
    if found > FORMAT:
        raise TablesOutdated(
            f"table {table!r} at {location} has format {found}, and this version of Penstock knows {FORMAT}: use the "
            "version that made it, or a later one"
        )


def table_date_of(buckets: Any) -> Any:
    """The day of each bucket, in UTC."""
    return one_array(buckets).cast(pa.timestamp("us")).cast(pa.date32(), safe=False)


def sorted_table_rows(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Rows in the order of these columns. Texts are compared once for each that differs."""
    order = np.lexsort([_comparable(rows[key]) for key in reversed(keys)])
    return rows.take(pa.array(order))


def _comparable(column: Any) -> Any:
    """Numbers that sort like the column."""
    if not (pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)):
        return one_array(column).cast(pa.int64()).to_numpy()
    coded = one_array(column.dictionary_encode().unify_dictionaries())
    places = np.empty(len(coded.dictionary), np.int64)
    places[pc.sort_indices(coded.dictionary).to_numpy()] = np.arange(len(places))
    return places[coded.indices.to_numpy()]


def packed_table_rows(partials: pa.Table) -> pa.Table:
    """Partials as rows of the schema `PACKED_ROWS`; records of a top-n are left out."""
    if not partials.num_rows:
        return PACKED_ROWS.empty_table()
    rows, entries = merged_series_of_partials(partials)
    return rows.append_column("distribution", distributions_as_table_column(entries, _has_parts(rows))).cast(
        PACKED_ROWS
    )


def packed_once(partials: pa.Table) -> pa.Table:
    """The same of partials of which no two have the same identity: only those that have parts are merged."""
    has_parts = _has_parts(partials)
    whole = partials.filter(pa.array(~has_parts))
    whole = whole.append_column("distribution", pa.nulls(whole.num_rows, DISTRIBUTION)).select(PACKED_ROWS.names)
    parts = partials.filter(pa.array(has_parts)).select(PARTIALS.names).cast(PARTIALS)
    return pa.concat_tables([whole.cast(PACKED_ROWS), packed_table_rows(parts)])


def increment_table_rows(rows: pa.Table) -> pa.Table:
    """Packed rows as rows of a level that are not final."""
    labels, series = label_columns(rows["entity"])
    count = rows.num_rows
    found: dict[str, Any] = {name: rows[name] for name in rows.column_names if name != "entity"}
    found |= {"date": table_date_of(rows["bucket"]), "labels": labels, "series": series}
    found |= dict.fromkeys(VALUES, pa.nulls(count, pa.float64()))
    found["is_final"] = pa.repeat(pa.scalar(False), count)
    return pa.table([found[name] for name in LEVEL_ROWS.names], names=LEVEL_ROWS.names).cast(LEVEL_ROWS)


def increment_top_n_rows(records: pa.Table) -> pa.Table:
    """Records as rows of the top-n table that are not final."""
    labels, series = label_columns(records["entity"])
    record, record_id = label_columns(records["record"])
    count = records.num_rows
    found: dict[str, Any] = {name: records[name] for name in ("level", "bucket", "metric", "function")}
    found |= {"date": table_date_of(records["bucket"]), "labels": labels, "series": series, "record": record}
    found |= {"record_id": record_id, "value": records["max"], "rank": pa.nulls(count, pa.int64())}
    found["is_final"] = pa.repeat(pa.scalar(False), count)
    return pa.table([found[name] for name in TOP_N_ROWS.names], names=TOP_N_ROWS.names).cast(TOP_N_ROWS)


def table_partials(rows: pa.Table) -> pa.Table:
    """Rows of a level in the schema `PARTIALS`, one for each entry of a distribution.

    What is known of the whole row is said by its first entry: `merged` gives the same states of a series as ever, and
    those of a single part are of no use to any reader.
    """
    if not rows.num_rows:
        return PARTIALS.empty_table()
    entries = entries_of_table_column(rows["distribution"])
    sizes = np.diff(entries.offsets)
    times = np.maximum(sizes, 1)  # a row without a distribution is its own part 0
    owner = np.repeat(np.arange(len(sizes)), times)
    first = np.r_[0, np.cumsum(times)[:-1]]
    is_first = np.zeros(len(owner), bool)
    is_first[first] = True
    has_entry = np.repeat(sizes > 0, times)
    parts, numbers = np.zeros(len(owner), np.int64), np.zeros(len(owner), np.int64)
    parts[has_entry], numbers[has_entry] = entries.indexes, entries.numbers
    is_distinct = is_function(rows["function"], lambda spec: spec.counts_distinct).to_numpy(zero_copy_only=False)[owner]
    taken = pa.array(owner)
    count = rows["count"].to_numpy()[owner]
    found: dict[str, Any] = {name: rows[name].take(taken) for name in ("metric", "function", "bucket", "min")}
    found["entity"] = entity_column(rows["labels"], rows["series"]).take(taken)
    found["part"] = pa.array(parts)
    found["record"] = pa.nulls(len(owner), pa.string())
    found["count"] = pa.array(np.where(has_entry & ~is_distinct, numbers, np.where(is_first, count, 0)))
    found["sum"] = pa.array(np.where(is_first, rows["sum"].to_numpy()[owner], 0.0))
    found["max"] = pa.array(np.where(has_entry & is_distinct, numbers, rows["max"].to_numpy()[owner]))
    return pa.table([found[name] for name in PARTIALS.names], names=PARTIALS.names).cast(PARTIALS)


def table_records(rows: pa.Table) -> pa.Table:
    """Rows of the top-n table in the schema `RECORDS`."""
    if not rows.num_rows:
        return RECORDS.empty_table()
    found: dict[str, Any] = {name: rows[name] for name in ("level", "bucket", "metric", "function")}
    found["entity"] = entity_column(rows["labels"], rows["series"])
    found["record"] = entity_column(rows["record"], rows["record_id"])
    found["max"] = rows["value"]
    return pa.table([found[name] for name in RECORDS.names], names=RECORDS.names).cast(RECORDS)


def top_records(records: pa.Table, kept: Callable[[str], int]) -> pa.Table:
    """Of the records of each series and bucket the greatest; ties go to the record that sorts first."""
    if not records.num_rows:
        return RECORDS.empty_table()
    keys = [name for name in RECORDS.names if name != "max"]
    rows = grouped_partials(records, keys, [("max", "max")]).rename_columns([*keys, "max"]).cast(RECORDS)
    found = []
    for function in pc.unique(rows["function"]).to_pylist():
        own = rows.filter(pc.equal(rows["function"], function))
        found.append(first_of_each(own, ("level", *SERIES), TOP_N_ORDER, kept(function)))
    return pa.concat_tables(found)


def records_kept(function: str) -> int:
    """How many records a top-n keeps."""
    return int(Function.parse(function).parameters[0])


def entries_of_table_column(column: Any) -> Entries:
    """A column of distributions as arrays."""
    lists = one_array(column)
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    flat = lists.flatten()
    indexes, numbers = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("index", "count"))
    return Entries(np.r_[0, np.cumsum(sizes)], indexes.astype(np.int64), numbers.astype(np.int64))


def distributions_as_table_column(entries: Entries, is_valid: Any) -> Any:
    """Entries as a column; null where `is_valid` is not, which have their entries left out."""
    sizes = np.diff(entries.offsets)
    kept = np.repeat(is_valid, sizes)
    offsets = np.r_[0, np.cumsum(np.where(is_valid, sizes, 0))].astype(np.int32)
    columns = [pa.array(entries.indexes[kept]), pa.array(entries.numbers[kept])]
    values = pa.StructArray.from_arrays(columns, fields=list(ENTRY))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=DISTRIBUTION, mask=pa.array(~is_valid))


def _has_parts(rows: pa.Table) -> Any:
    return is_function(rows["function"], lambda spec: spec.has_parts).to_numpy(zero_copy_only=False)


def folded_rows(rows: pa.Table, level: Level) -> pa.Table:
    """Rows of a level, without date and labels and sorted, made final: one per series and bucket.

    A final row to which nothing was added is passed on as it is.
    """
    keys = IDENTITY_OF[level.value]
    starts = group_starts(rows, keys)
    sizes = np.diff(np.r_[starts, rows.num_rows])
    is_open = ~rows["is_final"].to_numpy()
    is_touched = np.repeat(np.logical_or.reduceat(is_open, starts) | (sizes > 1), sizes)
    if not is_touched.any():
        return rows
    fresh = _made_final(rows.filter(pa.array(is_touched)), level)
    if is_touched.all():
        return fresh
    first = np.zeros(rows.num_rows, bool)
    first[starts] = True
    places = np.r_[np.flatnonzero(~is_touched), np.flatnonzero(first & is_touched)]
    together = pa.concat_tables([rows.filter(pa.array(~is_touched)), fresh.cast(rows.schema)])
    return together.take(pa.array(np.argsort(places, kind="stable")))


def _made_final(rows: pa.Table, level: Level) -> pa.Table:
    """One final row for each series and bucket; those of one are side by side."""
    rows = _without_overtaken(rows)
    keys = IDENTITY_OF[level.value]
    starts = group_starts(rows, keys)
    owner = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, rows.num_rows]))
    made = rows.select(list(keys)).take(pa.array(starts))
    for state in STATES:
        merged = MERGES[state.merge].reduceat(rows[state.name].to_numpy(), starts)
        made = made.append_column(state.name, pa.array(merged))
    entries = _merged_entries(entries_of_table_column(rows["distribution"]), owner, made)
    finals = partials_with_values(made, entries, level)
    finals = finals.append_column("distribution", distributions_as_table_column(entries, _has_parts(made)))
    finals = finals.append_column("is_final", pa.repeat(pa.scalar(True), finals.num_rows))
    return finals.select(rows.column_names).cast(rows.schema)


def _without_overtaken(rows: pa.Table) -> pa.Table:
    """Of functions of which the newest time counts, only the rows that have it."""
    is_newest = is_function(rows["function"], lambda spec: spec.keeps_newest).to_numpy(zero_copy_only=False)
    if not is_newest.any():
        return rows
    starts = group_starts(rows, IDENTITY_OF[Level.MINUTE.value])
    sizes = np.diff(np.r_[starts, rows.num_rows])
    entries = entries_of_table_column(rows["distribution"])
    times = np.full(rows.num_rows, np.iinfo(np.int64).min)
    has_entry = np.diff(entries.offsets) > 0
    times[has_entry] = entries.indexes[entries.offsets[1:][has_entry] - 1]
    newest = np.repeat(np.maximum.reduceat(times, starts), sizes)
    return rows.filter(pa.array(~is_newest | (times == newest)))


def _merged_entries(entries: Entries, owner: Any, made: pa.Table) -> Entries:
    """The entries of each made row: those of one index become one."""
    groups = np.repeat(owner, np.diff(entries.offsets))
    count = made.num_rows
    if not len(groups):
        return Entries(np.zeros(count + 1, np.int64), entries.indexes, entries.numbers)
    order = np.lexsort((entries.indexes, groups))
    groups, indexes, numbers = groups[order], entries.indexes[order], entries.numbers[order]
    starts = np.flatnonzero(np.r_[True, (groups[1:] != groups[:-1]) | (indexes[1:] != indexes[:-1])])
    owners = groups[starts]
    is_distinct = is_function(made["function"], lambda spec: spec.counts_distinct).to_numpy(zero_copy_only=False)
    added, greatest = np.add.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
    offsets = np.r_[0, np.cumsum(np.bincount(owners, minlength=count))]
    return Entries(offsets, indexes[starts], np.where(is_distinct[owners], greatest, added))


def folded_records(rows: pa.Table) -> pa.Table:
    """Rows of the top-n table, whole, made final: of each series and bucket the greatest, each with its rank."""
    best = top_records(table_records(rows), records_kept)
    made = increment_top_n_rows(best)
    starts = group_starts(best, ("level", *SERIES))
    sizes = np.diff(np.r_[starts, best.num_rows])
    ranks = np.arange(best.num_rows) - np.repeat(starts, sizes) + 1
    made = made.set_column(TOP_N_ROWS.get_field_index("rank"), "rank", pa.array(ranks, pa.int64()))
    finals = pa.repeat(pa.scalar(True), made.num_rows)
    made = made.set_column(TOP_N_ROWS.get_field_index("is_final"), "is_final", finals)
    return made.sort_by([(name, "ascending") for name in SORTED_BY[TOP_N]]).cast(TOP_N_ROWS)
