"""Our own metrics: every name, type, label and help text is declared here, and nowhere else.

Hot paths keep plain integers. A component hands over a function that reads them (`Telemetry.watch`), and it is
called at each scrape, so that counting costs nothing between scrapes.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from penstock.errors import UndeclaredMetric

log = logging.getLogger(__name__)
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Declaration:
    """One metric as `/metrics` shows it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # histograms only


@dataclass(frozen=True, slots=True)
class Sample:
    """One value, read at each scrape. `labels` are in the order of the declaration."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Buckets:
    """A histogram for hot paths: plain integers that one thread writes, read at each scrape."""

    __slots__ = ("bounds", "counts", "labels", "name", "sum")

    def __init__(self, name: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.labels = labels
        self.bounds = declared(name, "histogram").buckets
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Suffix, further labels and value, as Prometheus wants them: each bucket holds what is below it, too."""
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            running += count
            yield "_bucket", (("le", "+Inf" if bound == float("inf") else str(bound)),), running
        yield "_count", (), running
        yield "_sum", (), self.sum


LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

DECLARATIONS: dict[str, Declaration] = {
    declaration.name: declaration
    for declaration in (
        # the pipeline at the edge
        Declaration("penstock_l1_points_total", "counter", "Points handed to L1"),
        Declaration(
            "penstock_points_received_total", "counter", "Points handed to L1, by the metrics of most", ("metric",)
        ),
        Declaration("penstock_l1_partials_total", "counter", "Merged rows that left L1"),
        Declaration("penstock_l1_blocks_total", "counter", "Blocks of merged rows that left L1"),
        Declaration("penstock_l1_held_bytes", "gauge", "Bytes of points and merged rows that L1 holds"),
        Declaration("penstock_l1_limit_bytes", "gauge", "Bytes that L1 may hold"),
        Declaration("penstock_l1_turned_away_total", "counter", "Requests that L1 had no room for"),
        Declaration("penstock_l1_failed_chunks_total", "counter", "Chunks that could not be merged", ("metric",)),
        Declaration(
            "penstock_l1_definition_points_total", "counter", "Rows of points that a definition took", ("definition",)
        ),
        Declaration(
            "penstock_l1_definition_label_seen",
            "gauge",
            "Whether a point had this label of the definition's entity, 1 or 0",
            ("definition", "label"),
        ),
        Declaration("penstock_points_not_numbers_total", "counter", "NaN and infinite points left out", ("metric",)),
        # the receivers
        Declaration("penstock_receive_requests_total", "counter", "Requests answered", ("format", "status")),
        Declaration("penstock_receive_bytes_total", "counter", "Bytes of requests, decompressed", ("format",)),
        Declaration(
            "penstock_receive_points_total",
            "counter",
            "Points of requests that were answered with success",
            ("format",),
        ),
        Declaration("penstock_receive_refused_total", "counter", "Requests or points not taken", ("reason",)),
        Declaration("penstock_receive_repeated_total", "counter", "Requests that came again, answered and not counted"),
        Declaration(
            "penstock_receive_repeats_forgotten_total",
            "counter",
            "Requests forgotten before intake.repeat_window had passed",
        ),
        Declaration("penstock_receive_held_bytes", "gauge", "Bytes of requests that wait for their answer"),
        Declaration("penstock_receive_waiting_requests", "gauge", "Requests that wait for their answer"),
        Declaration("penstock_receive_connections", "gauge", "Open connections", ("receiver",)),
        Declaration("penstock_receive_decode_seconds_total", "counter", "Seconds of decompressing and decoding"),
        Declaration(
            "penstock_receive_group_requests",
            "histogram",
            "Requests decoded together",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        ),
        Declaration("penstock_receive_streams", "gauge", "Streams of senders that are known"),
        Declaration("penstock_receive_series", "gauge", "Series that they make up"),
        Declaration("penstock_receive_metrics", "gauge", "Metrics by name and kind"),
        Declaration("penstock_receive_shapes", "gauge", "OTLP metrics that are known by their bytes"),
        Declaration("penstock_receive_overflowed_total", "counter", "Series that were added up in an overflow series"),
        Declaration("penstock_receive_metric_series", "gauge", "Series of the ten metrics with the most", ("metric",)),
        Declaration("penstock_receive_rules_total", "counter", "Series that a rule was applied to", ("rule",)),
        Declaration("penstock_receive_rule_dropped_total", "counter", "Points of series that a rule drops"),
        Declaration("penstock_receive_expired_total", "counter", "Streams forgotten after their silence"),
        Declaration("penstock_receive_resets_total", "counter", "Resets of cumulative streams"),
        Declaration("penstock_receive_out_of_order_total", "counter", "Cumulative points that were not younger"),
        Declaration("penstock_receive_first_seen_total", "counter", "First cumulative points, only measured from"),
        Declaration("penstock_handover_up", "gauge", "Whether that process takes what it keeps", ("to",)),
        Declaration("penstock_handover_requests_total", "counter", "Parts of requests handed over", ("to", "status")),
        Declaration("penstock_handover_points_total", "counter", "Points and series in those taken", ("to",)),
        Declaration("penstock_handover_bytes_total", "counter", "Bytes handed over and answered", ("to",)),
        # the batch queue
        Declaration("penstock_batch_queue_used", "gauge", "Items held", ("queue",)),
        Declaration("penstock_batch_queue_capacity", "gauge", "Items that all partitions may hold", ("queue",)),
        Declaration("penstock_batch_queue_used_percentage", "gauge", "Items held of those allowed, 0-100", ("queue",)),
        Declaration(
            "penstock_batch_queue_fullest_partition_percentage", "gauge", "Its fullest partition, 0-100", ("queue",)
        ),
        Declaration("penstock_batch_queue_used_bytes", "gauge", "Bytes held, where they are limited", ("queue",)),
        Declaration("penstock_batch_queue_partitions", "gauge", "Partitions", ("queue",)),
        Declaration("penstock_batch_queue_rebalances_total", "counter", "Times partitions changed threads", ("queue",)),
        Declaration(
            "penstock_batch_queue_batches_total", "counter", "Batches of up to so many items", ("queue", "size")
        ),
        Declaration(
            "penstock_batch_queue_thread_items_total", "counter", "Items a thread drained", ("queue", "thread")
        ),
        Declaration(
            "penstock_batch_queue_thread_busy_seconds_total", "counter", "Seconds in handlers", ("queue", "thread")
        ),
        Declaration("penstock_batch_queue_produced_total", "counter", "Items accepted", ("queue", "type")),
        Declaration("penstock_batch_queue_consumed_total", "counter", "Items handled", ("queue", "type")),
        Declaration("penstock_batch_queue_dropped_total", "counter", "Items turned away", ("queue", "type")),
        Declaration("penstock_batch_queue_errors_total", "counter", "Items in failed batches", ("queue", "type")),
        Declaration(
            "penstock_batch_queue_unregistered_total", "counter", "Items drained without a handler", ("queue", "type")
        ),
        # the durable queue: its state, what happened to it, its disk
        Declaration("penstock_queue_size", "gauge", "Blocks in the queue that are not acked"),
        Declaration("penstock_queue_bytes", "gauge", "Bytes of those blocks"),
        Declaration("penstock_queue_max_size", "gauge", "Configured limit of blocks"),
        Declaration("penstock_queue_max_bytes", "gauge", "Configured limit of bytes"),
        Declaration("penstock_queue_utilization_ratio", "gauge", "How full the queue is by its nearer limit, 0 to 1"),
        Declaration("penstock_queue_disk_available_bytes", "gauge", "Free bytes where the queue lies"),
        Declaration("penstock_queue_leased", "gauge", "Blocks handed out and not acked"),
        Declaration("penstock_queue_oldest_age_seconds", "gauge", "Age of the block that is next to go out"),
        Declaration("penstock_queue_push_total", "counter", "Blocks taken in"),
        Declaration("penstock_queue_ack_total", "counter", "Blocks done with"),
        Declaration("penstock_queue_redelivered_total", "counter", "Blocks handed out more than once"),
        Declaration("penstock_queue_dead_letter_total", "counter", "Blocks moved to the dead-letter queue"),
        Declaration("penstock_queue_dead_letter_dropped_total", "counter", "Dead letters lost: their queue was full"),
        Declaration("penstock_queue_dropped_total", "counter", "Blocks dropped or refused", ("reason",)),
        Declaration("penstock_queue_disk_full_total", "counter", "Writes refused by a full disk"),
        Declaration("penstock_fastqueue_inmemory_blocks", "gauge", "Blocks in the memory layer"),
        Declaration("penstock_fastqueue_disk_bytes", "gauge", "Bytes of the chunk files"),
        Declaration("penstock_fastqueue_meta_sync_total", "counter", "Meta files written"),
        Declaration("penstock_fastqueue_chunk_rotations", "counter", "Chunk files begun after the first"),
        Declaration("penstock_fastqueue_chunk_rotations_total", "counter", "The same, named by convention"),
        Declaration("penstock_fastqueue_inmemory_flushes", "counter", "Spills of the memory layer to the disk"),
        Declaration("penstock_fastqueue_inmemory_flushes_total", "counter", "The same, named by convention"),
        Declaration("penstock_fastqueue_damaged_regions_total", "counter", "Damaged places set aside in quarantine"),
        Declaration("penstock_fastqueue_damaged_bytes_total", "counter", "Bytes set aside in quarantine"),
        Declaration("penstock_fastqueue_lost_blocks_total", "counter", "Blocks lost to damage"),
        # the export side: sends, retries, workers, the breaker, the failover
        Declaration("penstock_export_batches_total", "counter", "Batches that the destination took"),
        Declaration("penstock_export_bytes_total", "counter", "Bytes of them, before compression"),
        Declaration("penstock_export_errors_total", "counter", "Sends that failed", ("error_type",)),
        Declaration("penstock_export_splits_total", "counter", "Batches cut in two because they were too large"),
        Declaration(
            "penstock_export_partial_rejected_total", "counter", "Items refused out of batches that were taken"
        ),
        Declaration("penstock_export_data_loss_total", "counter", "Batches that neither queue nor failover could keep"),
        Declaration("penstock_queue_retry_total", "counter", "Sends of batches that were sent before"),
        Declaration("penstock_queue_retry_success_total", "counter", "Of these, taken"),
        Declaration("penstock_queue_retry_failure_total", "counter", "Of these, failed again", ("error_type",)),
        Declaration("penstock_queue_workers_active", "gauge", "Workers that are at a batch"),
        Declaration("penstock_queue_workers", "gauge", "Workers that there are to be"),
        Declaration("penstock_queue_workers_total", "gauge", "The same; a gauge, though its name sounds otherwise"),
        Declaration("penstock_queue_preparers_active", "gauge", "Preparers that are at a batch"),
        Declaration("penstock_queue_senders_active", "gauge", "Senders that have a send under way"),
        Declaration("penstock_queue_sends_inflight", "gauge", "Sends under way"),
        Declaration("penstock_queue_export_latency_ewma_seconds", "gauge", "Moving average of a send's duration"),
        Declaration("penstock_circuit_breaker_state", "gauge", "1 for the state that the breaker is in", ("state",)),
        Declaration("penstock_circuit_breaker_open_total", "counter", "Times that the breaker opened"),
        Declaration("penstock_circuit_breaker_rejected_total", "counter", "Sends that the breaker did not let out"),
        Declaration("penstock_queue_backoff_seconds", "gauge", "Seconds until the destination is asked again"),
        Declaration("penstock_failover_size", "gauge", "Batches in the failover's memory"),
        Declaration("penstock_failover_bytes", "gauge", "Bytes of them"),
        Declaration("penstock_failover_evicted_total", "counter", "Batches evicted from it to make room"),
        # segments for Spark
        Declaration("penstock_segments_sealed_total", "counter", "Segments sealed for Spark"),
        Declaration("penstock_segment_rows_total", "counter", "Rows in sealed segments"),
        # the Spark job
        Declaration("penstock_spark_batches_total", "counter", "Batches done"),
        Declaration("penstock_spark_rows_total", "counter", "Rows that Spark took in, merged by its tasks"),
        Declaration("penstock_spark_rows_written_total", "counter", "Rows that tasks wrote for the tables"),
        Declaration("penstock_spark_files_written_total", "counter", "Files that tasks wrote for the tables"),
        Declaration("penstock_spark_rows_per_second", "gauge", "Rows a second in the last batch"),
        Declaration("penstock_spark_batch_seconds", "gauge", "Duration of the last batch"),
        Declaration(
            "penstock_spark_phase_seconds", "gauge", "Duration of each phase of the last batch, by phase", ("phase",)
        ),
        Declaration("penstock_spark_restarts_total", "counter", "Times a failed query was started again"),
        Declaration("penstock_spark_lag_segments", "gauge", "Sealed segments that are not in the tables yet"),
        Declaration(
            "penstock_spark_lag_seconds", "gauge", "Seconds that the oldest sealed segment not in the tables has waited"
        ),
        Declaration("penstock_spark_overtaken_total", "counter", "Times another job added to the tables first"),
        Declaration("penstock_spark_quarantined_segments", "gauge", "Damaged segments set aside"),
        # the tables
        Declaration("penstock_tables_commit_conflicts_total", "counter", "Appends tried again after another commit"),
        Declaration("penstock_tables_torn_files", "gauge", "Files of tables that power cuts tore, set aside in _torn"),
        Declaration("penstock_tables_folded_rows_total", "counter", "Rows that compaction folded into others"),
        Declaration("penstock_tables_expired_rows_total", "counter", "Rows deleted because of their age"),
        Declaration("penstock_tables_removed_files_total", "counter", "Dead files that vacuum removed"),
        Declaration("penstock_tables_maintenance_seconds", "gauge", "Duration of the last maintenance"),
        Declaration(
            "penstock_tables_maintenance_failures_total", "counter", "Steps of maintenance that failed", ("step",)
        ),
        # the service
        Declaration("penstock_service_info", "gauge", "Always 1; the version that runs", ("version",)),
        Declaration("penstock_service_start_time_seconds", "gauge", "When the service was started"),
        Declaration("penstock_service_child_up", "gauge", "1 while a process of ours runs", ("child",)),
        Declaration("penstock_service_child_restarts_total", "counter", "Times it was started again", ("child",)),
        # AMQP consumers
        Declaration("penstock_amqp_connected", "gauge", "1 while the connection and every consumer is up"),
        Declaration("penstock_amqp_reconnects_total", "counter", "Connections opened after the first"),
        Declaration("penstock_amqp_workers", "gauge", "Workers of a consumer", ("queue",)),
        Declaration("penstock_amqp_prefetch", "gauge", "How much the broker may send ahead", ("queue",)),
        Declaration("penstock_amqp_in_flight", "gauge", "Messages delivered and not settled", ("queue",)),
        Declaration("penstock_amqp_utilisation", "gauge", "Share of the workers that are busy", ("queue",)),
        Declaration(
            "penstock_amqp_ack_frames_total", "counter", "Acknowledgements sent, multiple ones as 1", ("queue",)
        ),
        Declaration("penstock_amqp_restores_total", "counter", "Consumers restored after a loss", ("queue",)),
        Declaration("penstock_amqp_deliveries_total", "counter", "Messages delivered", ("queue", "event_type")),
        Declaration("penstock_amqp_redeliveries_total", "counter", "Of these, sent before", ("queue", "event_type")),
        Declaration("penstock_amqp_acks_total", "counter", "Messages handled and acked", ("queue", "event_type")),
        Declaration("penstock_amqp_nacks_total", "counter", "Messages returned or refused", ("queue", "event_type")),
        Declaration(
            "penstock_amqp_retries_total", "counter", "Failed attempts to be repeated", ("queue", "event_type")
        ),
        Declaration("penstock_amqp_dead_letters_total", "counter", "Messages given up", ("queue", "event_type")),
        Declaration("penstock_amqp_stale_total", "counter", "Finished after a channel loss", ("queue", "event_type")),
        Declaration(
            "penstock_amqp_handler_seconds",
            "histogram",
            "Time in the handler",
            ("queue", "event_type"),
            LATENCY_BUCKETS,
        ),
        Declaration(
            "penstock_amqp_settle_seconds",
            "histogram",
            "Time from delivery to ack",
            ("queue", "event_type"),
            LATENCY_BUCKETS,
        ),
    )
}


