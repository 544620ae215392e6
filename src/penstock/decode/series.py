"""Series: small numbers in place of labels, so that every later stage works on columns of numbers.

      raw key of a point (its labels, serialised) ──► stream ──► metric, entity
      thousands of points                             one number      one text, made once

A stream is what one sender calls a series: its own counters, its own resets. Several streams may share an entity (the
instances of one service), and add up there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints
from penstock.decode.config import IntakeConfig
from penstock.decode.metric_news import MetricNews
from penstock.decode.outcome import PointRefusal, RefusedStreams
from penstock.decode.rules import RuleBook
from penstock.decode.series_description import SeriesDescription
from penstock.decode.stream_owners import StreamOwners
from penstock.decode.stream_quotas import StreamSenders, widest_label
from penstock.decode.text_dictionary import SeriesTextDictionary
from penstock.model.metric_description import MetricDescription
from penstock.model.name import metric_name_fault
from penstock.model.point import TYPES, Chunk, PointKind, chunk_type, entity_of

OVERFLOW = entity_of({"otel.metric.overflow": "true"})  # OpenTelemetry's name for the same

NO_STREAM = -1  # in a column of streams: refused, or kept by another process, or not looked up yet
_OVERFLOW_SHARE = 10  # of `max_streams`, as many cumulative streams more may be added up in overflow series
_LEAST_OVERFLOW = 10
_MAX_DROPPED = 1000  # keys of a metric that a rule drops
_MAX_SPELLINGS = 8  # of each series' labels, in another order or with attributes that are left out


class SeriesNamespace:
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
class ResolvedStreams:
    """What became of the keys of a column of points."""

    streams: Ints
    """The stream of each point, or NO_STREAM."""
    refused: list[tuple[Ints, RefusedStreams]]
    """The points that were refused, by reason."""
    owners: Ints | None = None
    """The process that keeps each point's stream; None where the namespaces have no owners."""
    overflowed: tuple[Ints, str] | None = None
    """The points of series that are new and went to an overflow series, and the last such metric's message."""


class Metric:
    """One metric of one kind: the type of its chunks, and its entities with the number of streams of each."""

    __slots__ = ("_widest", "chunk", "entities", "id", "streams")

    def __init__(self, number: int, chunk: type[Chunk]) -> None:
        self.id = number
        self.chunk = chunk
        self.entities: dict[str, int] = {}
        self.streams = 0
        self._widest: str | None = None

    @property
    def name(self) -> str:
        return self.chunk.metric

    @property
    def widest(self) -> str:
        """The label with the most values, as of when it was first asked for."""
        if self._widest is None:
            self._widest = widest_label(self.entities)
        return self._widest


