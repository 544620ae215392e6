"""The front of the package: declarations in, running consumers out."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Self

from penstock.broker import Broker, Tls
from penstock.clock import Clock, SystemClock
from penstock.consume.backoff_policy import BackoffPolicy
from penstock.consume.broker_connection import ConsumerConnection
from penstock.consume.consumer_options import Execution
from penstock.consume.coroutine_workers import ConsumerCoroutines
from penstock.consume.declarations import Declarations
from penstock.consume.process_workers import ConsumerProcesses
from penstock.consume.stats import Health, RegistryStats, consumer_health_of, consumer_samples_of, consumer_stats_of
from penstock.consume.subscription import Subscription
from penstock.consume.thread_workers import ConsumerThreads
from penstock.consume.worker_pool import THREADS, ConsumerWorkers, PoolSettings
from penstock.telemetry import Buckets, Sample, Telemetry

log = logging.getLogger(__name__)

_POOLS: dict[Execution, Callable[[PoolSettings], ConsumerWorkers]] = {
    Execution.THREAD: ConsumerThreads,
    Execution.ASYNC: ConsumerCoroutines,
    Execution.PROCESS: ConsumerProcesses,
}


class ConsumerRegistry:
    """Consumes what the declarations say, from `start` to `stop`.

    Order: see ConsumerOptions.
    Loss: none, but for messages that are given up where there are no dead letters to go to. A message is acknowledged
        after its handler; whatever ends before (a handler, a worker process, the connection, the broker, this process)
        leaves it to the broker, which delivers it again.
    Threads: every method may be called from any thread. Handlers run on the workers' threads.
    Blocks: `start` until every consumer consumes, `stop` until everything in hand has ended or the timeout is over.
    """

    def __init__(
        self,
        url: str,
        declarations: Declarations,
        *,
        username_file: str | None = None,
        password_file: str | None = None,
        tls: Tls | None = None,
        reconnect: BackoffPolicy | None = None,
        telemetry: Telemetry | None = None,
        clock: Clock | None = None,
    ) -> None:
        declarations.validate()
        self._broker = Broker(url, username_file, password_file, tls)
        self._clock: Clock = clock or SystemClock()
        self._connection = ConsumerConnection(self._broker, declarations, reconnect or BackoffPolicy())
        self._connection.subscriptions = [
            Subscription(consumer, self._connection, self._clock) for consumer in declarations.consumers()
        ]
        self._telemetry = telemetry
        self._unwatch: Callable[[], None] = lambda: None
        self._at_once = False
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._state = "new"

    def start(self, timeout: float = 30.0) -> None:
        """Connect, declare the topology, start the workers and consume; BrokerError with the reason if it fails.

        Later losses of the connection are repaired, not raised: see `health`.
        """
        with self._lock:
            if self._state != "new":
                raise RuntimeError(f"a registry starts once, this one is {self._state}")
            self._state = "running"
        try:
            for subscription in self._connection.subscriptions:
                self._announce(subscription)
                workers = _POOLS[subscription.consumer.pool.runs_as](subscription.pool_settings())
                workers.start()
                subscription.workers = workers
            self._connection.start(timeout)
        except BaseException:
            self._state = "failed"
            self._close_workers(self._clock.monotonic())
            raise
        if self._telemetry is not None:
            self._unwatch = self._telemetry.watch(lambda: consumer_samples_of(self._connection))

    def stop(self, timeout: float = 30.0) -> list[str]:
        """Stop consuming, let what is in hand finish, acknowledge, close; name the workers that would not end.

        What no worker has begun goes back to the queue at once; what is not finished in time goes back when the
        connection closes. Nothing is lost, and nothing is dead-lettered because of it.
        """
        if threading.current_thread().name.startswith(THREADS):
            raise RuntimeError("stop() waits for handlers, so none may call it: let the main thread do so")
        with self._lock:
            if self._state != "running":
                return []
            self._state = "stopped"
        deadline = self._clock.monotonic() + timeout
        closing = min(1.0, timeout * 0.2)  # kept for the last acks and the good-bye
        for subscription in self._connection.subscriptions:
            self._connection.call(subscription.stop)
        for subscription in self._connection.subscriptions:
            subscription.quiet.wait(max(0.0, deadline - closing - self._clock.monotonic()))
        unfinished = self._close_workers(self._clock.monotonic() if self._at_once else deadline - closing)
        if unfinished:
            log.warning("Workers did not end in time; the broker has their messages back. workers=%s", unfinished)
        if not self._connection.close(max(0.2, deadline - self._clock.monotonic())):
            log.warning("The connection did not close in time. broker=%s", self._broker)
        self._unwatch()
        log.info("Consumers stopped. broker=%s unfinished=%d", self._broker, len(unfinished))
        return unfinished

    def run(self, stop_timeout: float = 30.0) -> list[str]:
        """Start, wait for SIGTERM or SIGINT, stop. A second signal stops at once. Main thread only."""
        asked = threading.Event()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if asked.is_set():
                self._at_once = True
                for subscription in self._connection.subscriptions:
                    subscription.quiet.set()  # `stop` waits no longer
            asked.set()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            asked.wait()
            log.info("Stopping. broker=%s timeout=%s", self._broker, stop_timeout)
            return self.stop(stop_timeout)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stats(self) -> RegistryStats:
        """The counts of this moment."""
        return consumer_stats_of(self._connection)

    def samples(self) -> Iterable[Sample | Buckets]:
        """For `Telemetry.watch`, where no telemetry was handed over."""
        return consumer_samples_of(self._connection)

    def health(self) -> Health:
        """Whether every consumer consumes, and why not."""
        return consumer_health_of(self._connection)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop)

    def _close_workers(self, deadline: float) -> list[str]:
        return [
            name
            for subscription in self._connection.subscriptions
            if subscription.workers is not None
            for name in subscription.workers.close(deadline)
        ]

    def _announce(self, subscription: Subscription) -> None:
        pool, size = subscription.consumer.pool, subscription.size
        for cap in size.caps:
            log.warning("A limit applies. consumer=%s limit=%s", subscription.name, cap)
        log.info(
            "Consumer starts. consumer=%s queue=%s workers=%d prefetch=%d execution=%s event_types=%s broker=%s",
            subscription.name, pool.queue, size.workers, size.prefetch, pool.runs_as,
            [route.label for route in subscription.table.routes if route.handled], self._broker,
        )  # fmt: skip
        if any(route.dead_letters is None for route in subscription.table.routes):
            log.warning(
                "Messages that are given up are refused, and lost unless a policy of the broker dead-letters them. "
                "queue=%s",
                pool.queue,
            )
