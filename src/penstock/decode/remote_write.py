"""Prometheus remote write 1.0 into columns.

    WriteRequest   { repeated TimeSeries timeseries = 1; repeated MetricMetadata metadata = 3 }
    TimeSeries     { repeated Label labels = 1; repeated Sample samples = 2; repeated Histogram histograms = 4 }
    Sample         { double value = 1; int64 timestamp = 2 }        milliseconds since the epoch
    MetricMetadata { MetricType type = 1; string metric_family_name = 2; string help = 4; string unit = 5 }

A series' labels stay serialised: they are its key, decoded once. What it is follows from its name and metadata:

    <family>_bucket with the label le      a part of the distribution <family>: see `classic_histograms`
    <family> with counter as its type      a counter
    _total, _count, _sum, _bucket at the   a counter, unless its family is a gauge
      end, and nothing known of the name
    anything else                          a gauge: the quantiles of a summary, too
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.decode.classic_histograms import (
    BUCKET,
    LE,
    NO_BUCKETS,
    SUM,
    BucketSamples,
    ClassicHistograms,
    histogram_bound_of,
)
from penstock.decode.column_scan import PADDING, Ints, MessageLayout, decode_texts, float64_at, scan_body_columns
from penstock.decode.config import IntakeConfig
from penstock.decode.decode_context import DecodeContext
from penstock.decode.message_spans import locate_messages_in_body, repeated_messages_in_bodies
from penstock.decode.metric_news import MetricNews
from penstock.decode.outcome import PointRefusal, RefusedStreams
from penstock.decode.rows import DecodedNumbers, DecodedRows
from penstock.decode.series import NO_STREAM, SeriesNamespace
from penstock.decode.series_description import SeriesDescription
from penstock.decode.stream_owners import SERIES, StreamOwners
from penstock.model.name import metric_name_fault
from penstock.model.point import PointKind
from penstock.protobuf import fields

_METADATA = 0x1A
_TYPE, _FAMILY, _HELP, _UNIT = 0x08, 0x12, 0x22, 0x2A
_COUNTER, _GAUGE, _GAUGE_HISTOGRAM = 1, 2, 4
_SERIES = MessageLayout(repeated={0x0A: "labels", 0x12: "samples", 0x22: "histograms"})
_SAMPLE = MessageLayout(fixed={0x09: "value"}, varints={0x10: "time"})
_NAME = "__name__"
_COUNTED = "_count"
_ENDINGS = ("_total", _COUNTED, SUM, BUCKET)
_STALE = 0x7FF0000000000002  # the NaN that ends a series
_MAX_TYPES = 100_000  # of metric families that are remembered


class WrittenSamples(NamedTuple):
    """The samples of a group of remote writes."""

    numbers: DecodedNumbers
    buckets: BucketSamples
    not_numbers: DecodedRows  # L1 leaves them out and counts them


class RemoteWriteReader:
    """Reads groups of remote writes, and remembers the types that their metadata stated.

    Threads: one at a time.
    """

    def __init__(
        self, config: IntakeConfig, owners: StreamOwners | None = None, news: MetricNews | None = None
    ) -> None:
        self._config = config
        self._news = news or MetricNews()
        self._namespace = SeriesNamespace(self._described, owners=owners)
        self.namespaces = {"remote write": self._namespace}
        self.histograms = ClassicHistograms(self._namespace)
        self.types: dict[str, int] = {}

    def read(self, bodies: list[bytes], context: DecodeContext) -> WrittenSamples:
        """Returns the samples of all readable bodies."""
        starts: list[int] = []
        ends: list[int] = []
        counts = np.zeros(len(bodies), np.int64)
        base = 0
        for request, body in enumerate(bodies):
            before = len(starts)
            try:
                for tag, start, end in locate_messages_in_body(body, 0, len(body), base, starts, ends):
                    if tag == _METADATA:
                        self._learn(body, start, end)
                        self._broadcast(body[start:end], request, context)
                counts[request] = len(starts) - before
            except (ValueError, IndexError):
                context.outcomes.fail(request, "not a WriteRequest")
                del starts[before:], ends[before:]
            base += len(body)
        blob = b"".join([*bodies, PADDING])
        requests = np.repeat(np.arange(len(bodies)), counts)
        return self._samples(blob, np.array(starts, np.int64), np.array(ends, np.int64), requests, context)

    def _samples(self, blob: bytes, starts: Ints, ends: Ints, requests: Ints, context: DecodeContext) -> WrittenSamples:
        data = np.frombuffer(blob, np.uint8)
        series = scan_body_columns(data, starts, ends, _SERIES)
        columns = series.columns
        is_fine = ~series.is_malformed & ~series.is_noncanonical
        series_of, sample_starts, sample_ends = repeated_messages_in_bodies(
            data, np.where(is_fine, columns["samples"], 0), np.where(is_fine, columns["samples_end"], 0)
        )
        samples = scan_body_columns(data, sample_starts, sample_ends, _SAMPLE)
        is_broken = ~is_fine
        is_broken[series_of[samples.is_malformed]] = True
        for request in np.unique(requests[is_broken]).tolist():
            context.outcomes.fail(request, "a series that is not a message, or not written as Prometheus does")
        failed = np.isin(requests, np.array(sorted(context.outcomes.errors), np.int64))
        native = ~failed & (columns["histograms"] > 0)
        context.outcomes.reject(
            requests[native], PointRefusal.UNSUPPORTED, "native histograms are not taken: send classic ones"
        )

        asked = np.flatnonzero(~failed)
        keys = decode_texts(data, columns["labels"][asked], columns["labels_end"][asked])
        resolved = context.resolve([self._namespace], np.zeros(len(asked), np.int64), keys, requests[asked])
        self.histograms.register(context.table.capacity)
        streams = np.full(len(starts), NO_STREAM)
        streams[asked] = resolved.streams
        if context.parts is not None and resolved.owners is not None:
            owners = np.full(len(starts), context.parts.owners.own)
            owners[asked] = resolved.owners
            has_samples = columns["samples"] > 0  # a series without samples is nothing that its owner must know
            foreign = np.flatnonzero((owners != context.parts.owners.own) & has_samples)
            self._put_aside(blob, starts[foreign], ends[foreign], requests[foreign], owners[foreign], context)
            streams[np.isin(requests, np.array(sorted(context.outcomes.errors), np.int64))] = NO_STREAM
        place = samples.columns["value"]
        values = np.where(place > 0, float64_at(data, place), 0.0)  # protobuf leaves out what is 0
        times = samples.columns["time"]
        is_timely = (times > 0) & (times <= context.latest // 1_000_000)
        is_taken = streams[series_of] != NO_STREAM
        context.outcomes.reject(
            requests[series_of[is_taken & ~is_timely]], PointRefusal.TIME, "a sample without a time, or one far ahead"
        )
        is_taken &= is_timely
        if not is_taken.all():
            series_of, times, values = series_of[is_taken], times[is_taken], values[is_taken]
        times = times * 1_000_000
        is_number = np.isfinite(values)
        buckets = NO_BUCKETS
        if len(self.histograms):
            has_ended = values.view(np.uint64) == _STALE
            place_of = np.zeros(len(starts), np.int64)  # among those whose keys were asked for
            place_of[asked] = np.arange(len(asked))
            buckets, is_bucket = self.histograms.samples(
                requests[asked], streams[asked], keys, place_of[series_of], times, values, has_ended
            )
            is_number &= ~is_bucket
        else:
            is_bucket = np.zeros(len(values), bool)
        if is_number.all():
            numbers = DecodedRows(requests[series_of], streams[series_of], times, values)
            return WrittenSamples(DecodedNumbers(numbers, np.zeros_like(times)), buckets, numbers.take(slice(0, 0)))

        def chosen(samples: Ints) -> DecodedRows:
            series = series_of[samples]
            return DecodedRows(requests[series], streams[series], times[samples], values[samples])

        numbers = chosen(np.flatnonzero(is_number))
        not_numbers = chosen(np.flatnonzero(~is_number & ~is_bucket & (values.view(np.uint64) != _STALE)))
        context.outcomes.take(not_numbers.requests)
        return WrittenSamples(DecodedNumbers(numbers, np.zeros_like(numbers.times)), buckets, not_numbers)

    @staticmethod
    def _put_aside(blob: bytes, starts: Ints, ends: Ints, requests: Ints, owners: Ints, context: DecodeContext) -> None:
        """Adds series that other processes own to the parts for them."""
        assert context.parts is not None
        pairs = list(zip(owners.tolist(), requests.tolist()))
        is_foreign = {pair: context.is_foreign(*pair) for pair in set(pairs)}
        for (owner, request), start, end in zip(pairs, starts.tolist(), ends.tolist()):
            if is_foreign[owner, request]:
                context.parts.add_field(owner, request, SERIES, blob[start:end])
            else:  # the process that handed it over counts processes differently: never drop it silently
                context.outcomes.reject_one(request, PointRefusal.FAILED, f"a series that process {owner} keeps")

    def forget_owners(self) -> None:
        """Forgets the keys that other processes own: they are never seen here, so they do not expire."""
        self._namespace.owner_of_key.clear()

    @staticmethod
    def _broadcast(metadata: bytes, request: int, context: DecodeContext) -> None:
        """Adds metadata to the parts for all processes: it came over one connection, and concerns all series."""
        parts = context.parts
        if parts is None:
            return
        for process in range(parts.owners.count):
            if parts.is_foreign(process, request) and process not in parts.owners.unreachable:
                parts.add_field(process, request, _METADATA, metadata)

    def _learn(self, body: bytes, at: int, end: int) -> None:
        kind, family, unit, help_text = 0, "", b"", b""
        for tag, start, stop in fields(body, at, end):
            if tag == _TYPE:
                kind = start
            elif tag == _FAMILY:
                family = body[start:stop].decode("utf-8", "surrogateescape")
            elif tag == _HELP:
                help_text = body[start:stop]
            elif tag == _UNIT:
                unit = body[start:stop]
        for ending in ("", *_ENDINGS):
            name = (family + ending).encode("utf-8", "ignore")
            self._news.note(name, b"" if ending == _COUNTED else unit, help_text)
        if not kind or self.types.get(family) == kind or len(self.types) >= _MAX_TYPES:
            return
        if metric_name_fault(family, self._config.longest_name):  # all of its series are refused
            return
        names = [family, *(family + ending for ending in _ENDINGS)]
        before = [self._kind_of(name, has_bound=True) for name in names]
        self.types[family] = kind
        if before != [self._kind_of(name, has_bound=True) for name in names]:
            self._namespace.forget_keys()  # known series may be of the kind that their names suggest

    def _described(self, key: bytes) -> SeriesDescription:
        try:
            pairs = list(_labels(key))
        except (ValueError, IndexError) as error:
            raise RefusedStreams(PointRefusal.MALFORMED, f"labels that cannot be read: {error}") from None
        labels = {name: value for name, value in pairs if value}  # in Prometheus an empty label means none
        if len({name for name, _ in pairs}) < len(pairs):
            raise RefusedStreams(PointRefusal.LABELS, "a series with two labels of one name")
        name = labels.pop(_NAME, "")
        if not name:
            raise RefusedStreams(PointRefusal.MALFORMED, "a series without a name")
        bound = histogram_bound_of(labels)
        kind = self._kind_of(name, has_bound=bound is not None)
        if kind is PointKind.DISTRIBUTION:
            name = name.removesuffix(BUCKET)
            if len(self.histograms) >= self._config.max_streams:
                raise RefusedStreams(PointRefusal.STREAMS, f"more than {self._config.max_streams} series of buckets")
            del labels[LE]
            self.histograms.expect(key, name, bound, labels)
        elif kind is PointKind.COUNTER and name.endswith(SUM):
            self.histograms.expect(key, name.removesuffix(SUM), None, labels)
        return SeriesDescription(name, kind, kind is not PointKind.GAUGE, labels)

    def _kind_of(self, name: str, *, has_bound: bool) -> PointKind:
        if name in self.types:
            return PointKind.COUNTER if self.types[name] == _COUNTER else PointKind.GAUGE
        for ending in _ENDINGS:
            if not name.endswith(ending) or self.types.get(name.removesuffix(ending)) in (_GAUGE, _GAUGE_HISTOGRAM):
                continue
            return PointKind.DISTRIBUTION if has_bound and ending == BUCKET else PointKind.COUNTER
        return PointKind.GAUGE


def _labels(key: bytes) -> Iterator[tuple[str, str]]:
    for _, start, end in fields(key, 0, len(key)):
        name = value = ""
        for tag, first, last in fields(key, start, end):
            if tag == 0x0A:
                name = key[first:last].decode()
            elif tag == 0x12:
                value = key[first:last].decode()
        yield name, value
