"""The OpenTelemetry SDK and its own exporters against us: the tables' rows equal what was recorded."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource

from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.batch import ThreadPolicy
from penstock.model.definition import Definitions
from penstock.model.definition_file import parse_definitions
from penstock.model.finals import nearest_rank, with_finals
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.model.resolution import percentile_ranges_of_partials
from penstock.model.segment import decode_partials_block
from penstock.receive.config import GrpcReceiverConfig, HttpReceiverConfig
from penstock.receive.grpc_receiver import GrpcReceiver
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from penstock.spool import Durability, FastQueue, FastQueueConfig

DELTA = {Counter: AggregationTemporality.DELTA, Histogram: AggregationTemporality.DELTA}


class Edge:
    """Receivers, intake, L1 and a durable queue, as the service puts them together."""

    def __init__(self, folder: Path, definitions: Definitions | None = None) -> None:
        self.queue = FastQueue(folder, FastQueueConfig(durability=Durability.DISK))
        self.l1 = L1.with_own_queue(
            "sdk",
            self.queue.push_many,
            L1Config(durability=Durability.DISK),
            threads=ThreadPolicy.fixed(1),
            definitions=definitions,
        )
        self.intake = Intake(self.l1).start()
        self.http = HttpReceiver(HttpReceiverConfig(port=0), self.intake).start()
        self.grpc = GrpcReceiver(GrpcReceiverConfig(port=0), self.intake).start()

    def close(self) -> None:
        for receiver in (self.http, self.grpc):
            receiver.close(5.0)
        assert self.intake.close(5.0)
        self.l1.close(5.0)
        self.queue.close()

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The same by metric and label `kind`."""
        return {(row["metric"], json.loads(row["entity"]).get("kind", "")): row for row in self.finals()}

    def finals(self) -> list[dict[str, Any]]:
        """All that came into the durable queue since the last call, with final values of one day."""
        rows: list[dict[str, Any]] = with_finals(self.partials_of_a_day(), Level.DAY).to_pylist()
        return rows

    def partials_of_a_day(self) -> pa.Table:
        leases = self.queue.lease(10_000)
        partials = pa.concat_tables([decode_partials_block(lease.data) for lease in leases])
        days = pa.array([0] * partials.num_rows, pa.int64()).cast(PARTIALS.field("bucket").type)
        return partials.set_column(PARTIALS.get_field_index("bucket"), "bucket", days)


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[Edge]:
    edge = Edge(tmp_path / "queue")
    yield edge
    edge.close()


def exporters(edge: Edge, protocol: str, temporality: Any) -> MetricExporter:
    if protocol == "grpc":
        endpoint = f"http://127.0.0.1:{edge.grpc.port}"
        return GrpcExporter(endpoint=endpoint, insecure=True, preferred_temporality=temporality)
    return HttpExporter(endpoint=f"http://127.0.0.1:{edge.http.port}/v1/metrics", preferred_temporality=temporality)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("temporality", [None, DELTA], ids=["cumulative", "delta"])
def test_every_instrument_of_the_sdk_arrives_as_it_was_recorded(edge: Edge, protocol: str, temporality: Any) -> None:
    reader = PeriodicExportingMetricReader(exporters(edge, protocol, temporality), export_interval_millis=3_600_000)
    views = [View(instrument_name="exponential", aggregation=ExponentialBucketHistogramAggregation())]
    provider = MeterProvider([reader], resource=Resource.create({"service.name": "shop"}), views=views)
    meter = provider.get_meter("tests")
    rng = random.Random(3)
    observed = {"counter": 0.0, "level": 0.0}

    def total(_: CallbackOptions) -> list[Observation]:
        return [Observation(observed["counter"], {"kind": "a"})]

    def level(_: CallbackOptions) -> list[Observation]:
        return [Observation(observed["level"], {"kind": "a"})]

    counter = meter.create_counter("counter")
    up_down = meter.create_up_down_counter("up_down")
    explicit = meter.create_histogram("explicit")
    exponential = meter.create_histogram("exponential")
    gauge = meter.create_gauge("gauge")
    meter.create_observable_counter("observable_counter", [total])
    meter.create_observable_gauge("observable_gauge", [level])
    meter.create_observable_up_down_counter("observable_up_down", [level])
    counted, latencies, levels, ups = 0.0, [], [], 0

    for _ in range(3):
        for _ in range(200):
            amount, latency = rng.randrange(10), rng.lognormvariate(3, 1)
            counter.add(amount, {"kind": "a"})
            counter.add(1, {"kind": "b"})
            counted += amount
            latencies.append(latency)
            explicit.record(latency, {"kind": "a"})
            exponential.record(latency, {"kind": "a"})
        ups += 3
        up_down.add(3, {"kind": "a"})
        observed["counter"] += 7.5
        observed["level"] = rng.random()
        levels.append(observed["level"])
        gauge.set(observed["level"], {"kind": "a"})
        assert provider.force_flush()
    provider.shutdown()  # exports once more
    levels.append(levels[-1])

    rows = edge.rows()
    assert rows["counter", "a"]["value"] == pytest.approx(counted)
    assert rows["counter", "b"]["value"] == pytest.approx(600)
    assert rows["observable_counter", "a"]["value"] == pytest.approx(22.5)
    assert rows["gauge", "a"]["max"] == pytest.approx(max(levels))
    assert rows["observable_gauge", "a"]["avg"] == pytest.approx(sum(levels) / len(levels))
    assert rows["observable_up_down", "a"]["min"] == pytest.approx(min(levels))
    assert rows["up_down", "a"]["max"] == pytest.approx(ups)
    for name in ("explicit", "exponential"):
        row = rows[name, "a"]
        assert (row["min"], row["max"]) == (min(latencies), max(latencies))
        assert row["count"] == len(latencies)
        assert row["sum"] == pytest.approx(sum(latencies))
    for rank in (50, 90, 99):
        exact = nearest_rank(latencies, rank)
        assert rows["exponential", "a"][f"p{rank}"] == pytest.approx(exact, rel=0.05)
        low, high = bucket_of(exact)
        assert low <= rows["explicit", "a"][f"p{rank}"] <= high


