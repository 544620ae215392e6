"""Values at the end of what a double holds, through the whole service: their series has no sum, the others go on."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA

from penstock.testing import wait_until
from tests.servers import PostgreSQL
from tests.service.running import HEADERS, Running

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.timeout(900)]
HUGE = 1.7e308
MINUTE = 1_790_000_040  # seconds
TEXT = """
spark: {master: 'local[1]', trigger: 500ms, conf: {spark.driver.memory: 512m}}
tables: {fold_every: 1s}
"""


def request(second: int, **gauges: float) -> bytes:
    """Gauges, and a histogram that says of itself what cannot be."""
    made = ExportMetricsServiceRequest()
    metrics = made.resource_metrics.add().scope_metrics.add().metrics
    for name, value in gauges.items():
        metrics.add(name=name).gauge.data_points.add(as_double=value, time_unix_nano=(MINUTE + second) * 10**9)
    histogram = metrics.add(name="odd").histogram
    histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_DELTA
    histogram.data_points.add(
        time_unix_nano=(MINUTE + second) * 10**9,
        count=2**40,
        sum=float("inf"),
        min=float("-inf"),
        max=float("inf"),
        explicit_bounds=[-HUGE, HUGE],
        bucket_counts=[1, 2**40 - 2, 1],
    )
    return bytes(made.SerializeToString())


def test_a_gauge_at_the_end_of_the_range_stops_no_table_of_postgresql(tmp_path: Path) -> None:
    with (
        PostgreSQL(tmp_path / "postgres") as server,
        Running(tmp_path, TEXT, tables_location=server.url) as running,
    ):

        def rows(metric: str) -> list[tuple[Any, ...]]:
            with psycopg.connect(server.url) as connection:
                try:
                    return connection.execute(
                        "select count, sum, avg, min, max from penstock_hour where metric = %s and is_final", (metric,)
                    ).fetchall()
                except psycopg.errors.UndefinedTable:
                    return []

        def send(second: int, **gauges: float) -> None:
            url = f"http://127.0.0.1:{running.port}/v1/metrics"
            with urllib.request.urlopen(urllib.request.Request(url, request(second, **gauges), HEADERS)) as answer:
                assert answer.status == 200

        send(0, huge=HUGE, small=5e-324)
        wait_until(lambda: rows("huge") == [(1, HUGE, HUGE, HUGE, HUGE)], 240)
        send(1, huge=HUGE, small=5e-324)  # in a batch of its own
        wait_until(lambda: rows("huge") == [(2, None, None, HUGE, HUGE)], 120)
        send(2, huge=-HUGE, other=1.0)
        wait_until(lambda: rows("other") == [(1, 1.0, 1.0, 1.0, 1.0)], 120)
        wait_until(lambda: rows("huge") == [(3, None, None, -HUGE, HUGE)], 120)
        assert rows("small") == [(2, 1e-323, 5e-324, 5e-324, 5e-324)]
        ((count, _, _, least, greatest),) = rows("odd")
        assert (count, abs(least) <= HUGE * 1.1, abs(greatest) <= HUGE * 1.1) == (3 * 2**40, True, True)

        metrics = running.ask("/metrics")[1].splitlines()
        found = {name: float(value) for name, _, value in (line.partition(" ") for line in metrics) if name[0] != "#"}
        assert found["penstock_tables_overflowed_rows_total"] > 0
        assert found["penstock_spark_restarts_total"] == 0
        assert found['penstock_tables_maintenance_failures_total{step="fold"}'] == 0
        lines = [line for line in running.log() if "too large for a double" in json.dumps(line)]
        assert len(lines) in (1, 2, 3)  # one a minute
        assert "huge" in json.dumps(lines) or "odd" in json.dumps(lines)
