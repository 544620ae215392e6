"""What a registry says about itself."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from penstock.consume.broker_connection import ConsumerConnection
from penstock.consume.subscription import Subscription
from penstock.telemetry import Buckets, Sample


@dataclass(frozen=True, slots=True)
class RouteStats:
    """What became of the messages of one event type."""

    delivered: int
    redelivered: int
    acked: int
    nacked: int
    retried: int
    dead_lettered: int
    stale: int


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One consumer at one moment."""

    queue: str
    workers: int
    prefetch: int
    consuming: bool
    in_flight: int
    busy: int
    ack_frames: int
    restores: int
    event_types: Mapping[str, RouteStats]

    @property
    def utilisation(self) -> float:
        return self.busy / self.workers

    def total(self, field: str) -> int:
        """One count over all event types: `total("acked")`."""
        return sum(getattr(route, field) for route in self.event_types.values())


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """A registry at one moment."""

    connected: bool
    reconnects: int
    consumers: Mapping[str, ConsumerStats]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether every consumer consumes, and why not."""

    healthy: bool
    reason: str = ""


def consumer_stats_of(connection: ConsumerConnection) -> RegistryStats:
    consumers = {one.name: _consumer_stats(one) for one in connection.subscriptions}
    return RegistryStats(connection.connected, connection.reconnects, consumers)


def _consumer_stats(one: Subscription) -> ConsumerStats:
    types = {route.label: RouteStats(**asdict(route.counts)) for route in one.table.routes}
    return ConsumerStats(
        queue=one.consumer.queue.name,
        workers=one.size.workers,
        prefetch=one.size.prefetch,
        consuming=one.consuming,
        in_flight=one.in_flight,
        busy=min(one.handed, one.size.workers),
        ack_frames=one.acks.frames,
        restores=one.restores,
        event_types=types,
    )


def consumer_health_of(connection: ConsumerConnection) -> Health:
    if not connection.connected:
        return Health(False, connection.failure or "not started")
    missing = [one.name for one in connection.subscriptions if not one.consuming]
    reasons = [f"not consuming: {', '.join(missing)}"] if missing else []
    reasons += [f"{name}: {reason}" for name, reason in connection.topology.refused.items()]
    return Health(not reasons, "; ".join(reasons))


_BY_TYPE = {
    "penstock_amqp_deliveries_total": "delivered",
    "penstock_amqp_redeliveries_total": "redelivered",
    "penstock_amqp_acks_total": "acked",
    "penstock_amqp_nacks_total": "nacked",
    "penstock_amqp_retries_total": "retried",
    "penstock_amqp_dead_letters_total": "dead_lettered",
    "penstock_amqp_stale_total": "stale",
}


def consumer_samples_of(connection: ConsumerConnection) -> Iterator[Sample | Buckets]:
    """What `/metrics` shows."""
    yield Sample("penstock_amqp_connected", float(consumer_health_of(connection).healthy))
    yield Sample("penstock_amqp_reconnects_total", connection.reconnects)
    for one in connection.subscriptions:
        stats = _consumer_stats(one)
        queue = (stats.queue,)
        yield Sample("penstock_amqp_workers", stats.workers, queue)
        yield Sample("penstock_amqp_prefetch", stats.prefetch, queue)
        yield Sample("penstock_amqp_in_flight", stats.in_flight, queue)
        yield Sample("penstock_amqp_utilisation", stats.utilisation, queue)
        yield Sample("penstock_amqp_ack_frames_total", stats.ack_frames, queue)
        yield Sample("penstock_amqp_restores_total", stats.restores, queue)
        for route in one.table.routes:
            for name, field in _BY_TYPE.items():
                yield Sample(name, getattr(route.counts, field), (*queue, route.label))
            yield route.handler_seconds
            yield route.settle_seconds