@pytest.mark.parametrize("aggregation", ["explicit", "exponential"])
def test_the_maximum_of_an_sdk_histogram_is_exact_in_each_minute_in_which_it_rises(
    edge: Edge, aggregation: str
) -> None:
    reader = PeriodicExportingMetricReader(exporters(edge, "http", None), export_interval_millis=3_600_000)
    views = [View(instrument_name="exponential", aggregation=ExponentialBucketHistogramAggregation())]
    provider = MeterProvider([reader], views=views)
    histogram = provider.get_meter("tests").create_histogram(aggregation)
    tops = []
    for values in ([120.0, 301.0], [403.0, 260.0], [280.0]):
        for value in values:
            histogram.record(value)
        assert provider.force_flush()
        tops.append(edge.rows()[aggregation, ""]["max"])
    provider.shutdown()

    assert tops[:2] == [301.0, 403.0]
    assert 280.0 <= tops[2] <= 403.0  # no more than the greatest since the beginning


@pytest.mark.parametrize("temporality", [None, DELTA], ids=["cumulative", "delta"])
def test_seconds_in_the_default_buckets_of_the_sdk_are_known_to_be_unresolved(edge: Edge, temporality: Any) -> None:
    reader = PeriodicExportingMetricReader(exporters(edge, "http", temporality), export_interval_millis=3_600_000)
    views = [View(instrument_name="exponential", aggregation=ExponentialBucketHistogramAggregation())]
    provider = MeterProvider([reader], views=views)
    rng, seconds = random.Random(5), []
    explicit, exponential = (provider.get_meter("tests").create_histogram(name) for name in ("explicit", "exponential"))
    for _ in range(200):
        seconds.append(rng.expovariate(1 / 0.194))
        explicit.record(seconds[-1])
        exponential.record(seconds[-1])
    assert provider.force_flush()
    partials = edge.partials_of_a_day()
    provider.shutdown()

    true = nearest_rank(seconds, 95)
    ((of_explicit,), (of_exponential,)) = percentile_ranges_of_partials(partials, (95,))
    assert of_exponential is None or of_exponential[1] < 1.25 * of_exponential[0]
    assert of_explicit is not None
    assert of_explicit[0] <= true <= of_explicit[1]
    assert of_explicit == pytest.approx((min(seconds), max(seconds)))


def test_percentiles_and_the_last_value_are_kept_without_a_definition_where_that_is_asked_for(tmp_path: Path) -> None:
    asked = parse_definitions({"undefined": {"gauge": ["percentile", "latest"], "counter": "drop"}})
    edge = Edge(tmp_path / "queue", asked)
    reader = PeriodicExportingMetricReader(exporters(edge, "http", None), export_interval_millis=3_600_000)
    provider = MeterProvider([reader])
    meter = provider.get_meter("tests")
    gauge, counter = meter.create_gauge("gauge"), meter.create_counter("counter")
    for level in (1.0, 9.0, 4.0, 2.0):
        gauge.set(level)
        counter.add(1)
        assert provider.force_flush()
    rows = {(row["metric"], row["function"]): row for row in edge.finals()}
    provider.shutdown()
    edge.close()

    assert rows["gauge", "percentile(6)"]["p50"] == pytest.approx(2.0, rel=0.01)
    assert rows["gauge", "percentile(6)"]["count"] == 4
    assert rows["gauge", "latest"]["value"] == 2.0
    assert rows.keys() == {("gauge", "percentile(6)"), ("gauge", "latest")}


def bucket_of(value: float) -> tuple[float, float]:
    """The bucket of the SDK's default bounds that holds `value`."""
    bounds = [0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10000.0]
    return max(bound for bound in bounds if bound < value), min(bound for bound in bounds if bound >= value)
