"""L1: merges the points of one series before they travel.

chunk ──produce──► batch queue ──consume──► pending partials ──every 500 ms──► one block for the durable queue
"""

import logging
import threading
from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from penstock.batch import BatchQueue
from penstock.clock import Clock, SystemClock
from penstock.errors import QueueError
from penstock.model.definition import Definition, Definitions
from penstock.model.partial import merged
from penstock.model.point import Chunk
from penstock.model.segment import encode
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

FLUSH_INTERVAL = 0.5  # short enough that a minute table is fresh, long enough that a series merges many points
FLUSH_ROWS = 50_000  # about 4 MB of partials: bounds memory when there are more series than points to merge


class L1:
    """One shared batch queue, a handler per metric; what leaves it are blocks of merged partials.

    Loss: nothing that `produce` accepted, as long as `close` runs; until then it is in memory only. A block that `push`
    refuses stays pending and is merged with what comes next.
    Threads: `produce` may be called from any thread.
    """

    def __init__(
        self,
        queue: BatchQueue,
        push: Callable[[bytes], object],
        *,
        definitions: Definitions | None = None,
        flush_interval: float = FLUSH_INTERVAL,
        flush_rows: int = FLUSH_ROWS,
        clock: Clock | None = None,
    ) -> None:
        self._queue = queue
        self._push = push
        self._definitions = definitions or Definitions()
        self._flush_interval = flush_interval
        self._flush_rows = flush_rows
        self._clock: Clock = clock or SystemClock()
        # _lock guards the registration of new metrics.
        self._lock = threading.Lock()
        self._mergers: dict[type[Chunk], _Merger] = {}

    def produce(self, chunk: Chunk) -> bool:
        """Hand over points of one metric; False if the queue is full or closed."""
        if type(chunk) not in self._mergers:
            self._register(type(chunk))
        return self._queue.produce(chunk)

    def _register(self, kind: type[Chunk]) -> None:
        with self._lock:
            if kind not in self._mergers:
                made = self._definitions.of(kind.metric)
                merger = _Merger(kind.metric, made, self._push, self._flush_interval, self._flush_rows, self._clock)
                self._queue.add_handler(kind, merger)
                self._mergers[kind] = merger

    def close(self, timeout: float = 30.0) -> None:
        """Drain the queue, merge and push what is pending. Raises what `push` raises: then it is still pending."""
        self._queue.close(timeout)
        for merger in list(self._mergers.values()):
            merger.flush()

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        for merger in list(self._mergers.values()):
            yield Sample("penstock_points_received_total", merger.points, (merger.metric,))
            yield Sample("penstock_l1_partials_total", merger.partials, (merger.metric,))
            yield Sample("penstock_points_not_numbers_total", merger.not_numbers, (merger.metric,))


class _Merger:
    """The handler of one metric. The queue never runs it on two threads at once, so it needs no lock."""

    def __init__(
        self,
        metric: str,
        definitions: tuple[Definition, ...],
        push: Callable[[bytes], object],
        flush_interval: float,
        flush_rows: int,
        clock: Clock,
    ) -> None:
        self.metric = metric
        self.points = 0
        self.not_numbers = 0
        self._definitions = definitions
        self.partials = 0
        self._push = push
        self._flush_interval = flush_interval
        self._flush_rows = flush_rows
        self._clock = clock
        self._pending: list[pa.Table] = []
        self._rows = 0
        self._due = 0.0
        self._refused = False

    def consume(self, batch: list[Chunk]) -> None:
        if not self._pending:
            self._due = self._clock.monotonic() + self._flush_interval
        points = self._numbers(pa.concat_tables([chunk.points for chunk in batch]))
        for definition in self._definitions if points.num_rows else ():
            partials = definition.partials(points)
            if partials.num_rows:
                self._pending.append(partials)
                self._rows += partials.num_rows
        self.points += sum(map(len, batch))
        self._flush_if_due()

    def _numbers(self, points: pa.Table) -> pa.Table:
        """Without NaN and infinities: one of them would make the sum of its series useless for good."""
        finite = pc.is_finite(points["value"])
        if pc.all(finite).as_py():
            return points
        kept = points.filter(finite)
        self.not_numbers += points.num_rows - kept.num_rows
        return kept

    def on_idle(self) -> None:
        if self._pending:
            self._flush_if_due()

    def _flush_if_due(self) -> None:
        if self._rows < self._flush_rows and self._clock.monotonic() < self._due:
            return
        try:
            self.flush()
        except QueueError as error:
            self._due = self._clock.monotonic() + self._flush_interval
            if not self._refused:
                self._refused = True
                log.warning("L1 keeps what the queue refuses. metric=%s reason=%s", self.metric, error)

    def flush(self) -> None:
        """Push what is pending as one block; on an error it is all still pending."""
        if not self._pending:
            return
        block = merged(pa.concat_tables(self._pending))
        self._pending = [block]
        self._rows = block.num_rows
        self._push(encode(block))
        self._pending = []
        self._rows = 0
        self.partials += block.num_rows
        if self._refused:
            self._refused = False
            log.info("L1 hands over again. metric=%s", self.metric)
