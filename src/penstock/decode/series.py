"""Series: small numbers in place of labels, so that everything after this works on columns of numbers.

      raw key of a point (its labels, serialised) ──► stream ──► metric, entity
      thousands of points                             one number      one text, made once

A stream is what one sender calls a series: its own counters, its own resets. Several streams may share an entity (the
instances of one service), and add up there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints
from penstock.decode.config import IntakeConfig
from penstock.decode.outcome import Refusal
from penstock.decode.stream_homes import Homes
from penstock.decode.texts import Texts
from penstock.model.name import name_fault
from penstock.model.point import Chunk, Kind, chunk_type, entity_of

OVERFLOW = entity_of({"otel.metric.overflow": "true"})  # OpenTelemetry's name for the same

AWAY = -1_000_000  # and what is less: no stream of ours
_MOST_SPELLINGS = 8  # of each series' labels, in another order or with what we pass over: there may be any number
_RUN_KEY = 64  # bytes of a run's keys by which it is looked for: its last ones differ most
_SHORTEST_RUN = 8  # points for which it pays to remember them
_MOST_RUNS = 64  # of one namespace
_TRIES = 8  # runs that may prove useless before no more are remembered


class Refused(Exception):
    """A point, or all points of a stream, that we do not take; says why."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Described:
    """What a raw key means."""

    metric: str
    kind: Kind
    is_cumulative: bool
    labels: Mapping[str, str]


class Namespace:
    """Raw keys that mean streams of one sender's metric; `describe` is asked once for each, and may raise Refused."""

    __slots__ = ("away", "describe", "family", "homes", "keys", "run_hits", "runs", "streams")

    def __init__(self, describe: Callable[[bytes], Described], family: Any = None, homes: Homes | None = None) -> None:
        self.describe = describe
        self.family = family  # whose they are, where there are several
        self.homes = homes  # where each of them may have another one
        self.away = 0  # keys of streams that others keep: `AWAY` minus the number of their home
        self.keys: dict[bytes, int] = {}
        # The same labels in another order are another key, but the same stream.
        self.streams: dict[tuple[str, str, str], int] = {}
        self.runs: dict[tuple[int, bytes], _Run] = {}
        self.run_hits = 0

    def forget(self, gone: NDArray[np.bool_]) -> None:
        """Without the streams that are gone."""
        self.keys = {key: stream for key, stream in self.keys.items() if stream < 0 or not gone[stream]}
        self.streams = {key: stream for key, stream in self.streams.items() if not gone[stream]}
        self.runs = {}
        self.run_hits = 0

    def forget_keys(self) -> None:
        """Ask again what every key means."""
        self.keys = {}
        self.away = 0


class _Run(NamedTuple):
    """The points of one metric in one request, which mostly comes again with the same series in the same order."""

    keys: bytes
    lengths: bytes
    streams: Ints


