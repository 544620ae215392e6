"""The handlers of defined metrics in the batch queue: a group-by for each definition, on the queue's threads."""

import logging
import threading
from contextlib import suppress

import pyarrow as pa

from penstock.aggregate.definition_counts import DefinitionCounts
from penstock.aggregate.pending import PendingPoints, PushRound, QueuedChunk, Submission
from penstock.aggregate.point_counts import OTHERS, PointCounts
from penstock.batch import BatchQueue
from penstock.errors import QueueClosed
from penstock.model.definition import Definition
from penstock.model.partial import merged_encoded
from penstock.model.point import Chunk

log = logging.getLogger(__name__)

FEW = 1_000  # rows for which a group-by of their own costs more than it saves the push round


class MetricHandlers:
    """A handler for each of the first `max_metrics` defined metrics; the others share one.

    Threads: every method may be called from any thread.
    """

    def __init__(
        self,
        queue: BatchQueue,
        pending: PendingPoints,
        counts: PointCounts,
        definition_counts: DefinitionCounts,
        max_metrics: int,
    ) -> None:
        self._queue = queue
        self._pending = pending
        self._counts = counts
        self._definition_counts = definition_counts
        self._max_metrics = max_metrics
        # _lock guards the registration of handlers.
        self._lock = threading.Lock()
        self._types: dict[str, type[QueuedChunk]] = {}

    def queued(self, chunk: Chunk, definitions: tuple[Definition, ...], submission: Submission) -> QueuedChunk:
        """What the chunk travels as; the first chunk of a metric registers its handler."""
        with self._lock:
            name = chunk.metric
            if name not in self._types and len(self._types) >= self._max_metrics:
                name = OTHERS
            if name not in self._types:
                self._types[name] = self._registered(name, weight=len(definitions))
            return self._types[name](chunk, definitions, submission)

    def _registered(self, name: str, weight: float) -> type[QueuedChunk]:
        if name == OTHERS:
            log.warning("Metrics without a handler of their own share one. most=%d", self._max_metrics)
        # One qualified name: the queue's metrics show it, and must not grow with the metrics.
        kind = type(f"QueuedChunk[{name}]", (QueuedChunk,), {"__slots__": (), "__qualname__": "QueuedChunk"})
        with suppress(QueueClosed):  # then `produce` says so
            self._queue.add_handler(kind, self._consume, weight)
        return kind

    def _consume(self, batch: list[QueuedChunk]) -> None:
        """Merge the chunks of one round, metric and set of definitions at once."""
        groups: dict[tuple[PushRound | None, type[Chunk], int], list[QueuedChunk]] = {}
        for queued in batch:
            key = (queued.submission.round, type(queued.chunk), id(queued.definitions))
            groups.setdefault(key, []).append(queued)
        for (round_, _, _), group in groups.items():
            try:
                partials = self._partials([queued.chunk for queued in group], group[0].definitions)
            except Exception as error:  # noqa: BLE001 - whatever a definition makes of a chunk, the others go on
                self._consume_apart(group, error)
                continue
            self._pending.add_partials(group, round_, partials)

    def _consume_apart(self, group: list[QueuedChunk], error: Exception) -> None:
        """One of the chunks cannot be merged. Merge each alone, so that only the submission of that one fails."""
        if len(group) > 1:
            for queued in group:
                self._consume([queued])
            return
        metric = group[0].chunk.metric
        self._counts.add(metric, failed_chunks=1)
        log.error("A chunk cannot be merged. metric=%s", metric, exc_info=error)
        self._pending.fail_queued(group[0], error)

    def _partials(self, chunks: list[Chunk], definitions: tuple[Definition, ...]) -> list[pa.Table]:
        points = pa.concat_tables([chunk.points for chunk in chunks])
        made = []
        for definition in definitions:
            rows = definition.partials(points, chunks[0].kind)
            self._definition_counts.add(definition, rows.num_rows)
            if rows.num_rows:
                made.append(merged_encoded(rows) if rows.num_rows > FEW else rows)
        return made