class KnownSeries:
    """All streams that are known, by number.

    Threads: one at a time.
    """

    def __init__(self, config: IntakeConfig, news: MetricNews | None = None) -> None:
        self._config = config
        self.metrics: list[Metric] = []
        self.news = news or MetricNews()
        self.renamed: dict[str, str] = {}  # what a rule calls metrics, by the names that they came with
        self._metric_of: dict[tuple[str, PointKind], Metric] = {}
        self._unused: list[Metric] = []  # all of their series have expired: their numbers are free
        self.overflowed = 0  # series
        self.rules = RuleBook(config.rules)
        self._senders = StreamSenders()
        self._in_overflow = 0  # cumulative streams; they take no places of the others
        self._overflow_message = self._greatest = ""
        self._free: list[int] = []
        self._used = 0
        self.metric = np.zeros(1024, np.int32)
        self.is_cumulative = np.zeros(1024, bool)
        self.seen = np.zeros(1024)
        self._entity = np.zeros(1024, np.int32)
        self._texts = SeriesTextDictionary()
        # Called for each new stream whose values depend on earlier ones.
        self.on_cumulative: Callable[[SeriesNamespace, tuple[str, str, str], int], None] | None = None

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def metric_count(self) -> int:
        return len(self._metric_of)

    @property
    def capacity(self) -> int:
        """The length of the columns by stream: greater than every number in use."""
        return len(self.metric)

    def resolve(
        self,
        namespaces: list[SeriesNamespace],
        space: Ints,
        keys: Any,
        now: float,
        requests: Ints | None = None,
        senders: Sequence[str] = (),
    ) -> ResolvedStreams:
        """Looks up the stream of each point, and makes the streams that are new; each distinct key is looked up once.

        `space` is the index of each point's namespace, `keys` an Arrow array of raw keys, `requests` the request of
        each point, of which `senders` has the senders.
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
        refused: dict[PointRefusal, tuple[list[int], RefusedStreams]] = {}
        new = [place for place, stream in enumerate(streams) if stream is None]
        has_senders = bool(new) and requests is not None and len(senders) > 0
        firsts = np.unique(codes, return_index=True)[1] if has_senders else None
        overflowed: list[int] = []
        self._greatest = ""
        for place in new:
            number, text = pairs[place]
            namespace, key = namespaces[number], blobs[text]
            streams[place] = NO_STREAM
            try:
                if key not in namespace.owner_of_key:
                    before = self.overflowed
                    sender = senders[requests[firsts[place]]] if firsts is not None and requests is not None else ""
                    streams[place] = self._new_key(namespace, key, sender)
                    if self.overflowed > before:
                        overflowed.append(place)
            except RefusedStreams as error:
                refused.setdefault(error.reason, ([], error))[0].append(place)
            if owners is not None and key in namespace.owner_of_key:
                owners[place] = namespace.owner_of_key[key]
        found = np.array(streams, np.int64)
        if self.rules.rules:
            self.rules.dropped += self._count_dropped(namespaces, pairs, blobs, codes)
        self.seen[found[found != NO_STREAM]] = now
        return ResolvedStreams(
            found[codes],
            [(np.flatnonzero(np.isin(codes, places)), error) for places, error in refused.values()],
            None if owners is None else owners[codes],
            (np.flatnonzero(np.isin(codes, overflowed)), self._overflow_message) if overflowed else None,
        )

    @staticmethod
    def _count_dropped(
        namespaces: list[SeriesNamespace], pairs: Sequence[tuple[int, int]], blobs: Sequence[bytes], codes: Ints
    ) -> int:
        """Returns how many points are of series that a rule drops: only their keys are known to have no stream."""
        is_dropped = [namespaces[number].keys.get(blobs[text]) == NO_STREAM for number, text in pairs]
        return int(np.array(is_dropped, bool)[codes].sum())

    def _new_key(self, namespace: SeriesNamespace, key: bytes, sender: str) -> int:
        """Returns the stream of a key that is not known; NO_STREAM if another process keeps it, or a rule drops it."""
        config = self._config
        if len(key) > config.longest_labels:
            raise RefusedStreams(
                PointRefusal.LABELS, f"labels of {len(key)} bytes, at most {config.longest_labels} are taken"
            )
        described = namespace.describe(key)
        changed = self.rules.apply(described)
        if changed is not None:
            self._check(changed.labels)
        entity = entity_of(described.labels)  # as it came: what a rule adds up are streams of their own
        if described.is_cumulative and namespace.owners is not None:
            owner = namespace.owners.of_series(described.metric, entity)
            if owner != namespace.owners.own:
                if len(namespace.owner_of_key) >= config.max_streams:
                    namespace.forget_keys()
                namespace.owner_of_key[key] = owner
                return NO_STREAM
        identity = described.metric, described.kind.value, entity  # texts only, which the garbage collector skips
        stream = namespace.streams.get(identity)
        if changed is None:
            stream = NO_STREAM
        elif stream is None:
            shown = entity_of(changed.labels) if changed is not described else entity
            if changed.metric != described.metric:
                self.renamed[described.metric] = changed.metric
            if self._overflows(changed, shown):
                shown = OVERFLOW
                if not described.is_cumulative:  # those that add up without a memory share one stream
                    identity = changed.metric, changed.kind.value, OVERFLOW
                    stream = namespace.streams.get(identity)
            if stream is None:
                stream = namespace.streams[identity] = self._new_stream(changed, shown, sender)
                if described.is_cumulative and self.on_cumulative is not None:
                    self.on_cumulative(namespace, identity, stream)
        most = _MAX_SPELLINGS * (len(namespace.streams) + namespace.parts) or _MAX_DROPPED
        if len(namespace.keys) >= most:
            namespace.forget_keys()
        namespace.keys[key] = stream
        return stream

    def _overflows(self, described: SeriesDescription, entity: str) -> bool:
        """Says whether the metric has all the series that it may have; the series is counted then."""
        most, metric = self._config.max_series_per_metric, self._metric_of.get((described.metric, described.kind))
        if metric is None or entity in metric.entities or len(metric.entities) < most:
            return False
        self.overflowed += 1
        self._overflow_message = (
            f"metric {metric.name[:100]!r} has more than {most} series "
            f"(intake.max_series_per_metric), most by label {metric.widest!r}: new ones are added up in one"
        )
        return True

    def _check(self, labels: Mapping[str, str]) -> None:
        config = self._config
        if len(labels) > config.max_labels:
            raise RefusedStreams(PointRefusal.LABELS, f"{len(labels)} labels, at most {config.max_labels} are taken")
        for name, value in labels.items():
            if len(name) > config.max_label_name or len(value) > config.max_label_value:
                raise RefusedStreams(
                    PointRefusal.LABELS,
                    f"label {name[:40]!r} has {len(name)} and its value {len(value)} characters, "
                    f"at most {config.max_label_name} and {config.max_label_value} are taken",
                )

    def _check_quotas(self, described: SeriesDescription, entity: str, sender: str) -> None:
        """Raises RefusedStreams if a new stream would take the places of others."""
        config = self._config
        if entity == OVERFLOW and described.is_cumulative:
            if self._in_overflow >= max(_LEAST_OVERFLOW, config.max_streams // _OVERFLOW_SHARE):
                raise RefusedStreams(
                    PointRefusal.QUOTA, f"{self._overflow_message}, and too many of these are cumulative"
                )
            return
        if len(self) - self._in_overflow >= config.max_streams:
            raise RefusedStreams(
                PointRefusal.STREAMS, f"{described.metric[:100]!r} has one more than {self._describe_greatest()}"
            )
        metric, most = self._metric_of.get((described.metric, described.kind)), config.streams_per_metric
        if metric is not None and metric.streams >= most:
            raise RefusedStreams(
                PointRefusal.QUOTA,
                f"metric {metric.name[:100]!r} has {metric.streams} streams (intake.max_streams_per_metric), "
                f"most by label {metric.widest!r}",
            )
        if sender and self._senders.streams_of(sender) >= config.streams_per_sender:
            raise RefusedStreams(
                PointRefusal.QUOTA,
                f"sender {sender!r} has {config.streams_per_sender} streams (intake.max_streams_per_sender): "
                f"{described.metric[:100]!r} has one more",
            )

    def _describe_greatest(self) -> str:
        if not self._greatest:  # once for a group, however many are refused
            greatest = max(self.metrics, key=lambda metric: metric.streams)
            self._greatest = (
                f"{self._config.max_streams} streams (intake.max_streams); most are of {greatest.name[:100]!r} by "
                f"label {greatest.widest!r}, most are of sender {self._senders.greatest()!r}"
            )
        return self._greatest

    def _new_stream(self, described: SeriesDescription, entity: str, sender: str) -> int:
        self._check_quotas(described, entity, sender)
        metric = self._metric_of.get((described.metric, described.kind))
        if metric is None:
            metric = self._new_metric(described)
        metric.streams += 1
        self._in_overflow += described.is_cumulative and entity == OVERFLOW
        metric.entities[entity] = metric.entities.get(entity, 0) + 1
        stream = self._free.pop() if self._free else self._used
        if stream == self._used:
            self._used += 1
            if stream == self.capacity:
                self._grow()
        self.metric[stream] = metric.id
        self.is_cumulative[stream] = described.is_cumulative
        self._entity[stream] = self._texts.add(entity)
        self._senders.add(stream, sender)
        return stream

    def _new_metric(self, described: SeriesDescription) -> Metric:
        if self.metric_count >= self._config.max_metrics:
            raise RefusedStreams(
                PointRefusal.METRICS,
                f"{described.metric[:100]!r} is one more than {self._config.max_metrics} metrics (intake.max_metrics)",
            )
        if fault := metric_name_fault(described.metric, self._config.longest_name):
            raise RefusedStreams(PointRefusal.LABELS, fault)
        chunk = chunk_type(described.metric, described.kind)
        if self._unused:
            number = self._unused.pop().id
            metric = self.metrics[number] = Metric(number, chunk)
        else:
            metric = Metric(len(self.metrics), chunk)
            self.metrics.append(metric)
        self._metric_of[described.metric, described.kind] = metric
        self.news.add(described.metric, MetricDescription(type=TYPES[described.kind]))
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

    def expire(self, namespaces: Iterable[SeriesNamespace], before: float) -> Ints:
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
            metric, number = self.metrics[self.metric[stream]], int(self._entity[stream])
            entities, entity = metric.entities, self._texts[number]
            metric.streams -= 1
            self._in_overflow -= bool(self.is_cumulative[stream]) and entity == OVERFLOW
            entities[entity] -= 1
            if not entities[entity]:
                del entities[entity]
            self._texts.release(number)
        self._senders.forget(numbers)
        self._free += numbers.tolist()
        for key, metric in list(self._metric_of.items()):
            if not metric.entities:
                del self._metric_of[key]
                self._unused.append(metric)
        return numbers