class Metric:
    """One metric of one kind: the chunks that its points become, and its entities with how many streams have each."""

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
        self._metric_of: dict[tuple[str, Kind], Metric] = {}
        self._unused: list[Metric] = []  # whose series have all expired: their numbers are given to others
        self.overflowed = 0
        self._free: list[int] = []
        self._used = 0
        self.metric = np.zeros(1024, np.int32)
        self.is_cumulative = np.zeros(1024, bool)
        self.seen = np.zeros(1024)
        self._entity = np.zeros(1024, np.int32)
        self._texts = Texts()
        # Told of each new stream whose values depend on those before.
        self.on_cumulative: Callable[[Namespace, tuple[str, str, str], int], None] | None = None

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def metric_count(self) -> int:
        return len(self._metric_of)

    @property
    def capacity(self) -> int:
        """Greater than every number that is in use."""
        return len(self.metric)

    def resolve(
        self, namespaces: list[Namespace], which: Ints, keys: Any, now: float, bounds: Ints | None = None
    ) -> tuple[Ints, list[Refused]]:
        """The stream of each point; -n for one that was refused for the nth of the reasons returned, `AWAY` or less for
        one that another process keeps.

        `which` is the index of each point's namespace, `keys` an Arrow array of raw keys. `bounds` are where runs of
        points of one namespace start that may come again as they are, and where the last one ends.
        """
        if bounds is None:
            found, refusals = self._resolve(namespaces, which, keys)
        else:
            found, refusals = self._resolve_runs(namespaces, which, keys, bounds)
        self.seen[found[found >= 0]] = now
        return found, refusals

    def _resolve_runs(
        self, namespaces: list[Namespace], which: Ints, keys: Any, bounds: Ints
    ) -> tuple[Ints, list[Refused]]:
        """Runs that are known as they are; the others point by point."""
        _, places, texts = keys.buffers()
        offsets = np.frombuffer(places, np.int32)[keys.offset : keys.offset + len(keys) + 1]
        starts = offsets[bounds].tolist()
        text = memoryview(texts)
        found = np.empty(len(keys), np.int64)
        is_missing = np.zeros(len(keys), bool)
        fresh: list[tuple[Namespace, tuple[int, bytes], bytes, bytes, int, int]] = []
        owners = which[bounds[:-1]].tolist()
        for run, (first, last) in enumerate(pairwise(bounds.tolist())):
            namespace = namespaces[owners[run]]
            blob = bytes(text[starts[run] : starts[run + 1]])
            lengths = (offsets[first:last] - offsets[first]).tobytes()
            key = last - first, blob[-_RUN_KEY:]
            known = namespace.runs.get(key)
            if known is not None and known.keys == blob and known.lengths == lengths:
                found[first:last] = known.streams
                namespace.run_hits += 1
            else:
                is_missing[first:last] = True
                if last - first >= _SHORTEST_RUN and len(namespace.runs) < _TRIES + namespace.run_hits:
                    fresh.append((namespace, key, blob, lengths, first, last))
        missing = np.flatnonzero(is_missing)
        if not len(missing):
            return found, []
        some = keys if len(missing) == len(keys) else keys.take(pa.array(missing))
        found[missing], refusals = self._resolve(namespaces, which[missing], some)
        for namespace, key, blob, lengths, first, last in fresh:
            if len(namespace.runs) >= _MOST_RUNS:
                namespace.runs.clear()
                namespace.run_hits = 0
            if found[first:last].min() >= 0:
                namespace.runs[key] = _Run(blob, lengths, found[first:last].copy())
        return found, refusals

    def _resolve(self, namespaces: list[Namespace], which: Ints, keys: Any) -> tuple[Ints, list[Refused]]:
        encoded = keys.dictionary_encode()
        blobs = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        if len(namespaces) > 1:
            both = pa.array(which * len(blobs) + codes).dictionary_encode()
            codes = both.indices.to_numpy(zero_copy_only=False)
            spaces, texts = np.divmod(both.dictionary.to_numpy(zero_copy_only=False), max(1, len(blobs)))
            asked = zip(spaces.tolist(), texts.tolist())
        else:
            asked = zip([0] * len(blobs), range(len(blobs)))
        refusals: dict[Refusal, tuple[int, Refused]] = {}
        known = [namespace.keys for namespace in namespaces]
        pairs = list(asked)
        streams = [known[space].get(blobs[text]) for space, text in pairs]
        for place in [place for place, stream in enumerate(streams) if stream is None]:
            space, text = pairs[place]
            try:
                streams[place] = self._new_key(namespaces[space], blobs[text])
            except Refused as refused:
                streams[place], _ = refusals.setdefault(refused.reason, (-1 - len(refusals), refused))
        return np.array(streams, np.int64)[codes], [refused for _, refused in refusals.values()]

    def _new_key(self, namespace: Namespace, key: bytes) -> int:
        config = self._config
        if len(key) > config.longest_labels:
            raise Refused(Refusal.LABELS, f"labels of {len(key)} bytes, at most {config.longest_labels} are taken")
        described = namespace.describe(key)
        self._check(described.labels)
        entity = entity_of(described.labels)
        if described.is_cumulative and namespace.homes is not None:
            home = namespace.homes.of_series(described.metric, entity)
            if home != namespace.homes.own:
                if namespace.away >= config.max_streams:
                    namespace.forget_keys()
                namespace.away += 1
                namespace.keys[key] = AWAY - home
                return AWAY - home
        identity = described.metric, described.kind.value, entity  # of texts alone: the collector leaves it out
        stream = namespace.streams.get(identity)
        if stream is None:
            stream = namespace.streams[identity] = self._new_stream(described, entity)
            if described.is_cumulative and self.on_cumulative is not None:
                self.on_cumulative(namespace, identity, stream)
        if len(namespace.keys) - namespace.away >= _MOST_SPELLINGS * len(namespace.streams):
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

    def _new_stream(self, described: Described, entity: str) -> int:
        config = self._config
        if len(self) >= config.max_streams:
            raise Refused(Refusal.STREAMS, f"more than {config.max_streams} streams: this one is not known yet")
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

    def _new_metric(self, described: Described) -> Metric:
        if self.metric_count >= self._config.max_metrics:
            raise Refused(
                Refusal.METRICS,
                f"more than {self._config.max_metrics} metrics: {described.metric[:100]!r} is not taken",
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
        """The entity of each point, as a code and the texts that the codes stand for."""
        return self._texts.encoded(self._entity[streams])

    def expire(self, namespaces: Iterable[Namespace], before: float) -> Ints:
        """Forget what was last seen before that time; the numbers that are free again."""
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
