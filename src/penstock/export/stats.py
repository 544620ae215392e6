"""What the send queue counts: plain integers behind one lock, and a frozen snapshot of them for `/metrics`."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ErrorClass
from penstock.export.breaker import CircuitState
from penstock.spool import QueueStats
from penstock.telemetry import Sample


class ExportCounters:
    """What was exported, retried, failed and lost.

    Threads: every method may be called from any thread.
    """

    def __init__(self) -> None:
        # _lock guards everything below.
        self._lock = threading.Lock()
        self.batches = self.bytes = 0
        self.retry_successes = 0
        self._counts: Counter[str] = Counter()
        self._errors: Counter[ErrorClass] = Counter()
        self._retry_errors: Counter[ErrorClass] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def sent(self, length: int, *, is_retry: bool) -> None:
        with self._lock:
            self.batches += 1
            self.bytes += length
            self.retry_successes += is_retry

    def failed(self, error_class: ErrorClass, *, is_retry: bool) -> None:
        with self._lock:
            self._errors[error_class] += 1
            if is_retry:
                self._retry_errors[error_class] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def errors(self) -> dict[str, int]:
        with self._lock:
            return {error_class.value: self._errors[error_class] for error_class in ErrorClass}

    def retry_errors(self) -> dict[str, int]:
        with self._lock:
            return {error_class.value: self._retry_errors[error_class] for error_class in ErrorClass}


@dataclass(frozen=True, kw_only=True, slots=True)
class SendQueueStats:
    """A snapshot of a `SendQueue`. Counters run since it was made."""

    queue: QueueStats
    exported_batches: int
    exported_bytes: int
    retries: int
    retry_successes: int
    retry_failures: dict[str, int]  # by error class
    errors: dict[str, int]  # by error class
    splits: int
    partial_rejected: int  # items that the destination refused out of batches that it took
    data_loss: int  # batches that neither the queue nor the failover could keep
    workers_active: int
    workers_total: int
    preparers_active: int
    senders_active: int
    sends_inflight: int
    latency_ewma: float
    circuit: CircuitState
    circuit_opened: int
    circuit_rejected: int
    backoff: float  # seconds until the destination is asked again
    failover_size: int
    failover_bytes: int
    failover_evicted: int

    def samples(self) -> Iterator[Sample]:
        """The values under the names that `penstock.telemetry` declares."""
        yield from self.queue.samples()
        yield Sample("penstock_export_batches_total", self.exported_batches)
        yield Sample("penstock_export_bytes_total", self.exported_bytes)
        yield Sample("penstock_queue_retry_total", self.retries)
        yield Sample("penstock_queue_retry_success_total", self.retry_successes)
        for error_type, count in self.retry_failures.items():
            yield Sample("penstock_queue_retry_failure_total", count, (error_type,))
        for error_type, count in self.errors.items():
            yield Sample("penstock_export_errors_total", count, (error_type,))
        yield Sample("penstock_export_splits_total", self.splits)
        yield Sample("penstock_export_partial_rejected_total", self.partial_rejected)
        yield Sample("penstock_export_data_loss_total", self.data_loss)
        yield Sample("penstock_queue_workers_active", self.workers_active)
        yield Sample("penstock_queue_workers", self.workers_total)
        yield Sample("penstock_queue_workers_total", self.workers_total)
        yield Sample("penstock_queue_preparers_active", self.preparers_active)
        yield Sample("penstock_queue_senders_active", self.senders_active)
        yield Sample("penstock_queue_sends_inflight", self.sends_inflight)
        yield Sample("penstock_queue_export_latency_ewma_seconds", self.latency_ewma)
        for state in CircuitState:
            yield Sample("penstock_circuit_breaker_state", state is self.circuit, (state.value,))
        yield Sample("penstock_circuit_breaker_open_total", self.circuit_opened)
        yield Sample("penstock_circuit_breaker_rejected_total", self.circuit_rejected)
        yield Sample("penstock_queue_backoff_seconds", self.backoff)
        yield Sample("penstock_failover_size", self.failover_size)
        yield Sample("penstock_failover_bytes", self.failover_bytes)
        yield Sample("penstock_failover_evicted_total", self.failover_evicted)
