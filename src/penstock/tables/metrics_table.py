"""The `metrics` table: one row for each metric and function, with what senders say of it and when it was seen.

It is small, so it is written anew as a whole. Rows merge by the earliest, the latest and what was said last, so adding
the same twice changes nothing: a batch that runs again needs no guard here.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.metric_description import Descriptions, MetricDescription
from penstock.model.partial import PARTIALS

METRICS = "metrics"
_TIME = PARTIALS.field("bucket").type
METRIC_ROWS = pa.schema(
    [
        pa.field("metric", pa.string()),
        pa.field("type", pa.string()),
        pa.field("function", pa.string()),
        pa.field("unit", pa.string()),
        pa.field("description", pa.string()),
        pa.field("first_seen", _TIME),
        pa.field("last_seen", _TIME),
    ]
)
SAID = ("type", "unit", "description")
Seen = Mapping[tuple[str, str], tuple[datetime, datetime]]  # by metric and function: first and last minute


def merged_metrics(older: pa.Table, newer: pa.Table) -> pa.Table:
    """One row for each metric and function of both."""
    rows = {(row["metric"], row["function"]): row for row in older.to_pylist()}
    for row in newer.to_pylist():
        key = row["metric"], row["function"]
        rows[key] = _merged(rows[key], row) if key in rows else row
    return pa.Table.from_pylist([rows[key] for key in sorted(rows)], schema=METRIC_ROWS)


def _merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    said = {name: newer[name] or older[name] for name in SAID}
    return {
        **older,
        **said,
        "first_seen": min(older["first_seen"], newer["first_seen"]),
        "last_seen": max(older["last_seen"], newer["last_seen"]),
    }


def seen_in(rows: pa.Table) -> dict[tuple[str, str], tuple[datetime, datetime]]:
    """The first and last bucket of each metric and function."""
    if not rows.num_rows:
        return {}
    found = rows.select(["metric", "function", "bucket"]).group_by(["metric", "function"])
    found = found.aggregate([("bucket", "min"), ("bucket", "max")]).cast(
        pa.schema(
            [METRIC_ROWS.field("metric"), METRIC_ROWS.field("function")]
            + [pa.field(f"bucket_{end}", _TIME) for end in ("min", "max")]
        )
    )
    return {(row["metric"], row["function"]): (row["bucket_min"], row["bucket_max"]) for row in found.to_pylist()}


def seen_by_all(parts: Iterable[Seen]) -> dict[tuple[str, str], tuple[datetime, datetime]]:
    found: dict[tuple[str, str], tuple[datetime, datetime]] = {}
    for part in parts:
        for key, (first, last) in part.items():
            known = found.get(key, (first, last))
            found[key] = min(known[0], first), max(known[1], last)
    return found


class MetricsBook:
    """What a job knows to be in the `metrics` table: most batches bring nothing new, and cost nothing there."""

    def __init__(self, known: pa.Table) -> None:
        self._rows = {(row["metric"], row["function"]): row for row in known.to_pylist()}

    def news(self, seen: Seen, said: Descriptions) -> pa.Table:
        """The rows that a batch changes or adds; from then on they are known."""
        changed = []
        nothing = MetricDescription()
        for key in {*seen, *(key for key in self._rows if key[0] in said)}:
            before = self._rows.get(key)
            one = said.get(key[0], nothing)
            first, last = seen[key] if key in seen else (before["first_seen"], before["last_seen"])  # type: ignore[index]
            row: dict[str, Any] = {name: getattr(one, name) or None for name in SAID}
            row |= {"metric": key[0], "function": key[1], "first_seen": first, "last_seen": last}
            after = _merged(before, row) if before else row
            if after != before:
                self._rows[key] = after
                changed.append(after)
        return pa.Table.from_pylist(changed, schema=METRIC_ROWS)


def still_seen(rows: pa.Table, before: datetime) -> pa.Table:
    """Without metrics that were last seen before that moment."""
    return rows.filter(pc.greater_equal(rows["last_seen"], pa.scalar(before, _TIME)))
