"""Metrics aggregation: many metric types share one queue, each type has a worker that merges what it gets.

Producers call `produce` from anywhere. A worker merges its batches in plain attributes, with no lock of its own, since
its handler never runs on two threads at once, and sends its sums on when it is idle or when it is time.

    python examples/metrics_aggregation.py
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass

import penstock
from penstock import BatchQueueConfig, BufferStrategy, DrainBalancer, HandlerConsumer, PartitionPolicy, ThreadPolicy


@dataclass(slots=True)
class Metric:
    entity: str
    value: int


class ServiceCalls(Metric):
    pass


class EndpointCalls(Metric):
    pass


class MeterReading(Metric):
    pass


class Aggregator(HandlerConsumer[Metric]):
    """Merges the metrics of one type by entity and passes the sums on every half second, or when nothing comes."""

    flush_period = 0.5

    def __init__(self, metric: type[Metric], weight: float = 1.0) -> None:
        self.stored: Counter[str] = Counter()
        self.rows = 0
        self._merged: Counter[str] = Counter()
        self._flushed_at = time.monotonic()
        # The first worker makes the queue, the others get the same one.
        queue = penstock.queues.get_or_create(
            "METRICS_L1_AGGREGATION",
            BatchQueueConfig(
                threads=ThreadPolicy.cpu_cores(1.0),
                partitions=PartitionPolicy.adaptive(),
                buffer_size=20_000,
                strategy=BufferStrategy.IF_POSSIBLE,
                balancer=DrainBalancer.throughput_weighted(),
                balance_interval=10.0,
            ),
        )
        queue.add_handler(metric, self, weight)

    def consume(self, batch: list[Metric]) -> None:
        for metric in batch:
            self._merged[metric.entity] += metric.value
        if time.monotonic() - self._flushed_at > self.flush_period:
            self.on_idle()

    def on_idle(self) -> None:
        self.stored += self._merged
        self.rows += len(self._merged)
        self._merged.clear()
        self._flushed_at = time.monotonic()


def main() -> None:
    # Meter readings come in small bursts: twenty such types may share a partition, so each counts as a twentieth.
    aggregators = {
        ServiceCalls: Aggregator(ServiceCalls),
        EndpointCalls: Aggregator(EndpointCalls),
        MeterReading: Aggregator(MeterReading, weight=0.05),
    }
    queue = penstock.queues.get("METRICS_L1_AGGREGATION")
    assert queue is not None

    def service(name: str) -> None:
        for index in range(5_000):
            queue.produce(ServiceCalls(name, 1))
            queue.produce(EndpointCalls(f"{name}/{index % 10}", 1))
        queue.produce_many([MeterReading(name, 2) for _ in range(500)])

    producers = [threading.Thread(target=service, args=(name,)) for name in ("checkout", "search", "payment")]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join()
    penstock.queues.shutdown_all()

    dropped = sum(counts.dropped for counts in queue.stats().types.values())
    for metric, aggregator in aggregators.items():
        total, entities = aggregator.stored.total(), len(aggregator.stored)
        print(f"{metric.__name__}: {total} in {entities} entities, {aggregator.rows} merged rows")
    print(f"dropped: {dropped}")


if __name__ == "__main__":
    main()
