"""What the status page shows: the flow from receivers to tables, read off the same values as `/metrics`."""

from collections.abc import Iterable
from typing import Any

from penstock.telemetry import Value

# Title, and the metrics of its rows: name, what the row is called, whether it counts up.
_FLOW: tuple[tuple[str, tuple[tuple[str, str, bool], ...]], ...] = (
    (
        "In",
        (
            ("penstock_receive_requests_total", "requests", True),
            ("penstock_receive_points_total", "points taken", True),
            ("penstock_receive_refused_total", "requests and points refused", True),
            ("penstock_l1_points_total", "points merged", True),
            ("penstock_l1_partials_total", "rows that they became", True),
            ("penstock_l1_held_bytes", "bytes held in memory", False),
        ),
    ),
    (
        "Segments and Spark",
        (
            ("penstock_segments_sealed_total", "segments sealed", True),
            ("penstock_spark_lag_segments", "segments not in the tables yet", False),
            ("penstock_spark_lag_seconds", "seconds that the oldest of them has waited", False),
            ("penstock_spark_batches_total", "batches", True),
            ("penstock_spark_rows_total", "rows read, as tasks merged them", True),
            ("penstock_spark_rows_written_total", "rows written", True),
            ("penstock_spark_files_written_total", "files written", True),
            ("penstock_spark_batch_seconds", "seconds of the last batch", False),
            ("penstock_tables_commit_conflicts_total", "commits that were tried again", True),
            ("penstock_tables_folded_rows_total", "rows folded away", True),
            ("penstock_spark_restarts_total", "restarts of the query", True),
        ),
    ),
    (
        "Processes",
        (
            ("penstock_service_child_up", "processes that run", False),
            ("penstock_service_child_restarts_total", "restarts", True),
        ),
    ),
)
_OF_A_QUEUE = (
    ("penstock_queue_size", "waiting", False),
    ("penstock_queue_bytes", "bytes", False),
    ("penstock_export_batches_total", "delivered", True),
    ("penstock_export_errors_total", "failed sends", True),
    ("penstock_queue_dropped_total", "dropped or refused", True),
    ("penstock_queue_dead_letter_total", "dead letters", True),
)


def status_page_flow(values: Iterable[Value]) -> dict[str, list[dict[str, Any]]]:
    """The page's sections and rows."""
    sums: dict[tuple[str, str], float] = {}
    for one in values:
        if not one.suffix:
            for queue in {one.labels.get("queue", ""), ""}:
                sums[(one.name, queue)] = sums.get((one.name, queue), 0.0) + one.value
    shown = {title: _rows(sums, metrics, "") for title, metrics in _FLOW[:1]}
    for queue in sorted({queue for name, queue in sums if name == "penstock_queue_size" and queue}):
        rows = _rows(sums, _OF_A_QUEUE, queue)
        limit = sums.get(("penstock_queue_max_bytes", queue), 0.0)
        if limit:
            for row in rows:
                if row["name"] == "bytes":
                    row["share"] = row["value"] / limit
        shown[f"Queue {queue}"] = rows
    shown |= {title: _rows(sums, metrics, "") for title, metrics in _FLOW[1:]}
    return {title: rows for title, rows in shown.items() if rows}


def _rows(
    sums: dict[tuple[str, str], float], metrics: Iterable[tuple[str, str, bool]], queue: str
) -> list[dict[str, Any]]:
    return [
        {"name": text, "value": sums[(name, queue)], "counts": counts}
        for name, text, counts in metrics
        if (name, queue) in sums
    ]
