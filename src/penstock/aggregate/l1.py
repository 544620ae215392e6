"""L1: merges the points of one series before they travel.

    request ──submit──► batch queue ──a handler per metric──► partials ──one block──► durable queue ──► answer
               └ room for all of it, or False                  └ a round: merged and pushed at once

Invariants
1. A request is let in whole or not at all; of one that is not, `done` is never called.
2. `done` of a request that was let in is called exactly once.
3. At `disk` and `fsync`, done(None) says that `push` has returned for every point of the request, and done(error) that
   it was refused with all the others of its round. Only a chunk that cannot be merged, or a queue that somebody else
   closes, fails a request of which other chunks may have been taken.
4. One push at a time; whoever comes while it runs shares the next.
5. What is held is bounded in bytes: in the queue, as partials, and what the durable queue refuses.
6. What nobody waits for (`produce`, or durability `memory`) is kept until the durable queue takes it.
How they are kept: `pending`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Self

import pyarrow as pa

from penstock.aggregate.config import L1Config
from penstock.aggregate.merger import Merger
from penstock.aggregate.pending import Done, Held, Pending, Request, Round
from penstock.batch import BatchQueue, BatchQueueConfig, DrainBalancer, PartitionPolicy, ThreadPolicy
from penstock.batch.config import BufferStrategy
from penstock.clock import Clock, SystemClock
from penstock.errors import QueueClosed, QueueError
from penstock.model.definition import Definitions
from penstock.model.gathering import merged_chunks
from penstock.model.partial import encoded, merged_encoded
from penstock.model.point import Chunk
from penstock.model.segment import encode
from penstock.spool import Durability
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

BUFFER_CHUNKS = 20_000  # the seed's buffer for L1; ours is bounded by bytes first
BALANCE_INTERVAL = 10.0
PUSHER_GRACE = 0.5  # handlers that used up the time of `close` must not cost what is merged: a push takes milliseconds
# A metric that has definitions is made of events, and its handler does a group-by for each definition. One that has
# none is a meter that is read now and then: twenty of those are as much work.
DEFINED_WEIGHT = 1.0
METER_WEIGHT = 0.05
OTHERS = "(others)"

Push = Callable[[list[bytes]], object]


class L1:
    """One shared batch queue, a handler per metric; what leaves it are blocks of merged partials.

    Loss: nothing that was let in, as long as `close` runs. At `memory` a crash loses what is held; at `disk` and
        `fsync` nobody was told that it is safe.
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
        self._push = push
        self._definitions = definitions or Definitions()
        self._clock: Clock = clock or SystemClock()
        self._answers_late = config.durability is not Durability.MEMORY
        self._pending = Pending(
            max_bytes=int(config.max_bytes),
            max_chunks=queue.config.buffer_size,  # all of them may be of one partition
            flush_interval=float(config.flush_interval),
            flush_rows=config.flush_rows,
            clock=self._clock,
        )
        self._blocks = 0
        self._partials = 0
        # _lock guards the registration of new metrics.
        self._lock = threading.Lock()
        self._mergers: list[Merger] = []
        self._kinds: dict[str, type[Held]] = {}
        self._others: type[Held] | None = None
        self._pusher = threading.Thread(target=self._push_rounds, name=f"penstock-{queue.name}-push", daemon=True)
        self._pusher.start()

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

    def submit(self, chunks: Sequence[Chunk], done: Done) -> bool:
        """Let one request's chunks in, all or none; False if there is no room, or it is closed.

        `done(error)` is called once, in any thread, as soon as they are as safe as the durability says: with None, or
        with the error for which they are not. At `memory` that is before this returns.
        """
        with self._pending.doorway([chunk.nbytes for chunk in chunks]) as sizes:
            if sizes is None:
                return False
            if self._answers_late and chunks:
                self._put(chunks, sizes, self._pending.enter(done, len(chunks)))
                return True
            error = self._put(chunks, sizes, None)
        done(error)
        return True

    def produce(self, chunk: Chunk, timeout: float = 0.0) -> bool:
        """Hand over points of one metric and wait for no answer; False if there is no room within `timeout` seconds."""
        with self._pending.doorway([chunk.nbytes], timeout) as sizes:
            return sizes is not None and self._put([chunk], sizes, None) is None

    def _put(self, chunks: Sequence[Chunk], sizes: Sequence[int], request: Request | None) -> QueueError | None:
        """Put chunks in for which there is room; what went wrong, if somebody else has closed or filled the queue."""
        refusal = None
        for chunk, size in zip(chunks, sizes, strict=True):
            held = (self._kinds.get(chunk.metric) or self._kind_of(chunk.metric))(chunk, size, request)
            if not self.queue.produce(held, 0.0):
                refusal = QueueClosed(f"queue {self.queue.name!r} was closed, or filled, by somebody else")
                self._pending.failed(held, refusal)
        return refusal

    def _kind_of(self, metric: str) -> type[Held]:
        """What the chunks of `metric` travel as; the first chunk of a metric registers its handler."""
        with self._lock:
            if metric in self._kinds:
                return self._kinds[metric]
            if len(self._kinds) >= self.config.max_metrics:
                if self._others is None:
                    log.warning("Metrics without a handler of their own share one. most=%d", self.config.max_metrics)
                    self._others = self._registered(OTHERS, DEFINED_WEIGHT)
                return self._others
            weight = DEFINED_WEIGHT * self._definitions.count_of(metric) or METER_WEIGHT
            kind = self._kinds[metric] = self._registered(metric, weight)
            return kind

    def _registered(self, name: str, weight: float) -> type[Held]:
        merger = Merger(name, self._definitions, self._pending)
        kind = type(f"Held[{name}]", (Held,), {"__slots__": ()})
        with suppress(QueueClosed):  # then `produce` says so
            self.queue.add_handler(kind, merger.consume, weight)
        self._mergers.append(merger)
        return kind

    def redefine(self, definitions: Definitions) -> None:
        """Make what comes from now on by these. A chunk is made by the old or by the new ones, never by both."""
        with self._lock:
            self._definitions = definitions
            for merger in self._mergers:
                merger.redefine(definitions)

    # Out

    def _push_rounds(self) -> None:
        while (round_ := self._pending.next_round()) is not None:
            self._hand_over(round_)

    def _hand_over(self, round_: Round) -> BaseException | None:
        """Push a round, and say so to whoever waits for it; what went wrong, if anything."""
        try:
            table = self._table_of(round_)
            if round_.is_kept:
                return None if self._pending.put_back(round_, table) else self._push_kept(round_, self._sliced(table))
            if round_.waiting:
                self._push_all(self._sliced(table))
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it and the thread go on
            self._give_up(round_, error)
            return error
        self._pending.pushed(round_)
        return None

    def _table_of(self, round_: Round) -> pa.Table:
        gathered = merged_chunks(round_.chunks)
        if not round_.partials:
            return gathered
        pieces = [encoded(partials) for partials in round_.partials]
        return merged_encoded(pa.concat_tables([*pieces, gathered]))

    def _give_up(self, round_: Round, error: BaseException) -> None:
        if round_.is_kept:
            self._keep(round_, round_.partials, error, round_.chunks)
        else:
            self._pending.refused(round_, error)

    def _keep(
        self, round_: Round, partials: Sequence[pa.Table], error: BaseException, chunks: Sequence[Chunk] = ()
    ) -> None:
        if self._pending.keep(round_, partials, chunks):
            log.warning("L1 keeps what the queue refuses. queue=%s reason=%s", self.queue.name, error)

    def _sliced(self, table: pa.Table) -> list[pa.Table]:
        most = self.config.flush_rows
        return [table.slice(start, most) for start in range(0, table.num_rows, most)]

    def _push_all(self, blocks: Sequence[pa.Table]) -> None:
        if blocks:
            self._push([encode(block) for block in blocks])
            self._blocks += len(blocks)
            self._partials += sum(block.num_rows for block in blocks)

    def _push_kept(self, round_: Round, blocks: Sequence[pa.Table]) -> BaseException | None:
        """Push block by block, because nobody waits for all of it, and keep the rest."""
        for index, block in enumerate(blocks):
            try:
                self._push_all([block])
            except Exception as error:  # noqa: BLE001 - what nobody waits for must not be lost, whatever it is
                self._keep(round_, blocks[index:], error)
                return error
        if self._pending.pushed(round_):
            log.info("L1 hands over again. queue=%s", self.queue.name)
        return None

    def close(self, timeout: float = 30.0) -> None:
        """Let nothing more in, merge what the queue holds, push all of it, answer everybody.

        Raises what `push` raises, or QueueClosed if there was no time to merge everything: who waited for it has heard
        so. What nobody waited for is then still held, and `close` may be called again.
        """
        deadline = self._clock.monotonic() + timeout
        self._pending.close()
        drained = self.queue.close(timeout)
        self._pending.stop()
        self._pusher.join(max(PUSHER_GRACE, deadline - self._clock.monotonic()))
        errors = [error for round_ in self._pending.last_rounds() if (error := self._end(round_)) is not None]
        if not drained:
            errors.append(QueueClosed(f"L1 {self.queue.name!r}: not everything was merged within {timeout} s"))
        if errors:
            raise errors[0]

    def _end(self, round_: Round) -> BaseException | None:
        """Hand over one of the last rounds, if that can still be done; what went wrong, if anything."""
        error = None
        if self._pusher.is_alive():
            error = QueueClosed(f"L1 {self.queue.name!r}: the durable queue has not taken the block before this one")
        elif round_.unmerged:
            error = QueueClosed(f"L1 {self.queue.name!r} was closed before all of the request was merged")
        if error is None:
            return self._hand_over(round_)
        self._give_up(round_, error)
        return error

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_l1_held_bytes", self._pending.held_bytes)
        yield Sample("penstock_l1_limit_bytes", int(self.config.max_bytes))
        yield Sample("penstock_l1_turned_away_total", self._pending.turned_away)
        yield Sample("penstock_l1_blocks_total", self._blocks)
        yield Sample("penstock_l1_partials_total", self._partials)
        for merger in list(self._mergers):
            yield Sample("penstock_points_received_total", merger.points, (merger.name,))
            yield Sample("penstock_points_not_numbers_total", merger.not_numbers, (merger.name,))
            yield Sample("penstock_l1_failed_chunks_total", merger.failed_chunks, (merger.name,))
