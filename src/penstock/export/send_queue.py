"""SendQueue: every batch goes through a queue, and workers bring it to its destination.

push ─► FastQueue (memory, then disk) ─► workers ─► exporter ─► destination
  │                                        ▲  └─ never: dead letters
  └─ not taken, and memory is enough ─► failover, sent every 5 s
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.errors import (
    CircuitOpen,
    DiskFailed,
    DiskFull,
    ExportError,
    QueueClosed,
    TransientExportError,
)
from penstock.export.adaptive_limit import AdaptiveLimit
from penstock.export.batch_delivery import ExportDelivery
from penstock.export.breaker import CircuitBreaker
from penstock.export.config import SendQueueConfig
from penstock.export.exporter import Exporter, GroupExporter
from penstock.export.failover import Failover
from penstock.export.leased_memory import LeaseSource, SendMemory
from penstock.export.scaler import INTERVAL, WorkerScaler
from penstock.export.send_gate import SendGate
from penstock.export.send_settings import (
    checked_send_settings,
    exporter_wants_order,
    memory_is_enough_to_send,
    send_settings_with_leases,
)
from penstock.export.send_workers import SendGroupWorker, SendWorkers
from penstock.export.stats import ExportCounters, SendQueueStats
from penstock.spool import FastQueue, MemoryQueue
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

_CUT_OFF_ALLOWANCE = 0.5  # seconds of the deadline, for sends that were cut off to end
_SHORTEST_POLL = 0.001  # seconds between two looks whether everything is settled
_LONGEST_POLL = 0.1
_POLL_PER_BATCH = 10e-6  # seconds: a few looks in all, since each takes the interpreter from a worker


class SendQueue:
    """Takes batches at once and brings them to a destination in its own time.

    Order: oldest first, as far as several workers keep it. A batch that failed keeps its place.
    Loss: what the queue's durability and `full_behavior` say; beyond it none. What the destination will never take is a
        dead letter.
    Delivery: at least once. What was acknowledged is not sent again, unless the process dies between the two.
    Threads: every method may be called from any thread; `start` and `close` once.
    Blocks: `push` only where `full_behavior` is BLOCK, or where `always_queue` or `enabled` is False.
    """

    def __init__(
        self,
        queue: FastQueue | MemoryQueue,
        exporter: Exporter | GroupExporter,
        config: SendQueueConfig | None = None,
        *,
        clock: Clock | None = None,
        owns_queue: bool = False,
    ) -> None:
        self.config = config = checked_send_settings(config or SendQueueConfig(), queue, exporter)
        self._clock = clock = clock or SystemClock()
        self._exporter = exporter
        self._owns_queue = owns_queue
        self._is_durable = isinstance(queue, FastQueue)
        self._source: LeaseSource = (
            queue if isinstance(queue, FastQueue) else send_settings_with_leases(queue, config, clock)
        )
        self._counters = ExportCounters()
        self._gate = SendGate(
            CircuitBreaker(config.circuit_breaker),
            config.new_backoff(),
            config.send_limit(),
            clock,
            in_order=exporter_wants_order(exporter),
            queue=queue.path if isinstance(queue, FastQueue) else "memory",
            destination=str(getattr(exporter, "destination", type(exporter).__name__)),
        )
        self._limit: AdaptiveLimit | None = None
        if owns_queue and config.adaptive_enabled and config.max_size is None:
            max_bytes = queue.max_bytes if isinstance(queue, MemoryQueue) else int(queue.config.max_bytes)
            self._limit = AdaptiveLimit(max_bytes, config.target_utilization)
        self._delivery: ExportDelivery | None = None
        self._failover: Failover | None = None
        self._workers: SendWorkers | SendGroupWorker
        if isinstance(exporter, GroupExporter):
            assert isinstance(queue, FastQueue)
            exporter.begin(queue.id)
            self._workers = SendGroupWorker(queue, exporter, self._gate, self._counters, clock)
        else:
            self._delivery = ExportDelivery(self._source, exporter, self._gate, self._counters, clock)
            self._workers = SendWorkers(self._source, self._delivery, self._gate, config, clock)
            if config.failover.enabled and memory_is_enough_to_send(config, queue):
                self._failover = Failover(
                    config.failover,
                    self._source,
                    exporter,
                    self._gate,
                    self._counters,
                    clock,
                    has_queue=config.enabled,
                )
        self._scaler = WorkerScaler(config.adaptive_workers.min_workers, config.most_workers())
        self._scaler_thread = threading.Thread(target=self._scale_workers, name="penstock-export-scaler", daemon=True)
        self.failing, self.dead_threads = self._gate.failing, self._workers.dead_threads  # how it goes
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._lost = 0

    @classmethod
    def open(cls, exporter: Exporter | GroupExporter, config: SendQueueConfig, *, clock: Clock | None = None) -> Self:
        """Open a send queue with the queue that the configuration describes. `close` closes that queue, too."""
        if config.type == "memory":
            memory = MemoryQueue(config.first_max_size, config.memory_bytes(), clock=clock)
            return cls(memory, exporter, config, clock=clock, owns_queue=True)
        queue = FastQueue(config.path, config.queue_config(), clock=clock)
        try:
            return cls(queue, exporter, config, clock=clock, owns_queue=True)
        except BaseException:
            queue.close()
            raise

    # -- in ----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start sending. What is pushed before waits."""
        if self._closing.is_set():
            raise QueueClosed("the send queue is closed")
        if not self.config.enabled:
            return self
        adaptive = self.config.adaptive_workers
        self._workers.start(adaptive.min_workers if adaptive.enabled else None)
        if adaptive.enabled:
            self._scaler_thread.start()
        return self

    def push(self, batch: bytes) -> None:
        """Take the batch. It is as safe as the queue's durability says once this returns.

        Raises QueueFull (`drop_newest`, `block`), BlockTooLarge or QueueClosed, and DiskFull or DiskFailed: the batch
        was not taken. Without a queue (`enabled` is False) an ExportError. At `Durability.MEMORY` the failover takes
        what the disk, or without a queue the destination, does not take now.
        """
        if self._closing.is_set():
            raise QueueClosed("the send queue is closed")
        if not self.config.enabled:
            self._push_without_queue(batch)
            return
        if not self.config.always_queue and not len(self):
            with suppress(ExportError):  # else it is queued, and a worker settles it
                self._send_direct(batch)
                return
        if self._limit is not None and (limit := self._limit.record(len(batch))):
            self._source.resize(limit)
        failover = self._failover
        if failover is not None and failover.takes_next_push() and failover.push(batch):
            return
        try:
            self._source.push(batch)
        except (DiskFull, DiskFailed):
            if failover is None:
                raise
            if not failover.push(batch):
                self._counters.add(data_loss=1)
                raise

    def _push_without_queue(self, batch: bytes) -> None:
        failover = self._failover
        if failover is not None and failover.takes_next_push() and failover.push(batch):
            return
        try:
            self._send_direct(batch)
        except (TransientExportError, CircuitOpen):
            if failover is None or not failover.push(batch):
                raise

    def _send_direct(self, batch: bytes) -> None:
        assert self._delivery is not None  # an exporter of groups always queues
        self._delivery.send_direct(batch)

    # -- out ---------------------------------------------------------------------------------------------------------

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything is settled: taken by the destination, or a dead letter. False if it is not in time."""
        deadline = self._clock.monotonic() + timeout
        while waiting := len(self):
            left = deadline - self._clock.monotonic()
            pause = min(max(_SHORTEST_POLL, waiting * _POLL_PER_BATCH), _LONGEST_POLL, max(left, 0.0))
            if left <= 0 or self._closed.wait(pause):
                return False
        return True

    def replay_dead_letters(self, reason: str = "") -> int:
        """Queue the dead letters whose reason contains `reason` again, while it runs; how many there were."""
        return self._source.replay_dead_letters(reason)[0]

    def close(self, timeout: float = 30.0) -> list[str]:
        """Take nothing any more, finish what is under way, flush; the rest stays in the durable queue.

        A queue in memory is emptied first, as far as `timeout` seconds allow; what is lost with it is counted. Returns
        the names of threads whose send did not end in time: their batches are not acked and will be sent again.
        After DiskFull or DiskFailed the queue could not be flushed, and `close` may be called again.
        """
        late: list[str] = []
        if not self._closed.is_set():
            late = self._stop(self._clock.monotonic() + timeout)
            self._closed.set()
        if self._owns_queue or not self._is_durable:
            self._source.close()
        else:
            with suppress(QueueClosed):  # the owner has closed it already
                self._source.flush()
        return late

    def _stop(self, deadline: float) -> list[str]:
        self._closing.set()
        cut_off = max(self._clock.monotonic(), deadline - _CUT_OFF_ALLOWANCE)
        if self._scaler_thread.ident is not None:
            self._scaler_thread.join(max(0.0, cut_off - self._clock.monotonic()))
        if self._is_durable:
            self._workers.stop()  # their last sends end while the failover is emptied
        elif self.config.enabled:
            self.flush(cut_off - self._clock.monotonic())
        if self._failover is not None:
            self._failover.stop()
            self._failover.join(cut_off)
        late = self._workers.close(cut_off)
        try:
            self._exporter.close()  # cuts off what is still under way
        except Exception:
            log.exception("Exporter could not be closed. queue=%s", self._gate.queue)
        if late:
            late = self._workers.close(deadline)
        if self._failover is not None:
            late += self._failover.join(deadline)
            self._failover.close()  # from here on no push can slip in uncounted
        if not self._is_durable:
            self._source.close()
        self._count_lost()
        return late

    def _count_lost(self) -> None:
        self._lost = len(self) - (len(self._source) if self._is_durable else 0)
        if isinstance(self._source, SendMemory):
            self._lost += len(self._source.dead_letters)
        if self._lost:
            self._counters.add(data_loss=self._lost)
            log.error("Batches in memory were lost at the end. queue=%s lost=%d", self._gate.queue, self._lost)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def _scale_workers(self) -> None:
        """Adapt the number of workers until `close`."""
        while not self._closing.wait(INTERVAL):
            if self._gate.pause_left():
                continue  # more workers would only wait, too
            wanted = self._scaler.decide(
                self._clock.monotonic(),
                workers=self._workers.total,
                depth=len(self._source),
                latency=self._delivery.latency.value if self._delivery else 0.0,
            )
            self._workers.resize(wanted)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called: nothing is taken any more."""
        return self._closing.is_set()

    @property
    def lost(self) -> int:
        """After `close`: batches that go with the process, dead letters in memory and what no disk took included."""
        in_memory = self._source.stats().only_in_memory if self._is_durable else 0
        return self._lost + in_memory

    def __len__(self) -> int:
        """Batches that the destination has not acknowledged yet, those in the failover included."""
        return len(self._source) + (len(self._failover) if self._failover is not None else 0)

    def stats(self) -> SendQueueStats:
        """A frozen snapshot."""
        workers, counters, failover, gate = self._workers, self._counters, self._failover, self._gate
        return SendQueueStats(
            queue=self._source.stats(),
            exported_batches=counters.batches,
            exported_bytes=counters.bytes,
            retries=counters["retries"],
            retry_successes=counters.retry_successes,
            retry_failures=counters.retry_errors(),
            errors=counters.errors(),
            splits=counters["splits"],
            partial_rejected=counters["partial_rejected"],
            data_loss=counters["data_loss"],
            workers_active=0 if workers.is_split else len(workers.active),
            workers_total=workers.total,
            preparers_active=len(workers.preparing),
            senders_active=len(workers.active) if workers.is_split else 0,
            sends_inflight=gate.inflight,
            latency_ewma=self._delivery.latency.value if self._delivery else 0.0,
            circuit=gate.state,
            circuit_opened=gate.opened,
            circuit_rejected=gate.rejected,
            backoff=gate.pause_left(),
            failover_size=len(failover) if failover is not None else 0,
            failover_bytes=failover.size_bytes if failover is not None else 0,
            failover_evicted=failover.evicted if failover is not None else 0,
        )

    def disk_fault(self) -> str:
        """Why the disk would refuse a batch now; empty if it would not, or if there is no disk."""
        return self._source.disk_fault() if isinstance(self._source, FastQueue) else ""

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        return self.stats().samples()
