"""The threads that empty the queue: workers, or preparers and senders with a channel between them.

worker:    wait for the gate ─► lease ─► prepare ─► send ─► ack
split:     preparer: wait for the gate ─► lease ─► prepare ─► channel ─► sender: wait for the gate ─► send ─► ack
group:     wait for the gate ─► lease many ─► send them as one ─► ack        (one thread, strictly in order)
"""

import math

from penstock.clock import Clock
from penstock.errors import QueueClosed, TransientExportError
from penstock.export.batch_delivery import ExportDelivery, log_export_dead_letter
from penstock.export.classify import of_exception
from penstock.export.config import SendQueueConfig
from penstock.export.exporter import GroupExporter
from penstock.export.leased_memory import LeaseSource
from penstock.export.prepared_channel import PreparedBatch, PreparedChannel
from penstock.export.send_gate import SendGate
from penstock.export.stats import ExportCounters
from penstock.export.thread_pool import IsRetired, SendThreadPool
from penstock.spool import FastQueue, Lease

IDLE_WAIT = 0.2  # seconds that an idle thread waits before it checks whether it is retired


class ActiveSendThreads:
    """The threads at work. Without a lock: each sets and clears its own entry, and a dict does that atomically."""

    def __init__(self, lanes: int = 1) -> None:
        self._lanes = lanes
        self._at_work: dict[int, bool] = {}

    def enter(self, number: int) -> None:
        self._at_work[number] = True

    def leave(self, number: int) -> None:
        del self._at_work[number]

    def __len__(self) -> int:
        """How many are at work; several lanes of one sender are one."""
        return len({number // self._lanes for number in self._at_work.copy()})


class SendWorkers:
    """Threads that send what the source holds, until they are stopped."""

    def __init__(
        self, source: LeaseSource, delivery: ExportDelivery, gate: SendGate, config: SendQueueConfig, clock: Clock
    ) -> None:
        self._source = source
        self._delivery = delivery
        self._gate = gate
        self.is_split = config.pipeline_split.enabled
        self._lanes = config.max_concurrent_sends if self.is_split else 1
        self._first = config.sender_count() if self.is_split else config.worker_count()
        self._pool = SendThreadPool("penstock-sender" if self.is_split else "penstock-worker", self._send, clock)
        self.active = ActiveSendThreads(self._lanes)
        # Used by the pipeline split only.
        budget = config.memory_budget() or math.inf
        self._channel = PreparedChannel(
            config.pipeline_split.channel_size, budget, newest_first=config.order == "freshest"
        )
        self._preparer_count = config.preparer_count() if self.is_split else 0
        self._preparers = SendThreadPool("penstock-preparer", self._prepare, clock)
        self.preparing = ActiveSendThreads()

    @property
    def total(self) -> int:
        """The number of workers asked for; with the pipeline split, of senders."""
        return self._pool.size // self._lanes

    def start(self, count: int | None = None) -> None:
        self._preparers.resize(self._preparer_count)
        self.resize(self._first if count is None else count)

    def dead_threads(self) -> list[str]:
        return self._pool.dead_threads() + self._preparers.dead_threads()

    def resize(self, count: int) -> None:
        """Run `count` workers; with the pipeline split, senders of `max_concurrent_sends` lanes each."""
        self._pool.resize(count * self._lanes)

    def stop(self) -> None:
        """Begin no further send."""
        self._pool.stop()
        self._preparers.stop()

    def close(self, deadline: float) -> list[str]:
        """Finish sends, give the rest back. Returns the names of threads that have not ended by `deadline`."""
        self._gate.stop()
        self.stop()
        late = self._preparers.join(deadline) + self._pool.join(deadline)
        for batch in self._channel.drain():
            self._delivery.give_back_unsent(batch.lease)
        return late

    # -- threads -----------------------------------------------------------------------------------------------------

    def _send(self, number: int, is_retired: IsRetired) -> None:
        while not is_retired():
            if not self._gate.wait_open(IDLE_WAIT):
                continue
            try:
                batch = self._next_batch()
            except QueueClosed:
                return
            if batch is None:
                continue
            self.active.enter(number)
            try:
                self._delivery.send(*batch)
            finally:
                self.active.leave(number)

    def _next_batch(self) -> PreparedBatch | None:
        if self.is_split:
            return self._channel.get(IDLE_WAIT)
        leases = self._source.lease(1, timeout=IDLE_WAIT)
        return PreparedBatch(leases[0], None) if leases else None

    def _prepare(self, number: int, is_retired: IsRetired) -> None:
        while not is_retired():
            if not self._gate.wait_open(IDLE_WAIT) or not self._channel.wait_for_room(IDLE_WAIT):
                continue
            try:
                leases = self._source.lease(1, timeout=IDLE_WAIT)
            except QueueClosed:
                return
            if not leases:
                continue
            self.preparing.enter(number)
            try:
                batch = PreparedBatch(leases[0], self._delivery.prepare(leases[0]))
            finally:
                self.preparing.leave(number)
            if is_retired():  # no sender would take it from the channel any more
                self._delivery.give_back_unsent(batch.lease)
            else:
                self._channel.put(batch)


class SendGroupWorker:
    """One thread that sends many blocks as one, strictly in order: a group that fails is held and sent again."""

    is_split = False

    def __init__(
        self, source: FastQueue, exporter: GroupExporter, gate: SendGate, counters: ExportCounters, clock: Clock
    ) -> None:
        self._source = source
        self._exporter = exporter
        self._gate = gate
        self._counters = counters
        self.active = ActiveSendThreads()
        self.preparing = ActiveSendThreads()
        self._pool = SendThreadPool("penstock-group", self._work, clock)

    @property
    def total(self) -> int:
        return self._pool.size

    def start(self, count: int | None = None) -> None:
        self._pool.resize(1)

    def dead_threads(self) -> list[str]:
        return self._pool.dead_threads()

    def resize(self, count: int) -> None:
        """Does nothing: more than one worker would not keep the order."""

    def stop(self) -> None:
        self._pool.stop()

    def close(self, deadline: float) -> list[str]:
        self._gate.stop()
        self.stop()
        return self._pool.join(deadline)

    def _work(self, number: int, is_retired: IsRetired) -> None:
        held: list[Lease] = []
        try:
            while not is_retired():
                if not self._gate.wait_open(IDLE_WAIT):
                    continue
                held = held or self._lease()
                if held:
                    self.active.enter(number)
                    try:
                        held = self._send(held)
                    finally:
                        self.active.leave(number)
            for lease in held:
                self._source.nack(lease, keep=True)
        except QueueClosed:
            pass  # what was not acked comes again when the queue is opened

    def _lease(self) -> list[Lease]:
        exporter = self._exporter
        return self._source.lease(exporter.max_blocks, max_bytes=exporter.max_bytes, timeout=IDLE_WAIT)

    def _send(self, held: list[Lease]) -> list[Lease]:
        """Send and ack the group. Returns what has to be sent again."""
        permit = self._gate.begin()
        if permit is None:
            return held
        is_retry = any(lease.attempts > 1 for lease in held)
        if is_retry:
            self._counters.add(retries=1)
        try:
            refused = self._exporter.send_group(held)
        except Exception as error:  # noqa: BLE001 - exporters are other people's code: decide by type
            failure = of_exception(error)
            self._counters.failed(failure.error_class, is_retry=is_retry)
            if not isinstance(failure, TransientExportError):
                failure = TransientExportError(str(failure), failure.error_class)
            self._gate.failed(permit, failure, 1)
            return [lease._replace(attempts=lease.attempts + 1) for lease in held]
        self._gate.succeeded(permit)
        for lease, reason in refused:
            self._source.reject(lease, reason)
            log_export_dead_letter(self._gate.queue, lease, reason)
        bad = {lease.sequence for lease, _ in refused}
        done = [lease for lease in held if lease.sequence not in bad]
        self._source.ack(done)
        for number, lease in enumerate(done):
            self._counters.sent(len(lease.data), is_retry=is_retry and not number)  # a group is one send
        return []
