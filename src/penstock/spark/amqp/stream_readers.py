"""How the driver plans ranges of offsets and tasks read them.

{"orders": {"next": 1200, "lost": 0}}     offset: of each stream the next to read, and how many were lost so far
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pika.spec import BasicProperties
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from penstock.errors import ConfigError, StreamDataLost
from penstock.spark.amqp.stream_client import StreamClient
from penstock.spark.amqp.stream_link import OFFSET, StreamDelivery
from penstock.spark.amqp.stream_options import StreamSettings

_TEXTS = pa.map_(pa.string(), pa.string())
ROWS = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),  # as the publisher set it, else null
        pa.field("exchange", pa.string()),
        pa.field("routing_key", pa.string()),
        pa.field("properties", _TEXTS),
        pa.field("headers", _TEXTS),
        pa.field("body", pa.binary()),
    ]
)
SMALLEST_RANGE = 5_000  # less is read sooner than another task has attached
BATCH_ROWS, BATCH_BYTES = 10_000, 16 * 2**20  # what a task holds before it passes it on
_PATIENT = 3.0  # seconds before a stream is taken to be empty where no later batch looks again
_PROPERTIES = (
    "content_type", "content_encoding", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration",
    "message_id", "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip
log = logging.getLogger(__name__)
Offset = dict[str, dict[str, int]]


class StreamRange(InputPartition):
    """What one task reads: from `start` to before `end`."""

    def __init__(self, stream: str, start: int, end: int) -> None:
        self.stream = stream
        self.start = start
        self.end = end

    def __repr__(self) -> str:
        return f"Range({self.stream!r}, {self.start}, {self.end})"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]


def spark_stream_ranges(stream: str, start: int, end: int, tasks: int) -> list[StreamRange]:
    """`start` to `end` in up to `tasks` pieces of much the same size, none of them too small to be worth a task."""
    pieces = max(1, min(tasks, (end - start) // SMALLEST_RANGE))
    bounds = [start + (end - start) * n // pieces for n in range(pieces + 1)]
    return [StreamRange(stream, low, high) for low, high in pairwise(bounds) if low < high]


def shares_of_spark_batch(backlogs: Mapping[str, int], limit: int) -> dict[str, int]:
    """How much of each backlog a batch takes: an even share, and what one does not need goes to the others."""
    taken: dict[str, int] = {}
    for waiting, stream in sorted((backlog, stream) for stream, backlog in backlogs.items()):
        share = -(-limit // (len(backlogs) - len(taken)))  # rounded up: a limit of 1 is one message
        taken[stream] = min(waiting, share, limit)
        limit -= taken[stream]
    return taken


class _Reading:
    """What the two readers share: a client of their own, and the reading of a range."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._client: StreamClient | None = None  # made where it is used: this object travels to the tasks

    @property
    def client(self) -> StreamClient:
        self._client = self._client or self._settings.client()
        return self._client

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, StreamRange)
        client = self._settings.client()
        try:
            yield from _batches(partition.stream, client.read(partition.stream, partition.start, partition.end))
        finally:
            client.close()

    def _place(self, wanted: str | dict[str, int], stream: str) -> int:
        """Where in a stream that is; an empty one begins and ends at 0."""
        if isinstance(wanted, dict):
            return wanted[stream]
        look = self.client.earliest if wanted == "earliest" else self.client.latest
        return look(stream, _PATIENT) or 0


class StreamTable(_Reading, DataSourceReader):
    """What the streams hold now, once."""

    def partitions(self) -> Sequence[InputPartition]:
        planned: list[StreamRange] = []
        for stream in self._settings.streams:
            end = self._place("latest", stream)
            if isinstance(self._settings.ending, dict):
                end = self._ending(stream, self._settings.ending[stream], end)
            start = self._place(self._settings.starting, stream)
            if start < end:
                start += self.client.miss(stream, start, end)
            planned += spark_stream_ranges(stream, start, end, self._settings.tasks)
        self.client.close()
        self._client = None
        return planned or [StreamRange("", 0, 0)]

    def _ending(self, stream: str, wanted: int, end: int) -> int:
        if wanted > end:
            raise ConfigError(f"endingOffsets says {wanted} for stream {stream!r}, which ends before offset {end}")
        return wanted


