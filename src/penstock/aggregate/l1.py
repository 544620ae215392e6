"""L1: merges the points of one series before they travel.

    chunks ─submit─┬─ metrics without a definition ──────────────────────► push round ──merged, pushed──► answer
                   └─ defined ones ──batch queue──handler of the metric──► partials ┘

A submission is what one call of `submit` brings: the chunks of one request, or of a group that was decoded together.

Invariants
1. A submission is admitted whole or not at all; `done` of one that is not admitted is never called.
2. `done` of an admitted submission is called exactly once.
3. At `disk` and `fsync`, done(None) says that `push` has returned for every point of the submission, and done(error)
   that it was refused with all the others of its round. Only a chunk that cannot be merged, or a batch queue that is
   closed from outside, fails a submission of which other chunks may be pushed.
4. One push runs at a time. Submissions that arrive during it share the next.
5. What is held is bounded in bytes: in the queue, as partials, and what the durable queue refuses.
6. Points without an answer to give (`produce`, or durability `memory`) are kept until the durable queue takes them.
"""

from collections.abc import Iterable, Sequence
from typing import Self

from penstock.aggregate.config import L1Config
from penstock.aggregate.definition_counts import DefinitionCounts
from penstock.aggregate.described_metrics import DescribedMetrics
from penstock.aggregate.handlers import MetricHandlers
from penstock.aggregate.pending import Done, PendingPoints, Submission
from penstock.aggregate.point_counts import PointCounts
from penstock.aggregate.pusher import Push, Pusher
from penstock.batch import BatchQueue, BatchQueueConfig, DrainBalancer, PartitionPolicy, ThreadPolicy
from penstock.batch.config import BufferStrategy
from penstock.clock import Clock, SystemClock
from penstock.errors import QueueClosed, QueueError
from penstock.model.definition import Definitions
from penstock.model.metric_description import Descriptions
from penstock.model.point import Chunk
from penstock.spool import Durability
from penstock.telemetry import Sample

BUFFER_CHUNKS = 20_000  # the seed's buffer for L1; ours is bounded by bytes first
BALANCE_INTERVAL = 10.0


