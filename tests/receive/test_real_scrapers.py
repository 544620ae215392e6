"""Real scrapers against their own stores: what we count is what they say, series by series.

Prometheus, which scrapes itself and node-exporter, and keeps what it writes to us
vmagent, which scrapes Prometheus, node-exporter and VictoriaMetrics, and writes to that and to us
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from penstock.errors import MissingRequirement
from penstock.model.chunk_partials import partials_of_chunks
from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import merged
from penstock.model.point import Chunk, PointKind, entity_of
from penstock.receive.http_receiver import HttpReceiver
from penstock.testing import wait_until
from tests.conftest import missing
from tests.receive.support import KeepingSink
from tests.scrapers import NodeExporter, ScrapingPrometheus, VictoriaMetrics, VmAgent
from tests.servers import Prometheus

pytestmark = pytest.mark.server
SCRAPES = 8
HISTOGRAM = "prometheus_http_request_duration_seconds"  # of a Prometheus
Key = tuple[str, str]  # metric and entity
Samples = dict[Key, dict[int, float]]  # by milliseconds


class Counted(NamedTuple):
    """What reached the sink."""

    gauges: Samples
    increments: Samples
    distributions: dict[Key, dict[int, list[tuple[int, float]]]]  # count and sum of each bucket


def started(kind: Any, *arguments: Any) -> Iterator[Any]:
    try:
        server = kind(*arguments)
    except MissingRequirement as error:
        missing(error)
    with server:
        yield server


@pytest.fixture
def node_exporter(tmp_path: Path) -> Iterator[NodeExporter]:
    yield from started(NodeExporter, tmp_path / "node")


@pytest.fixture
def victoria(tmp_path: Path) -> Iterator[VictoriaMetrics]:
    yield from started(VictoriaMetrics, tmp_path / "victoria")


@pytest.fixture
def scraping(http: HttpReceiver, node_exporter: NodeExporter, tmp_path: Path) -> Iterator[ScrapingPrometheus]:
    yield from started(ScrapingPrometheus, tmp_path / "scraping", http.port, node_exporter.port)


def test_every_series_of_a_real_prometheus_is_what_it_says_itself(
    scraping: ScrapingPrometheus, sink: KeepingSink, node_exporter: NodeExporter
) -> None:
    wait_for_scrapes(sink, scraping.port, node_exporter.port)
    chunks = list(sink.chunks)
    counted = counted_by(chunks)
    window = scraping.query('{__name__!=""}[1h]', at=datetime.now(UTC).timestamp())
    stored = {
        key_of(one["metric"]): {round(float(time) * 1000): float(value) for time, value in one["values"]}
        for one in window
    }

    assert compare(counted, stored) > 500
    assert scraping.failed_samples() == 0
    metrics = [{metric for metric, _ in samples} for samples in counted]
    assert "go_goroutines" in metrics[0]
    assert {"prometheus_http_requests_total", f"{HISTOGRAM}_count", f"{HISTOGRAM}_sum"} <= metrics[1]
    assert HISTOGRAM in metrics[2]
    assert not any("_bucket" in metric for found in metrics for metric in found)
    summaries = [samples for (metric, _), samples in counted.gauges.items() if metric == "go_gc_duration_seconds"]
    assert any(value > 0 for samples in summaries for value in samples.values())
    compare_quantiles(scraping, counted, chunks)


def test_every_series_of_vmagent_is_what_victoria_metrics_says(
    http: HttpReceiver,
    sink: KeepingSink,
    node_exporter: NodeExporter,
    prometheus: Prometheus,
    victoria: VictoriaMetrics,
    tmp_path: Path,
) -> None:
    targets, stores = [node_exporter.port, prometheus.port, victoria.port], [http.port, victoria.port]
    for agent in started(VmAgent, tmp_path / "vmagent", targets, stores):
        wait_for_scrapes(sink, *targets)
        counted = counted_by(list(sink.chunks))
        wait_for_store(victoria, counted)
        assert agent.refused_packets() == 0

    assert compare(counted, {key_of(labels): samples for labels, samples in victoria.export()}) > 500
    assert any(metric == HISTOGRAM for metric, _ in counted.distributions)


def wait_for_scrapes(sink: KeepingSink, *targets: int) -> None:
    """Until each target was scraped so often, and the histograms of the last scrape are here."""

    def ups(target: int) -> int:
        return sum(row["labels"]["instance"].endswith(f":{target}") for row in sink.points("up"))

    wait_until(lambda: all(ups(target) >= SCRAPES for target in targets), 60)
    wait_until(lambda: sum(chunk.metric == HISTOGRAM for chunk in sink.chunks) >= SCRAPES, 60)


def wait_for_store(victoria: VictoriaMetrics, counted: Counted) -> None:
    """Until the store has everything that we have counted: it has later scrapes."""
    newest = max(time for key, times in counted.gauges.items() if key[0] == "up" for time in times)
    wait_until(lambda: victoria.newest("up") > newest + 1000, 60)


def counted_by(chunks: list[Chunk]) -> Counted:
    found = Counted(defaultdict(dict), defaultdict(dict), defaultdict(lambda: defaultdict(list)))
    for chunk in chunks:
        for row in chunk.finite().points.to_pylist():
            key, time = (chunk.metric, row["entity"]), round(row["time"].timestamp() * 1000)
            if chunk.kind is PointKind.GAUGE:
                found.gauges[key][time] = row["value"]
            elif chunk.kind is PointKind.COUNTER:
                found.increments[key][time] = row["value"]
            else:
                found.distributions[key][time].append((row["count"], row["sum"]))
    return found


def key_of(labels: dict[str, str]) -> Key:
    return labels["__name__"], entity_of({name: text for name, text in labels.items() if name != "__name__"})


def compare(counted: Counted, stored: Samples) -> int:
    """Compares each series with the same of the store; returns how many there are."""
    for key, samples in counted.gauges.items():
        there = {time: stored[key][time] for time in samples}
        assert samples == pytest.approx(there, rel=1e-12), key  # VictoriaMetrics rounds to 18 digits
    for key, increments in counted.increments.items():
        base = max(time for time in stored[key] if time < min(increments))
        assert math.fsum(increments.values()) == pytest.approx(increase(stored[key], base, max(increments))), key
    for (metric, entity), points in counted.distributions.items():
        counts, sums = (stored[metric + suffix, entity] for suffix in ("_count", "_sum"))
        base = base_of(counts, points)
        assert math.fsum(row[1] for rows in points.values() for row in rows) == pytest.approx(
            increase(sums, base, max(points))
        ), metric
    kept = {*counted.gauges, *counted.increments, *counted.distributions}
    newest = max(time for samples in counted.gauges.values() for time in samples)  # the store has later scrapes
    missed = {
        metric
        for (metric, entity), samples in stored.items()
        if (metric, entity) not in kept
        and not metric.endswith("_bucket")
        and sum(math.isfinite(value) for time, value in samples.items() if time <= newest) > SCRAPES // 2
    }
    assert not missed
    return len(kept)


def increase(values: dict[int, float], base: int, end: int) -> float:
    """What a counter has gained between two samples, resets included."""
    within = [value for time, value in sorted(values.items()) if base <= time <= end and math.isfinite(value)]
    return math.fsum(after - before if after >= before else after for before, after in pairwise(within))


def base_of(counts: dict[int, float], points: dict[int, list[tuple[int, float]]]) -> int:
    """The sample that a histogram was measured from: since then it has counted what we have."""
    total = sum(row[0] for rows in points.values() for row in rows)
    return max(time for time in counts if time < min(points) and increase(counts, time, max(points)) == total)


def compare_quantiles(server: Prometheus, counted: Counted, chunks: list[Chunk]) -> None:
    """Our percentiles are in the buckets that `histogram_quantile` finds."""
    table = merged(partials_of_chunks([chunk for chunk in chunks if chunk.metric == HISTOGRAM]))
    at = pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * table.num_rows, table["bucket"].type)
    table = table.set_column(table.column_names.index("bucket"), "bucket", at)  # all as one bucket of time
    rows = with_finals(table, Level.DAY, (50, 90, 99)).to_pylist()
    assert rows
    for row in rows:
        points = counted.distributions[HISTOGRAM, row["entity"]]
        counts = next(
            {round(float(time) * 1000): float(value) for time, value in one["values"]}
            for one in server.query(f"{HISTOGRAM}_count[1h]", at=datetime.now(UTC).timestamp())
            if key_of(one["metric"])[1] == row["entity"]
        )
        end = max(points)
        base = base_of(counts, points)
        grown = f"({HISTOGRAM}_bucket - {HISTOGRAM}_bucket offset {end - base}ms)"
        bounds = sorted({float(one["metric"]["le"]) for one in server.query(f"{HISTOGRAM}_bucket", at=end / 1000)})
        for rank in (50, 90, 99):
            (theirs,) = (
                float(one["value"][1])
                for one in server.query(f"histogram_quantile({rank / 100}, {grown})", at=end / 1000)
                if entity_of(one["metric"]) == row["entity"]
            )
            place = next(number for number, bound in enumerate(bounds) if theirs <= bound)
            assert (0.0, *bounds)[place] <= row[f"p{rank}"] <= bounds[place], (row, rank, theirs)