# Counters without "_total", named as the queue's users know them.
_BARE_COUNTERS = [
    one.name for one in DECLARATIONS.values() if one.kind == "counter" and not one.name.endswith("_total")
]


def declared(name: str, kind: Kind | None = None) -> Declaration:
    """The declaration of `name`; UndeclaredMetric if there is none (of that kind)."""
    declaration = DECLARATIONS.get(name)
    if declaration is None or (kind is not None and declaration.kind != kind):
        raise UndeclaredMetric(f"{name!r} is not declared in penstock.telemetry as {kind or 'a metric'}")
    return declaration


class Value(NamedTuple):
    """One line of `/metrics`: what a sample becomes, and how values travel from another process."""

    name: str  # as it is declared
    suffix: str  # of a histogram's lines
    labels: dict[str, str]
    value: float


Source = Callable[[], Iterable[Sample | Buckets]]
ValueSource = Callable[[], Iterable[Value]]


class Telemetry:
    """The metrics of one process (or one test), rendered for Prometheus.

    Threads: every method may be called from any thread.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._sources: list[tuple[ValueSource, dict[str, str]]] = []
        self.registry.register(_SourceCollector(self))

    def watch(self, source: Source, **labels: str) -> Callable[[], None]:
        """Ask `source` for its samples at every scrape; call what is returned to stop asking.

        `labels` are added to each of its samples: `queue="relay"` tells one queue's from another's. What several
        sources say under one name and the same labels is added up, which suits counts but neither ratios nor ages.
        """
        return self.watch_values(lambda: _values_of(source()), **labels)

    def watch_values(self, source: ValueSource, **labels: str) -> Callable[[], None]:
        """The same for values that have their labels already, as those of another process."""
        watched = (source, labels)
        with self._lock:
            self._sources.append(watched)

        def unwatch() -> None:
            with self._lock:
                if watched in self._sources:
                    self._sources.remove(watched)

        return unwatch

    def values(self) -> Iterator[Value]:
        """What every watched source says now. One that the disk or a process fails is left out."""
        with self._lock:
            sources = list(self._sources)
        for source, labels in sources:
            try:
                found = list(source())
            except OSError as error:
                log.warning("Metrics of one part cannot be read. labels=%s reason=%s", labels, error)
                continue
            for one in found:
                yield one._replace(labels=labels | one.labels) if labels else one

    def render(self) -> bytes:
        """The text that `/metrics` serves."""
        text = generate_latest(self.registry)
        for name in _BARE_COUNTERS:  # the client's data model knows no such counter, the text format does
            text = text.replace(f"# TYPE {name} untyped\n".encode(), f"# TYPE {name} counter\n".encode())
        return text


class _SourceCollector:
    """Turns samples into Prometheus families."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        families: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for one in self._telemetry.values():
            series = families.setdefault(one.name, {})
            key = (one.name + one.suffix, tuple(one.labels.items()))
            series[key] = series.get(key, 0.0) + one.value
        for name, series in families.items():
            declaration = declared(name)
            kind = "unknown" if name in _BARE_COUNTERS else declaration.kind
            family = Metric(name.removesuffix("_total") if kind == "counter" else name, declaration.help, kind)
            for (sample_name, pairs), value in series.items():
                family.add_sample(sample_name, dict(pairs), value)
            yield family


def _values_of(samples: Iterable[Sample | Buckets]) -> Iterator[Value]:
    for sample in samples:
        labels = dict(zip(declared(sample.name).labels, sample.labels, strict=True))
        if isinstance(sample, Buckets):
            for suffix, further, value in sample.samples():
                yield Value(sample.name, suffix, labels | dict(further), value)
        else:
            yield Value(sample.name, "", labels, sample.value)
