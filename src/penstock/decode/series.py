"""Series: small numbers in place of labels, so that every later stage works on columns of numbers.

      raw key of a point (its labels, serialised) ──► stream ──► metric, entity
      thousands of points                             one number      one text, made once

A stream is what one sender calls a series: its own counters, its own resets. Several streams may share an entity (the
instances of one service), and add up there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints
from penstock.decode.config import IntakeConfig
from penstock.decode.outcome import Refusal
from penstock.decode.stream_owners import StreamOwners
from penstock.decode.text_dictionary import TextDictionary
from penstock.model.name import name_fault
from penstock.model.point import Chunk, PointKind, chunk_type, entity_of

OVERFLOW = entity_of({"otel.metric.overflow": "true"})  # OpenTelemetry's name for the same

NO_STREAM = -1  # in a column of streams: refused, or kept by another process, or not looked up yet
_MAX_SPELLINGS = 8  # of each series' labels, in another order or with attributes that are left out


class Refused(Exception):
    """Raised for a point, or for all points of a stream, that cannot be taken; says why."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SeriesDescription:
    """What a raw key means."""

    metric: str
    kind: PointKind
    is_cumulative: bool
    labels: Mapping[str, str]


class Namespace:
    """The raw keys of one sender's metric; `describe` is called once for each, and may raise Refused."""

    __slots__ = ("describe", "family", "keys", "owner_of_key", "owners", "parts", "streams")

    def __init__(
        self,
        describe: Callable[[bytes], SeriesDescription],
        family: Any = None,
        owners: StreamOwners | None = None,
    ) -> None:
        self.describe = describe
        self.family = family  # the metric, where there is a namespace for each
        self.owners = owners  # where each series may have another owner
        self.keys: dict[bytes, int] = {}  # the stream of each key
        self.owner_of_key: dict[bytes, int] = {}  # of keys whose streams other processes keep
        # The same labels in another order are another key, but the same stream.
        self.streams: dict[tuple[str, str, str], int] = {}
        self.parts = 0  # keys that are a part of a stream, as buckets are

    def forget(self, gone: NDArray[np.bool_]) -> None:
        """Removes the streams that are gone."""
        self.keys = {key: stream for key, stream in self.keys.items() if not gone[stream]}
        self.streams = {key: stream for key, stream in self.streams.items() if not gone[stream]}

    def forget_keys(self) -> None:
        """Makes every key be described anew."""
        self.keys = {}
        self.parts = 0
        self.owner_of_key = {}


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of the keys of a column of points."""

    streams: Ints
    """The stream of each point, or NO_STREAM."""
    refused: list[tuple[Ints, Refused]]
    """The points that were refused, by reason."""
    owners: Ints | None = None
    """The process that keeps each point's stream; None where the namespaces have no owners."""


class Metric:
    """One metric of one kind: the type of its chunks, and its entities with the number of streams of each."""

    __slots__ = ("chunk", "entities", "id")

    def __init__(self, number: int, chunk: type[Chunk]) -> None:
        self.id = number
        self.chunk = chunk
        self.entities: dict[str, int] = {}


