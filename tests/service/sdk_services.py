"""Two services with the OpenTelemetry SDK, as its conventions say: what they record is known."""

import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

# What the conventions advise for http.server.request.duration, in seconds.
ADVISED = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
REQUESTS = 200  # of each service
ERRORS = 20  # one in ten
# Of each service: seconds of a good request, and of one in ten that fails.
SERVICES = {"checkout": (0.12, 0.9), "catalogue": (0.03, 3.0)}
# Good ones are satisfied; failures of the first are tolerated, those of the second are not.
APDEX = {"checkout": 0.95, "catalogue": 0.9}


def serve_requests(port: int) -> None:
    """Each service answers its requests and exports twice, cumulative as the SDK does by default."""
    for name in SERVICES:
        exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{port}/v1/metrics")
        answer_requests(name, PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000))


def answer_requests(name: str, reader: MetricReader) -> None:
    good, slow = SERVICES[name]
    provider = MeterProvider([reader], resource=Resource.create({"service.name": name}))
    duration = provider.get_meter("http").create_histogram(
        "http.server.request.duration", unit="s", explicit_bucket_boundaries_advisory=ADVISED
    )
    for number in range(REQUESTS):
        labels = {"http.request.method": "GET", "http.route": "/cart", "url.scheme": "http"}
        if number % 10:
            duration.record(good, {**labels, "http.response.status_code": 200})
        else:
            duration.record(slow, {**labels, "http.response.status_code": 500, "error.type": "500"})
        if number == REQUESTS // 2:
            assert provider.force_flush()
    provider.shutdown()


class Recorder(MetricExporter):
    """Writes each request as a line of OTLP JSON, as a collector's file exporter does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0.0, **more: Any) -> MetricExportResult:
        request = encode_metrics(metrics_data)
        with open(self._path, "a") as file:
            file.write(json.dumps(MessageToDict(request, use_integers_for_enums=True)) + "\n")
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0.0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0.0, **more: Any) -> None: ...
