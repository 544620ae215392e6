"""The threads that empty the queue: workers that do it all, or preparers and senders with a channel between them.

worker:    ask the gate ─► lease ─► prepare ─► send ─► ack
split:     preparer: ask the gate ─► lease ─► prepare ─► channel ─► sender: ask the gate ─► send ─► ack
group:     ask the gate ─► lease many ─► send them as one ─► ack        (one thread, strictly in order)
"""

import math
from collections.abc import Callable

from penstock.clock import Clock
from penstock.errors import QueueClosed, TransientExportError
from penstock.export.batch_delivery import Delivery, Job, log_dead_letter
from penstock.export.breaker import CircuitState
from penstock.export.classify import of_exception
from penstock.export.config import SendQueueConfig
from penstock.export.exporter import GroupExporter
from penstock.export.lease_source import Source
from penstock.export.pool import Pool, Retired
from penstock.export.prepared_channel import Channel
from penstock.export.send_gate import Gate, Permit
from penstock.export.stats import Tally
from penstock.spool import FastQueue, Lease

TURN = 0.2  # seconds that an idle thread waits before it looks whether it is still wanted


class Active:
    """Which threads are at work. Without a lock: each sets and clears its own entry, and a dict does that whole."""

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


class Workers:
    """Threads that send what the source holds, until they are stopped."""

    def __init__(self, source: Source, delivery: Delivery, gate: Gate, config: SendQueueConfig, clock: Clock) -> None:
        self._source = source
        self._delivery = delivery
        self._gate = gate
        self.preparing = Active()
        self._channel: Channel | None = None
        self._preparers: Pool | None = None
        self._lanes = 1
        take: Callable[[float], Job | None] = self._lease_and_prepare
        first = config.worker_count()
        if config.pipeline_split.enabled:
            size, budget = config.pipeline_split.channel_size, config.memory_budget()
            self._channel = Channel(size, budget or math.inf, newest_first=config.order == "freshest")
            self._preparers = Pool("penstock-preparer", self._prepare, clock)
            self._preparer_count = config.preparer_count()
            self._lanes = config.max_concurrent_sends
            take, first = self._channel.get, config.sender_count()
        self.active = Active(self._lanes)
        self._first = first
        self._take = take
        name = "penstock-sender" if self.is_split else "penstock-worker"
        self._pool = Pool(name, self._send, clock)

    @property
    def is_split(self) -> bool:
        return self._channel is not None

    @property
    def total(self) -> int:
        """Workers that there are to be; with the pipeline split, senders."""
        return self._pool.size // self._lanes

    def start(self, count: int | None = None) -> None:
        if self._preparers is not None:
            self._preparers.resize(self._preparer_count)
        self.resize(self._first if count is None else count)

    def resize(self, count: int) -> None:
        """Have `count` workers; with the pipeline split, senders of `max_concurrent_sends` lanes each."""
        self._pool.resize(count * self._lanes)

    def stop(self) -> None:
        """Begin nothing any more."""
        self._pool.stop()
        if self._preparers is not None:
            self._preparers.stop()

    def close(self, deadline: float) -> list[str]:
        """Finish what is under way, give the rest back; the names of threads that were not done by `deadline`."""
        self._gate.stop()
        self.stop()
        late = []
        if self._preparers is not None:
            late += self._preparers.join(deadline)
        late += self._pool.join(deadline)
        for job in self._channel.drain() if self._channel is not None else ():
            self._delivery.unsent(job.lease)
        return late

    # -- threads -----------------------------------------------------------------------------------------------------

    def _send(self, number: int, retired: Retired) -> None:
        while not retired():
            permit = self._gate.enter(TURN)
            if permit is None:
                continue
            is_probe = self._gate.state is CircuitState.HALF_OPEN
            try:
                job = self._take(0.0 if is_probe else TURN)
            except QueueClosed:
                self._gate.release(permit)
                return
            except BaseException:
                self._gate.release(permit)
                raise
            if job is None:
                self._gate.release(permit)
                if is_probe:  # it is wanted elsewhere: the failover may have what we have not
                    self._pool.rest(TURN)
                continue
            self.active.enter(number)
            try:
                self._send_job(job, permit)
            finally:
                self.active.leave(number)

    def _send_job(self, job: Job, permit: Permit) -> None:
        """Send the batch, unless the gate was closed while we waited for it: another may have the probe."""
        current: Permit | None = permit
        if not self._gate.is_current(permit):
            self._gate.release(permit)
            current = self._gate.enter(0.0)
        if current is None:
            self._delivery.unsent(job.lease)
        else:
            self._delivery.send_one(job, current)

    def _lease_and_prepare(self, timeout: float) -> Job | None:
        leases = self._source.lease(1, timeout=timeout)
        return self._delivery.prepare(leases[0]) if leases else None

    def _prepare(self, number: int, retired: Retired) -> None:
        assert self._channel is not None
        while not retired():
            if not self._gate.wait_open(TURN) or not self._channel.wait_room(TURN):
                continue
            try:
                leases = self._source.lease(1, timeout=TURN)
            except QueueClosed:
                return
            if leases:
                self.preparing.enter(number)
                try:
                    job = self._delivery.prepare(leases[0])
                finally:
                    self.preparing.leave(number)
                if job is not None and retired():  # no sender would take it from the channel any more
                    self._delivery.unsent(job.lease)
                elif job is not None:
                    self._channel.put(job)