class StreamFollower(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Batches of ranges, each message in exactly one batch."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__(settings)
        self._target: dict[str, int] | None = None
        self._ends: dict[str, int] = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {stream: _at(self._place(self._settings.starting, stream)) for stream in self._settings.streams}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(self._settings.limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = {stream: self._place("latest", stream) for stream in self._settings.streams}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch. A stream that was added to a query since begins at its earliest message."""
        end = _checked(start)
        for stream in self._settings.streams:
            position = end.setdefault(stream, _at(self._place("earliest", stream)))
            self._ends[stream] = self._end(stream, position["next"])
            if self._ends[stream] > position["next"]:
                lost = self.client.miss(stream, position["next"], self._ends[stream])
                end[stream] = _at(position["next"] + lost, position["lost"] + lost)
            elif self._ends[stream] < position["next"]:
                end[stream] = _at(0, position["lost"])
        backlogs = {stream: self._ends[stream] - end[stream]["next"] for stream in self._settings.streams}
        most = sum(backlogs.values()) if isinstance(limit, ReadAllAvailable) else self._settings.limit
        for stream, count in shares_of_spark_batch(backlogs, most).items():
            end[stream]["next"] += count
        return end

    def _end(self, stream: str, following: int) -> int:
        """Where a stream ends: before `following` only if it is not the stream that was read up to there."""
        end = self.client.latest(stream, known=following) if self._target is None else self._target[stream]
        if end is None or end >= following or self.client.reaches(stream, following - 1):
            return max(end or 0, following)
        text = (
            f"stream {stream!r} ends before offset {end}, but offset {following} is the next to be read: it was "
            "deleted and made anew"
        )
        if self._settings.fail_on_loss:
            raise StreamDataLost(f"{text}. Read it from its beginning with option failOnDataLoss=false, or with a new "
                                 "checkpoint")  # fmt: skip
        log.warning(
            "Stream was made anew and is read from its beginning. stream=%s end=%d next=%d", stream, end, following
        )
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        return {stream: _at(end) for stream, end in self._ends.items()} or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, after = _checked(start), _checked(end)
        spans = {}
        for stream, position in after.items():
            came_from = before.get(stream)
            first = self._place("earliest", stream) if came_from is None else _first_read(came_from, position)
            spans[stream] = (first, position["next"])
        total = sum(high - low for low, high in spans.values())
        planned: list[StreamRange] = []
        for stream, (low, high) in spans.items():
            planned += spark_stream_ranges(stream, low, high, -(-self._settings.tasks * (high - low) // max(total, 1)))
        return planned

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()


def _at(following: int, lost: int = 0) -> dict[str, int]:
    return {"next": following, "lost": lost}


def _checked(offset: Any) -> Offset:
    """An offset as Spark hands it back."""
    return {stream: _at(int(at["next"]), int(at["lost"])) for stream, at in offset.items()}


def _first_read(before: dict[str, int], after: dict[str, int]) -> int:
    """Where a batch begins to read: after what was lost, or at 0 in a stream that was made anew."""
    first = before["next"] + after["lost"] - before["lost"]
    return first if first <= after["next"] else 0


def _batches(stream: str, deliveries: Iterable[StreamDelivery]) -> Iterator[pa.RecordBatch]:
    held: list[StreamDelivery] = []
    size = 0
    for delivery in deliveries:
        held.append(delivery)
        size += len(delivery.body)
        if len(held) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield _rows(stream, held)
            held, size = [], 0
    if held:
        yield _rows(stream, held)


def _rows(stream: str, deliveries: list[StreamDelivery]) -> pa.RecordBatch:
    columns = [
        [stream] * len(deliveries),
        [delivery.offset for delivery in deliveries],
        [_moment(delivery.properties) for delivery in deliveries],
        [delivery.method.exchange for delivery in deliveries],
        [delivery.method.routing_key for delivery in deliveries],
        [list(_properties(delivery.properties)) for delivery in deliveries],
        [list(_headers(delivery.properties)) for delivery in deliveries],
        [delivery.body for delivery in deliveries],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ROWS)]
    return pa.RecordBatch.from_arrays(arrays, schema=ROWS)


def _moment(properties: BasicProperties) -> datetime | None:
    try:
        return datetime.fromtimestamp(properties.timestamp, UTC) if properties.timestamp is not None else None
    except (ValueError, OverflowError, OSError):
        return None  # a publisher may have meant anything by it; headers and body are there all the same


def _properties(properties: BasicProperties) -> Iterator[tuple[str, str]]:
    for name in _PROPERTIES:
        value = getattr(properties, name)
        if value is not None:
            yield name, str(value)


def _headers(properties: BasicProperties) -> Iterator[tuple[str, str | None]]:
    for name, value in (properties.headers or {}).items():
        if name != OFFSET:
            yield name, _text(value)


def _text(value: Any) -> str | None:
    """A header as text: texts as they are, times in ISO format, everything else as JSON."""
    match value:
        case None | str():
            return value
        case bytes():
            return value.decode(errors="replace")
        case datetime():
            return value.isoformat()
    return json.dumps(value, default=str, ensure_ascii=False)