class SeriesTable:
    """All streams that are known, by number.

    Threads: one at a time.
    """

    def __init__(self, config: IntakeConfig) -> None:
        self._config = config
        self.metrics: list[Metric] = []
        self._metric_of: dict[tuple[str, PointKind], Metric] = {}
        self._unused: list[Metric] = []  # all of their series have expired: their numbers are free
        self.overflowed = 0
        self._free: list[int] = []
        self._used = 0
        self.metric = np.zeros(1024, np.int32)
        self.is_cumulative = np.zeros(1024, bool)
        self.seen = np.zeros(1024)
        self._entity = np.zeros(1024, np.int32)
        self._texts = TextDictionary()
        # Called for each new stream whose values depend on earlier ones.
        self.on_cumulative: Callable[[Namespace, tuple[str, str, str], int], None] | None = None

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def metric_count(self) -> int:
        return len(self._metric_of)

    @property
    def capacity(self) -> int:
        """The length of the columns by stream: greater than every number in use."""
        return len(self.metric)

    def resolve(self, namespaces: list[Namespace], space: Ints, keys: Any, now: float) -> Resolved:
        """Looks up the stream of each point, and makes the streams that are new; each distinct key is looked up once.

        `space` is the index of each point's namespace, `keys` an Arrow array of raw keys.
        """
        encoded = keys.dictionary_encode()
        blobs = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        pairs = [(0, text) for text in range(len(blobs))]  # namespace and key of each that is distinct
        if len(namespaces) > 1:
            both = pa.array(space * len(blobs) + codes).dictionary_encode()
            codes = both.indices.to_numpy(zero_copy_only=False)
            spaces, texts = np.divmod(both.dictionary.to_numpy(zero_copy_only=False), max(1, len(blobs)))
            pairs = list(zip(spaces.tolist(), texts.tolist()))
        known = [namespace.keys for namespace in namespaces]
        streams = [known[number].get(blobs[text]) for number, text in pairs]
        owners: Ints | None = None
        if namespaces and (all_owners := namespaces[0].owners) is not None:
            owners = np.full(len(pairs), all_owners.own)
        refused: dict[Refusal, tuple[list[int], Refused]] = {}
        for place in [place for place, stream in enumerate(streams) if stream is None]:
            number, text = pairs[place]
            namespace, key = namespaces[number], blobs[text]
            streams[place] = NO_STREAM
            try:
                if key not in namespace.owner_of_key:
                    streams[place] = self._new_key(namespace, key)
            except Refused as error:
                refused.setdefault(error.reason, ([], error))[0].append(place)
            if owners is not None and key in namespace.owner_of_key:
                owners[place] = namespace.owner_of_key[key]
        found = np.array(streams, np.int64)
        self.seen[found[found != NO_STREAM]] = now
        return Resolved(
            found[codes],
            [(np.flatnonzero(np.isin(codes, places)), error) for places, error in refused.values()],
            None if owners is None else owners[codes],
        )

    def _new_key(self, namespace: Namespace, key: bytes) -> int:
        """Returns the stream of a key that is not known; NO_STREAM if another process keeps it."""
        config = self._config
        if len(key) > config.longest_labels:
            raise Refused(Refusal.LABELS, f"labels of {len(key)} bytes, at most {config.longest_labels} are taken")
        described = namespace.describe(key)
        self._check(described.labels)
        entity = entity_of(described.labels)
        if described.is_cumulative and namespace.owners is not None:
            owner = namespace.owners.of_series(described.metric, entity)
            if owner != namespace.owners.own:
                if len(namespace.owner_of_key) >= config.max_streams:
                    namespace.forget_keys()
                namespace.owner_of_key[key] = owner
                return NO_STREAM
        identity = described.metric, described.kind.value, entity  # texts only, which the garbage collector skips
        stream = namespace.streams.get(identity)
        if stream is None:
            stream = namespace.streams[identity] = self._new_stream(described, entity)
            if described.is_cumulative and self.on_cumulative is not None:
                self.on_cumulative(namespace, identity, stream)
        if len(namespace.keys) >= _MAX_SPELLINGS * (len(namespace.streams) + namespace.parts):
            namespace.forget_keys()
        namespace.keys[key] = stream
        return stream

    def _check(self, labels: Mapping[str, str]) -> None:
        config = self._config
        if len(labels) > config.max_labels:
            raise Refused(Refusal.LABELS, f"{len(labels)} labels, at most {config.max_labels} are taken")
        for name, value in labels.items():
            if len(name) > config.max_label_name or len(value) > config.max_label_value:
                raise Refused(
                    Refusal.LABELS,
                    f"label {name[:40]!r} has {len(name)} and its value {len(value)} characters, "
                    f"at most {config.max_label_name} and {config.max_label_value} are taken",
                )

    def _new_stream(self, described: SeriesDescription, entity: str) -> int:
        config = self._config
        if len(self) >= config.max_streams:
            raise Refused(
                Refusal.STREAMS,
                f"more than {config.max_streams} streams (intake.max_streams): "
                f"{described.metric[:100]!r} has a new one",
            )
        metric = self._metric_of.get((described.metric, described.kind))
        if metric is None:
            metric = self._new_metric(described)
        if entity not in metric.entities and len(metric.entities) >= config.max_series_per_metric:
            entity = OVERFLOW
            self.overflowed += 1
        metric.entities[entity] = metric.entities.get(entity, 0) + 1
        stream = self._free.pop() if self._free else self._used
        if stream == self._used:
            self._used += 1
            if stream == self.capacity:
                self._grow()
        self.metric[stream] = metric.id
        self.is_cumulative[stream] = described.is_cumulative
        self._entity[stream] = self._texts.add(entity)
        return stream

    def _new_metric(self, described: SeriesDescription) -> Metric:
        if self.metric_count >= self._config.max_metrics:
            raise Refused(
                Refusal.METRICS,
                f"more than {self._config.max_metrics} metrics (intake.max_metrics): "
                f"{described.metric[:100]!r} is not taken",
            )
        if fault := name_fault(described.metric, self._config.longest_name):
            raise Refused(Refusal.LABELS, fault)
        chunk = chunk_type(described.metric, described.kind)
        if self._unused:
            number = self._unused.pop().id
            metric = self.metrics[number] = Metric(number, chunk)
        else:
            metric = Metric(len(self.metrics), chunk)
            self.metrics.append(metric)
        self._metric_of[described.metric, described.kind] = metric
        return metric

    def _grow(self) -> None:
        more = len(self.metric)
        self.metric = np.append(self.metric, np.zeros(more, np.int32))
        self.is_cumulative = np.append(self.is_cumulative, np.zeros(more, bool))
        self.seen = np.append(self.seen, np.zeros(more))
        self._entity = np.append(self._entity, np.zeros(more, np.int32))

    def entities_of(self, streams: Ints) -> tuple[NDArray[np.int32], Any]:
        """Returns the entity of each point as a code, and the Arrow array that the codes point into."""
        return self._texts.encoded(self._entity[streams])

    def expire(self, namespaces: Iterable[Namespace], before: float) -> Ints:
        """Forgets streams that were last seen before that time; returns their numbers, which are free again."""
        used = np.zeros(self.capacity, bool)
        used[: self._used] = True
        used[self._free] = False
        gone = used & (self.seen < before)
        if not gone.any():
            return np.zeros(0, np.int64)
        for namespace in namespaces:
            namespace.forget(gone)
        numbers = np.flatnonzero(gone)
        for stream in numbers.tolist():
            entities, number = self.metrics[self.metric[stream]].entities, int(self._entity[stream])
            entity = self._texts[number]
            entities[entity] -= 1
            if not entities[entity]:
                del entities[entity]
            self._texts.release(number)
        self._free += numbers.tolist()
        for key, metric in list(self._metric_of.items()):
            if not metric.entities:
                del self._metric_of[key]
                self._unused.append(metric)
        return numbers
