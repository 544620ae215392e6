"""Two services with the OpenTelemetry SDK, as its conventions say: what they record is known."""

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
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
    for name, (good, slow) in SERVICES.items():
        exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{port}/v1/metrics")
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
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