class GroupWorker:
    """One thread that sends many blocks as one, strictly in order: a group that fails is held and sent again."""

    is_split = False

    def __init__(self, source: FastQueue, exporter: GroupExporter, gate: Gate, tally: Tally, clock: Clock) -> None:
        self._source = source
        self._exporter = exporter
        self._gate = gate
        self._tally = tally
        self.active = Active()
        self.preparing = Active()
        self._pool = Pool("penstock-group", self._work, clock)

    @property
    def total(self) -> int:
        return self._pool.size

    def start(self, count: int | None = None) -> None:
        self._pool.resize(1)

    def resize(self, count: int) -> None:
        """There is one, however many are asked for: order is what it is there for."""

    def stop(self) -> None:
        self._pool.stop()

    def close(self, deadline: float) -> list[str]:
        self._gate.stop()
        self.stop()
        return self._pool.join(deadline)

    def _work(self, number: int, retired: Retired) -> None:
        held: list[Lease] = []
        try:
            while not retired():
                permit = self._gate.enter(TURN)
                if permit is None:
                    continue
                try:
                    held = held or self._lease()
                    if not held:
                        self._gate.release(permit)
                        continue
                except BaseException:
                    self._gate.release(permit)
                    raise
                self.active.enter(number)
                try:
                    held = self._send(held, permit)
                finally:
                    self.active.leave(number)
            for lease in held:
                self._source.nack(lease, keep=True)
        except QueueClosed:
            pass  # what was not acked comes again when the queue is opened

    def _lease(self) -> list[Lease]:
        exporter = self._exporter
        return self._source.lease(exporter.max_blocks, max_bytes=exporter.max_bytes, timeout=TURN)

    def _send(self, held: list[Lease], permit: Permit) -> list[Lease]:
        """Send and ack; what is to be sent again."""
        is_retry = any(lease.attempts > 1 for lease in held)
        if is_retry:
            self._tally.add(retries=1)
        self._gate.begin(permit)  # there is one worker: no other is before it
        try:
            refused = self._exporter.send_group(held)
        except Exception as error:  # noqa: BLE001 - exporters are other people's code: decide by what it is
            failure = of_exception(error)
            self._tally.failed(failure.error_class, is_retry=is_retry)
            if not isinstance(failure, TransientExportError):
                failure = TransientExportError(str(failure), failure.error_class)
            self._gate.failed(permit, failure, 1)
            return [lease._replace(attempts=lease.attempts + 1) for lease in held]
        self._gate.succeeded(permit)
        for lease, reason in refused:
            self._source.reject(lease, reason)
            log_dead_letter(self._gate.queue, lease, reason)
        bad = {lease.sequence for lease, _ in refused}
        done = [lease for lease in held if lease.sequence not in bad]
        self._source.ack(done)
        for number, lease in enumerate(done):
            self._tally.sent(len(lease.data), is_retry=is_retry and not number)  # a group is one send
        return []
