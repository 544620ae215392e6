"""Prometheus remote write 1.0 into columns.

    WriteRequest   { repeated TimeSeries timeseries = 1; repeated MetricMetadata metadata = 3 }
    TimeSeries     { repeated Label labels = 1; repeated Sample samples = 2; repeated Histogram histograms = 4 }
    Sample         { double value = 1; int64 timestamp = 2 }        milliseconds since the epoch
    MetricMetadata { MetricType type = 1; string metric_family_name = 2 }

A series' labels stay serialised: they are its key, decoded once. Whether it is a counter, its metadata says; where
there is none, its name does: Prometheus' own endings are `_total`, `_count`, `_sum` and `_bucket`.
"""

from collections.abc import Iterator

import numpy as np

from penstock.decode.column_scan import PADDING, Ints, MessageLayout, float64_at, scan, texts
from penstock.decode.group import Group, Rows
from penstock.decode.message_spans import locate_messages, repeated_messages
from penstock.decode.numbers import Numbers
from penstock.decode.outcome import Refusal
from penstock.decode.series import AWAY, Described, Namespace, Refused
from penstock.decode.stream_homes import SERIES, Homes
from penstock.model.name import name_fault
from penstock.model.point import Kind
from penstock.protobuf import fields

_METADATA = 0x1A
_TYPE, _FAMILY = 0x08, 0x12
_COUNTER, _GAUGE = 1, 2
_COUNTERS = (_COUNTER, 3, 5)  # and histograms and summaries, whose parts are counters
_SERIES = MessageLayout(repeated={0x0A: "labels", 0x12: "samples", 0x22: "histograms"})
_SAMPLE = MessageLayout(fixed={0x09: "value"}, varints={0x10: "time"})
_NAME = "__name__"
_ENDINGS = ("_total", "_count", "_sum", "_bucket")
_STALE = 0x7FF0000000000002  # the NaN that ends a series
_FAMILIES = 100_000  # whose types are remembered