class L1:
    """Merges points at the edge; blocks of partials leave it. A batch queue runs a handler for each defined metric.

    It is the `Sink` (`receive/sink.py`) of the intake.

    Loss: nothing that was admitted, as long as `close` runs. At `memory` a crash loses what is held; at `disk` and
        `fsync` only what was not answered.
    Order: none; partials need none.
    Threads: every method may be called from any thread; `done` may be called from any. One thread of its own pushes.
    Blocks: `produce` with a timeout, while it is full; `close`.
    """

    def __init__(
        self,
        queue: BatchQueue,
        push: Push,
        config: L1Config | None = None,
        *,
        definitions: Definitions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config = config or L1Config()
        self.queue = queue
        self._definitions = definitions or Definitions()
        self._clock: Clock = clock or SystemClock()
        self._answers_late = config.durability is not Durability.MEMORY
        self._definition_counts = DefinitionCounts(self._definitions)
        self._counts = PointCounts()
        self._pending = PendingPoints(
            max_bytes=int(config.max_bytes),
            max_chunks=queue.config.buffer_size,  # all of them may be of one partition
            flush_interval=float(config.flush_interval),
            clock=self._clock,
        )
        self._handlers = MetricHandlers(queue, self._pending, self._counts, self._definition_counts, config.max_metrics)
        self._described = DescribedMetrics(self._clock)
        self._pusher = Pusher(
            queue.name,
            self._pending,
            push,
            config.flush_rows,
            lambda: self._definitions.kept,
            lambda: self._described.news(self._definitions),
            self._described.tell_again,
        )

    @classmethod
    def with_own_queue(
        cls,
        name: str,
        push: Push,
        config: L1Config | None = None,
        *,
        threads: ThreadPolicy | None = None,
        definitions: Definitions | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """An L1 on a queue as the seed has it: a thread per core, partitions that grow with the metrics."""
        settings = BatchQueueConfig(
            threads=threads or ThreadPolicy.cpu_cores(1.0),
            partitions=PartitionPolicy.adaptive(),
            buffer_size=BUFFER_CHUNKS,
            strategy=BufferStrategy.IF_POSSIBLE,
            balancer=DrainBalancer.cost_weighted(),  # not by items: a chunk has one point or a hundred thousand
            balance_interval=BALANCE_INTERVAL,
        )
        return cls(BatchQueue(name, settings, clock=clock), push, config, definitions=definitions, clock=clock)

    # In

    def submit(self, chunks: Sequence[Chunk], done: Done, requests: bytes = b"") -> bool:
        """Admit these chunks, all or none; False if there is no room, or it is closed.

        `done(error)` is called once, in any thread, as soon as they are as safe as the durability says: with None, or
        with the error for which they are not. At `memory` that is before this returns. `requests` are digests that
        travel with the points: both are in the durable queue, or neither is.
        """
        submission = self._submission(chunks, done if self._answers_late and chunks else None)
        submission.requests = requests
        if not self._pending.admit(submission):
            return False
        refusal = self._put(submission)
        if submission.done is None:
            done(refusal)
        return True

    def produce(self, chunk: Chunk, timeout: float = 0.0) -> bool:
        """Hand over points of one metric without an answer; False if there is no room within `timeout` seconds."""
        submission = self._submission([chunk], None)
        return self._pending.admit(submission, timeout) and self._put(submission) is None

    def _submission(self, chunks: Sequence[Chunk], done: Done | None) -> Submission:
        """The chunks by the way that they take. Those that no definition wants are only counted."""
        submission, definitions = Submission(done), self._definitions
        for chunk in chunks:
            numbers = chunk.finite()
            submission.received.append((chunk.metric, len(chunk), len(chunk) - len(numbers)))
            self._described.has_points(chunk.metric)
            if made := definitions.of(chunk.metric):
                submission.queued.append(self._handlers.queued(numbers, made, submission))
            if definitions.keeps(chunk.metric, chunk.kind):
                submission.plain.append(numbers)
        return submission

    def _put(self, submission: Submission) -> QueueError | None:
        """Put an admitted submission into the batch queue; an error if that was closed or filled from outside."""
        for received in submission.received:
            self._counts.add(*received)
        refusal = None
        for queued in submission.queued:
            if not self.queue.produce(queued, 0.0):
                refusal = QueueClosed(f"queue {self.queue.name!r} was closed or filled from outside")
                self._pending.fail_queued(queued, refusal)
        return refusal

    def redefine(self, definitions: Definitions) -> None:
        """Apply these to what is submitted from now on."""
        self._definition_counts.redefine(definitions)
        self._definitions = definitions
        self._described.tell_again()

    def describe(self, metrics: Descriptions) -> None:
        """Take what is said of metrics; it goes with their next points."""
        self._described.learn(metrics)

    def close(self, timeout: float = 30.0) -> None:
        """Admit nothing more, merge what the queue holds, push all of it, answer every submission.

        Raises what `push` raises, or QueueClosed if there was no time to merge everything; submissions were answered
        with that error. Points without a submission are then still held, and `close` may be called again.
        """
        deadline = self._clock.monotonic() + timeout
        self._pending.close()
        self._pending.wait_until_merged(timeout)  # before the queue closes: admitted chunks may be on their way into it
        drained = self.queue.close(max(0.0, deadline - self._clock.monotonic()))
        errors = self._pusher.close(deadline - self._clock.monotonic())
        if not drained:
            errors.append(QueueClosed(f"L1 {self.queue.name!r}: not everything was merged within {timeout} s"))
        if errors:
            raise errors[0]

    def fullness(self) -> float:
        """The share of `max_bytes` that is held: at 1 requests are refused."""
        return self._pending.held_bytes / int(self.config.max_bytes)

    def dead_threads(self) -> list[str]:
        """The threads that have ended though they should not, before `close`."""
        return self._pusher.dead_threads()

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_l1_held_bytes", self._pending.held_bytes)
        yield Sample("penstock_l1_limit_bytes", int(self.config.max_bytes))
        yield Sample("penstock_l1_turned_away_total", self._pending.turned_away)
        yield Sample("penstock_l1_blocks_total", self._pusher.blocks)
        yield Sample("penstock_l1_partials_total", self._pusher.partials)
        yield from self._counts.samples()
        yield from self._definition_counts.samples()
