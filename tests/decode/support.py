"""What the tests of decoding share: decoders at a fixed time, cumulative metrics, and what is counted of them."""

import random
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import Format
from penstock.testing import FakeClock
from tests.receive.support import NOW, SECOND, counter, request

DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def decoder(**config: Any) -> Decoder:
    return Decoder(IntakeConfig(**config), FakeClock(NOW / SECOND))


def decode(*requests: ExportMetricsServiceRequest, using: Decoder | None = None) -> Decoded:
    return (using or decoder()).decode(Format.OTLP, [one.SerializeToString() for one in requests])


def increments(using: Decoder, *metrics: Metric) -> list[float]:
    decoded = decode(request(*metrics), using=using)
    return [value for chunk in decoded.chunks for value in chunk.points["value"].to_pylist()]


def sum_of(decoded: Decoded) -> float:
    """Returns all values, or the counts of distributions, added up."""
    rows = [row for chunk in decoded.chunks for row in chunk.points.to_pylist()]
    return float(sum(row.get("count", row["value"]) for row in rows))


def sample(using: Decoder, name: str) -> float:
    return next(sample.value for sample in using.samples() if sample.name == name)


def histogram(
    time: int,
    counts: list[int],
    total: float = 1.0,
    *,
    start: int = NOW,
    bounds: tuple[float, ...] = (10.0, 20.0),
    temporality: Any = CUMULATIVE,
) -> Metric:
    metric = Metric(name="h")
    metric.histogram.aggregation_temporality = temporality
    point = metric.histogram.data_points.add(time_unix_nano=time, start_time_unix_nano=start, sum=total)
    point.count = min(sum(counts), 2**64 - 1)
    point.bucket_counts.extend(counts)
    point.explicit_bounds.extend(bounds)
    return metric


def exponential(
    time: int,
    counts: list[int],
    total: float = 1.0,
    *,
    scale: int = 0,
    offset: int = 0,
    start: int = NOW,
    temporality: Any = CUMULATIVE,
) -> Metric:
    metric = Metric(name="e")
    metric.exponential_histogram.aggregation_temporality = temporality
    point = metric.exponential_histogram.data_points.add(
        time_unix_nano=time, start_time_unix_nano=start, sum=total, scale=scale, count=min(sum(counts), 2**64 - 1)
    )
    point.positive.offset = offset
    point.positive.bucket_counts.extend(counts)
    return metric


def cumulative(kind: str, time: int, value: int, start: int = NOW) -> Metric:
    """Returns a point of that kind that has counted so many."""
    match kind:
        case "counter":
            return counter("c", (time, value), start=start)
        case "histogram":
            return histogram(time, [0, value, 0], 15.0 * value, start=start)
        case _:
            return exponential(time, [value], 1.5 * value, start=start)


class RandomStream:
    """A cumulative stream of one kind that grows at random, and is reset now and then."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self._kind = kind
        self._rng = rng
        self._time = NOW
        self._value = 0
        self.counted = 0  # what all increments must add up to

    def report(self) -> bytes:
        """Returns a request with the present value."""
        self._time += SECOND
        return bytes(request(cumulative(self._kind, self._time, self._value)).SerializeToString())

    def reports(self) -> list[bytes]:
        """Returns up to three requests, with a value that has changed before each."""
        bodies = []
        for _ in range(self._rng.randrange(1, 4)):
            grown = self._rng.randrange(5)
            if self._value and self._rng.random() < 0.1:
                self._value, grown = self._rng.randrange(self._value), 0
                self.counted += self._value
            self._value += grown
            self.counted += grown
            bodies.append(self.report())
        return bodies