class RemoteWriteReader:
    """Reads groups of remote writes, and remembers what their metadata said.

    Threads: one at a time.
    """

    def __init__(self, longest_name: int, homes: Homes | None = None) -> None:
        self._longest_name = longest_name
        self._homes = homes
        self.namespaces = {"remote write": Namespace(self._described, homes=homes)}
        self.types: dict[str, int] = {}

    def read(self, bodies: list[bytes], group: Group) -> Numbers:
        """The samples of all bodies that can be read."""
        starts: list[int] = []
        ends: list[int] = []
        counts = np.zeros(len(bodies), np.int64)
        base = 0
        for request, body in enumerate(bodies):
            before = len(starts)
            try:
                for tag, start, end in locate_messages(body, 0, len(body), base, starts, ends):
                    if tag == _METADATA:
                        self._learn(body, start, end)
                        self._tell(body[start:end], request, group)
                counts[request] = len(starts) - before
            except (ValueError, IndexError):
                group.account.fail(request, "not a WriteRequest")
                del starts[before:], ends[before:]
            base += len(body)
        blob = b"".join([*bodies, PADDING])
        requests = np.repeat(np.arange(len(bodies)), counts)
        return self._samples(blob, np.array(starts, np.int64), np.array(ends, np.int64), requests, group)

    def _samples(self, blob: bytes, starts: Ints, ends: Ints, requests: Ints, group: Group) -> Numbers:
        data = np.frombuffer(blob, np.uint8)
        series = scan(data, starts, ends, _SERIES)
        columns = series.columns
        fine = ~series.is_malformed & ~series.is_noncanonical
        owner, sample_starts, sample_ends = repeated_messages(
            data, np.where(fine, columns["samples"], 0), np.where(fine, columns["samples_end"], 0)
        )
        samples = scan(data, sample_starts, sample_ends, _SAMPLE)
        broken = ~fine
        broken[owner[samples.is_malformed]] = True
        for request in np.unique(requests[broken]).tolist():
            group.account.fail(request, "a series that is not a message, or not written as Prometheus does")
        failed = np.isin(requests, np.array(sorted(group.account.errors), np.int64))
        native = ~failed & (columns["histograms"] > 0)
        group.account.reject(
            requests[native], Refusal.UNSUPPORTED, "native histograms are not taken: send classic ones"
        )

        streams = np.full(len(starts), -1)
        asked = np.flatnonzero(~failed)
        keys = texts(data, columns["labels"][asked], columns["labels_end"][asked])
        streams[asked] = group.streams_of(
            list(self.namespaces.values()), np.zeros(len(asked), np.int64), keys, requests[asked]
        )
        streams[(streams <= AWAY) & (columns["samples"] == 0)] = -1  # which says nothing that another must know
        self._hand_on(blob, starts, ends, requests, streams, group)
        place = samples.columns["value"]
        values = np.where(place > 0, float64_at(data, place), 0.0)  # protobuf leaves out what is 0
        times = samples.columns["time"]
        timely = (times > 0) & (times <= group.latest // 1_000_000)
        taken = streams[owner] >= 0
        group.account.reject(
            requests[owner[taken & ~timely]], Refusal.TIME, "a sample without a time, or one far ahead"
        )
        taken &= timely & (values.view(np.uint64) != _STALE)
        owner = owner[taken]
        rows = Rows(requests[owner], streams[owner], times[taken] * 1_000_000, values[taken])
        return Numbers(rows, np.zeros(len(owner), np.int64))

    def _hand_on(self, blob: bytes, starts: Ints, ends: Ints, requests: Ints, streams: Ints, group: Group) -> None:
        """Put aside the series that other processes keep."""
        rows = np.flatnonzero(streams <= AWAY)
        if self._homes is None or not len(rows):
            return
        homes = AWAY - streams[rows]
        going = {pair: group.goes_to(*pair, self._homes) for pair in set(zip(homes.tolist(), requests[rows].tolist()))}
        for home, request, start, end in zip(
            homes.tolist(), requests[rows].tolist(), starts[rows].tolist(), ends[rows].tolist()
        ):
            if going[home, request]:
                group.elsewhere.add_field(home, request, SERIES, blob[start:end])
            else:  # it was handed to us by one that counts processes in another way: never silently
                group.account.reject_one(request, Refusal.FAILED, f"a series that process {home} keeps")
        streams[np.isin(requests, np.array(sorted(group.account.errors), np.int64))] = -1

    def forget_away(self) -> None:
        """Those that others keep are not seen here, and would not be forgotten."""
        for namespace in self.namespaces.values():
            if namespace.away:
                namespace.forget_keys()

    def _tell(self, metadata: bytes, request: int, group: Group) -> None:
        """Metadata is for everybody: it came over one connection, and says what all series of a name are."""
        if self._homes is not None and request not in group.settled:
            for home in range(self._homes.count):
                if home != self._homes.own and home not in self._homes.down:
                    group.elsewhere.add_field(home, request, _METADATA, metadata)

    def _learn(self, body: bytes, at: int, end: int) -> None:
        kind, family = 0, ""
        for tag, start, stop in fields(body, at, end):
            if tag == _TYPE:
                kind = start
            elif tag == _FAMILY:
                family = body[start:stop].decode("utf-8", "surrogateescape")
        if not kind or self.types.get(family) == kind or len(self.types) >= _FAMILIES:
            return
        if name_fault(family, self._longest_name):  # no series of it would be taken
            return
        self.types[family] = kind
        if (kind in _COUNTERS) is not family.endswith(_ENDINGS):
            # Its series may be known as what their names suggest: they are looked at again.
            for namespace in self.namespaces.values():
                namespace.forget_keys()

    def _described(self, key: bytes) -> Described:
        try:
            pairs = list(_labels(key))
        except (ValueError, IndexError) as error:
            raise Refused(Refusal.MALFORMED, f"labels that cannot be read: {error}") from None
        labels = {name: value for name, value in pairs if value}  # to Prometheus an empty label is none
        if len({name for name, _ in pairs}) < len(pairs):
            raise Refused(Refusal.LABELS, "a series with two labels of one name")
        name = labels.pop(_NAME, "")
        if not name:
            raise Refused(Refusal.MALFORMED, "a series without a name")
        is_counter = self._is_counter(name)
        return Described(name, Kind.COUNTER if is_counter else Kind.GAUGE, is_counter, labels)

    def _is_counter(self, name: str) -> bool:
        if name in self.types:
            return self.types[name] in _COUNTERS
        for ending in _ENDINGS:
            if name.endswith(ending):
                return self.types.get(name.removesuffix(ending)) != _GAUGE
        return False


def _labels(key: bytes) -> Iterator[tuple[str, str]]:
    for _, start, end in fields(key, 0, len(key)):
        name = value = ""
        for tag, first, last in fields(key, start, end):
            if tag == 0x0A:
                name = key[first:last].decode()
            elif tag == 0x12:
                value = key[first:last].decode()
        yield name, value
