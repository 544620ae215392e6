"""A program with the OpenTelemetry SDK: orders and their durations, sent to `penstock run`.

OTEL_EXPORTER_OTLP_ENDPOINT says where to; without it, http://localhost:4318.
"""

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

# The SDK's own buckets are for milliseconds (0, 5, 10, …): all of these seconds would lie in one. These fit anything.
exponential = View(instrument_name="order.duration", aggregation=ExponentialBucketHistogramAggregation())
provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], views=[exponential])
meter = provider.get_meter("shop")
orders = meter.create_counter("orders")
duration = meter.create_histogram("order.duration", unit="s")
for number in range(1000):
    shop = "north" if number % 4 else "south"
    orders.add(1, {"shop": shop})
    duration.record(number / 1000, {"shop": shop})
provider.shutdown()  # sends what is left
print("sent 1000 orders: penstock query orders --by shop")
