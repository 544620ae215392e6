"""The failover: what could not be queued or sent waits in memory and is sent from there.

It serves only where a batch in memory is as safe as a success promises: at `Durability.MEMORY`, for what the queue's
disk refuses, and without a queue for what the destination does not take now.
"""

import logging
import threading
from contextlib import suppress

from penstock.clock import Clock
from penstock.errors import BlockTooLarge, QueueClosed, QueueError
from penstock.export.batch_delivery import ERROR_PAUSE, ExportDelivery
from penstock.export.config import FailoverConfig
from penstock.export.exporter import Exporter
from penstock.export.leased_memory import LeaseSource, SendMemory
from penstock.export.send_gate import SendGate
from penstock.export.stats import ExportCounters
from penstock.spool import Lease, MemoryQueue

log = logging.getLogger(__name__)


class Failover:
    """Holds what could not be queued or sent; every `drain_interval` up to `drain_batch` of it is sent.

    Order: oldest first, beside what the durable queue holds; for a destination that wants its batches in order, behind
        that, and later pushes come behind both. At the end it is order that gives way, not the batch.
    Loss: its oldest batches where there is no room, and what is still in it when the process ends; both are counted
        as data loss.
    Threads: every method may be called from any thread. Its own thread starts with the first batch.
    """

    def __init__(
        self,
        config: FailoverConfig,
        durable: LeaseSource,
        exporter: Exporter,
        gate: SendGate,
        counters: ExportCounters,
        clock: Clock,
        *,
        has_queue: bool = True,
    ) -> None:
        self._config = config
        self._has_queue = has_queue
        self._durable = durable
        self._memory = _FailoverMemory(durable, config, clock)
        self._delivery = ExportDelivery(self._memory, exporter, gate, counters, clock)
        self._gate = gate
        self._counters = counters
        self._clock = clock
        self._draining = threading.Lock()  # held while one of its batches is sent or some are moved
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._is_losing = False

    def push(self, batch: bytes) -> bool:
        """Keep the batch, and evict older ones for it if need be. Returns False if it could never fit."""
        self._start()  # first: where there is no thread to send the batch, it is not taken
        try:
            evicted = self._memory.push(batch)
        except BlockTooLarge:
            return False
        self._counters.add(data_loss=evicted)
        with self._lock:
            began, self._is_losing = bool(evicted) and not self._is_losing, bool(evicted)
        if began:
            log.error("Failover is full and loses its oldest batches. queue=%s lost=%d", self._gate.queue, evicted)
        return True

    def _start(self) -> None:
        with self._lock:
            if self._stopping.is_set():
                raise QueueClosed("the send queue is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="penstock-failover", daemon=True)
                thread.start()
                self._thread = thread
                log.warning("Batches could not be taken: the failover holds them in memory. queue=%s", self._gate.queue)

    def takes_next_push(self) -> bool:
        """Whether the next push has to come here: order matters, and older batches could not move to the queue."""
        if not self._gate.in_order or not len(self):
            return False
        if not self._draining.acquire(blocking=False):
            return True  # one is being sent, and others must not pass it
        try:
            self._move_to_durable()
        finally:
            self._draining.release()
        return len(self) > 0

    def drain(self, most: int) -> int:
        """Send up to `most` batches while the gate is open. Returns how many were tried."""
        for number in range(most):
            with self._draining:
                if self._must_wait_for_durable() or not self._send_next():
                    return number
        return most

    def _must_wait_for_durable(self) -> bool:
        """Whether older batches have to leave the durable queue first."""
        return self._gate.in_order and len(self._durable) > 0 and not self._stopping.is_set()

    def _send_next(self) -> bool:
        """Send a batch. Returns False if there is none, or the gate is closed."""
        if not self._gate.wait_open(0.0):
            return False
        leases = self._memory.lease()
        for lease in leases:
            self._delivery.send(lease)
        return bool(leases)

    def _move_to_durable(self) -> None:
        """Push everything to the durable queue, if there is one, as far as its disk takes it again."""
        if not self._has_queue:
            return
        self._memory.end_delays()
        while leases := self._memory.lease():
            try:
                self._durable.push(leases[0].data, timeout=0.0)  # without a wait for room
            except QueueError:
                self._memory.nack(leases[0])
                return
            self._memory.ack(leases)

    def stop(self) -> None:
        """Let the thread bring the rest to the durable queue, else to the destination, and end."""
        self._stopping.set()

    def join(self, deadline: float) -> list[str]:
        """Wait for the thread. Returns its name if it has not ended by `deadline`."""
        thread = self._thread
        if thread is None:
            return []
        thread.join(max(0.0, deadline - self._clock.monotonic()))
        return [thread.name] if thread.is_alive() else []

    def close(self) -> None:
        """Refuse further batches."""
        self._memory.close()

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def size_bytes(self) -> int:
        return self._memory.size_bytes

    @property
    def evicted(self) -> int:
        return self._memory.evicted

    def _run(self) -> None:
        while not self._stopping.wait(float(self._config.drain_interval)):
            try:
                self.drain(self._config.drain_batch)
            except Exception:
                log.exception("Failover failed and goes on. queue=%s", self._gate.queue)
        with suppress(QueueClosed):  # `close` came first: the deadline has passed
            with self._draining:
                self._move_to_durable()
            while self.drain(1):
                pass


class _FailoverMemory(SendMemory):
    """The failover's batches. Their dead letters are the durable queue's; while its disk fails, the batches stay."""

    def __init__(self, durable: LeaseSource, config: FailoverConfig, clock: Clock) -> None:
        super().__init__(MemoryQueue(config.max_size, config.max_bytes, clock=clock), clock=clock)
        self._durable = durable

    def reject(self, lease: Lease, reason: str) -> None:
        try:
            self._durable.bury(lease.data, reason)
        except QueueError:
            self.nack(lease, ERROR_PAUSE)
        else:
            self.ack(lease)

    def bury(self, block: bytes, reason: str) -> None:
        self._durable.bury(block, reason)
