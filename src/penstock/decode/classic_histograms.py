"""Classic histograms of Prometheus, put together from their series.

    foo_bucket{le="0.1"}, …, foo_bucket{le="+Inf"}, foo_sum   ──►   one point of the distribution foo

The series of one scrape come in any order and in several requests. Their samples wait here until those of one time are
all there. They are totals: a point that never becomes whole is contained in the next one that does.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from penstock.decode.bucket_rows import BucketEdges, bucket_rows, histogram_bucket_shapes
from penstock.decode.column_scan import Ints
from penstock.decode.decode_context import DecodeContext
from penstock.decode.deltas import Deltas, Floats, Mask, grown_delta_column
from penstock.decode.distributions import HistogramTotals, no_histogram_rows
from penstock.decode.histogram_deltas import HistogramDeltas
from penstock.decode.rows import DecodedRows
from penstock.decode.series import NO_STREAM, SeriesNamespace
from penstock.model.point import PointKind, entity_of

BUCKET, SUM, LE = "_bucket", "_sum", "le"
_OF_SUM = -math.inf  # in a column of bounds: the sample is the sum
_PATIENCE = 300.0  # seconds after which a series that does not come any more is no longer waited for
_MOST_WAITING = 100  # points of one histogram that are not whole: a sender that works off a backlog may be so far apart
_LARGEST = float(1 << 62)  # differences of such counts still fit


def histogram_bound_of(labels: Mapping[str, str]) -> float | None:
    """Returns the upper bound of a bucket's series; None if the series is no bucket."""
    try:
        bound = float(labels[LE])
    except (KeyError, ValueError):
        return None
    return None if math.isnan(bound) or bound == -math.inf else bound


@dataclass(frozen=True, slots=True)
class BucketSamples:
    """Samples of the series that histograms are made of."""

    requests: Ints
    streams: Ints  # of the histogram, not of the series
    times: Ints
    bounds: Floats
    values: Floats

    def take(self, rows: Ints) -> "BucketSamples":
        return BucketSamples(*(getattr(self, name)[rows] for name in self.__slots__))

    @staticmethod
    def join(pieces: "list[BucketSamples]") -> "BucketSamples":
        return BucketSamples(
            *(np.concatenate([getattr(piece, name) for piece in pieces]) for name in BucketSamples.__slots__)
        )


_NONE = np.zeros(0, np.int64)
NO_BUCKETS = BucketSamples(_NONE, _NONE, _NONE, np.zeros(0), np.zeros(0))


class _NewSeries(NamedTuple):
    """A series that was described in this group, and the histogram that it is a part of."""

    key: bytes
    family: str
    bound: float
    labels: Mapping[str, str]


class ClassicHistograms:
    """Knows which series each histogram is made of, and keeps the samples of points that are not whole.

    Threads: one at a time.
    """

    def __init__(self, namespace: SeriesNamespace) -> None:
        self._namespace = namespace
        self._new: list[_NewSeries] = []
        self._bound: dict[bytes, float] = {}  # of the series with that key
        self._bounds: dict[int, set[float]] = {}  # of each histogram
        self._waiting: dict[int, dict[int, dict[float, float]]] = {}  # by histogram, time and bound
        self._waits_since: dict[int, float] = {}
        self._is_histogram = np.zeros(1024, bool)
        # How many series a whole point has; 0 until a second time is seen, since the first may still come in pieces.
        self._expected = np.zeros(1024, np.int64)
        self._histogram_of_sum = np.full(1024, NO_STREAM)  # by the sum's own stream
        self._early_sums: dict[int, int] = {}  # of new histograms: a sum that came before the buckets is a counter yet

    def __len__(self) -> int:
        """Returns how many series of buckets are known."""
        return len(self._bound)

    # -- series ------------------------------------------------------------------------------------------------------

    def expect(self, key: bytes, family: str, bound: float | None, labels: Mapping[str, str]) -> None:
        """Notes a series that is being described: a bucket, or without a bound what may be a histogram's sum."""
        self._new.append(_NewSeries(key, family, _OF_SUM if bound is None else bound, labels))
        self._namespace.parts += bound is not None

    def register(self, capacity: int) -> None:
        """Joins the series that were described to their histograms, now that they have streams."""
        if len(self._is_histogram) < capacity:
            self._is_histogram = grown_delta_column(self._is_histogram, capacity)
            self._expected = grown_delta_column(self._expected, capacity)
            more = np.full(capacity - len(self._histogram_of_sum), NO_STREAM)
            self._histogram_of_sum = np.append(self._histogram_of_sum, more)
        streams = self._namespace.streams
        for key, family, bound, labels in self._new:
            entity = entity_of(labels)  # has no streams if another process keeps them
            histogram = streams.get((family, PointKind.DISTRIBUTION.value, entity))
            total = streams.get((family + SUM, PointKind.COUNTER.value, entity))
            if bound != _OF_SUM and histogram is not None:
                self._bound[key] = bound
                self._is_histogram[histogram] = True
                self._add(histogram, bound)
            if histogram is not None and total is not None:
                self._histogram_of_sum[total] = histogram
                self._early_sums[histogram] = total
                self._add(histogram, _OF_SUM)
        self._new.clear()

    def _add(self, histogram: int, bound: float) -> None:
        self._bounds.setdefault(histogram, set()).add(bound)
        self._count(histogram)

    def _count(self, histogram: int) -> None:
        if self._expected[histogram]:
            self._expected[histogram] = len(self._bounds[histogram])

    def samples(
        self, requests: Ints, streams: Ints, keys: pa.Array, series_of: Ints, times: Ints, values: Floats, ended: Mask
    ) -> tuple[BucketSamples, Mask]:
        """Returns the samples that histograms are made of, and says which are those of buckets.

        `streams` and `keys` are by series, the others by sample. `ended` are marks that a series has ended.
        """
        is_bucket_series = self._is_histogram[streams] & (streams != NO_STREAM)
        bounds = np.full(len(streams), np.nan)
        places = np.flatnonzero(is_bucket_series)
        bounds[places] = [self._bound[key] for key in keys.take(pa.array(places)).to_pylist()]
        histograms = np.where(is_bucket_series, streams, NO_STREAM)
        sums = np.where(streams == NO_STREAM, NO_STREAM, self._histogram_of_sum[streams])
        is_sum = sums != NO_STREAM
        bounds[is_sum], histograms[is_sum] = _OF_SUM, sums[is_sum]

        is_part = histograms[series_of] != NO_STREAM
        for series in np.unique(series_of[is_part & ended]).tolist():
            self._end(keys[series].as_py(), int(histograms[series]), float(bounds[series]))
        rows = np.flatnonzero(is_part & ~ended & np.isfinite(values))
        series = series_of[rows]
        found = BucketSamples(requests[series], histograms[series], times[rows], bounds[series], values[rows])
        return found, is_bucket_series[series_of]

    def _end(self, key: bytes, histogram: int, bound: float) -> None:
        """A series has ended: points without it are whole. If it comes again, it is described anew."""
        self._namespace.keys.pop(key, None)
        self._namespace.parts -= self._bound.pop(key, None) is not None
        if histogram in self._bounds:
            self._bounds[histogram].discard(bound)
            for values in self._waiting.get(histogram, {}).values():
                values.pop(bound, None)
            self._count(histogram)

    def forget(self, gone: Ints) -> None:
        """Forgets streams that have expired."""
        some = gone[gone < len(self._is_histogram)]
        self._is_histogram[some] = False
        self._expected[some] = 0
        self._histogram_of_sum[some] = NO_STREAM
        self._histogram_of_sum[np.isin(self._histogram_of_sum, some)] = NO_STREAM
        for histogram in gone.tolist():
            for known in (self._bounds, self._waiting, self._waits_since, self._early_sums):
                known.pop(histogram, None)
        self._bound = {key: bound for key, bound in self._bound.items() if key in self._namespace.keys}
        self._namespace.parts = len(self._bound)

    # -- points ------------------------------------------------------------------------------------------------------

    def rows(
        self, samples: BucketSamples, context: DecodeContext, deltas: HistogramDeltas, numbers: Deltas
    ) -> DecodedRows:
        """Returns the increments of the points that are whole now; the other samples wait.

        `numbers` are the deltas of counters, which sums are, too.
        """
        context.outcomes.take(samples.requests)
        deltas.clocks.ensure(context.table.capacity)
        order = np.lexsort((samples.bounds, samples.times, samples.streams))
        samples = samples.take(order)
        streams, times, bounds = samples.streams, samples.times, samples.bounds
        is_next = (streams[1:] != streams[:-1]) | (times[1:] != times[:-1])
        is_last = np.append(is_next | (bounds[1:] != bounds[:-1]), np.ones(min(1, len(streams)), bool))
        if not is_last.all():  # a sample that came twice
            samples = samples.take(np.flatnonzero(is_last))
            streams, times, bounds = samples.streams, samples.times, samples.bounds
            is_next = (streams[1:] != streams[:-1]) | (times[1:] != times[:-1])
        starts = np.concatenate([[0], np.flatnonzero(is_next) + 1])[: len(streams)]
        lengths = np.diff(np.append(starts, len(streams)))
        ends = starts + lengths - 1
        is_whole = (lengths == self._expected[streams[ends]]) & np.isposinf(bounds[ends])
        is_whole &= ~np.isin(streams[ends], list(self._waiting))  # what waits may be older, and whole with these
        whole = samples.take(np.flatnonzero(np.repeat(is_whole, lengths)))
        if not is_whole.all():
            rest = np.flatnonzero(~np.repeat(is_whole, lengths))
            late = times[rest] <= deltas.clocks.last[streams[rest]]
            completed = self._complete(samples.take(rest[~late]), context, numbers)
            if completed is not None:
                whole = BucketSamples.join([whole, completed])
        if not len(whole.streams):
            return no_histogram_rows()
        self._drop_older(whole)
        return _increments(whole, context, deltas)

    def _complete(self, samples: BucketSamples, context: DecodeContext, numbers: Deltas) -> BucketSamples | None:
        """Adds samples to those that wait; returns the points that became whole."""
        request_of: dict[int, int] = {}
        given = (samples.requests, samples.streams, samples.times, samples.bounds, samples.values)
        for request, histogram, time, bound, value in zip(*(column.tolist() for column in given)):
            self._waiting.setdefault(histogram, {}).setdefault(time, {})[bound] = value
            request_of[histogram] = request
        found = []
        for histogram, request in request_of.items():
            self._add_early_sum(histogram, numbers)
            for time, values in self._whole_points(histogram, context.now):
                context.undos.append(partial(self._put_back, histogram, time, values))
                bounds = sorted(values)
                found += [(request, histogram, time, bound, values[bound]) for bound in bounds]
        if not found:
            return None
        requests, histograms, times, of_bounds, of_values = zip(*found)
        columns = requests, histograms, times
        of_requests, of_histograms, of_times = (np.array(column, np.int64) for column in columns)
        return BucketSamples(of_requests, of_histograms, of_times, np.array(of_bounds), np.array(of_values))

    def _add_early_sum(self, histogram: int, numbers: Deltas) -> None:
        if (total := self._early_sums.get(histogram)) is not None:
            time, value = numbers.last_point(total)
            if time in self._waiting[histogram]:
                self._waiting[histogram][time].setdefault(_OF_SUM, value)
            if self._expected[histogram]:
                del self._early_sums[histogram]

    def _whole_points(self, histogram: int, now: float) -> Iterator[tuple[int, dict[float, float]]]:
        points, bounds = self._waiting[histogram], self._bounds.setdefault(histogram, set())
        for values in points.values():
            bounds |= values.keys()  # one that had ended may be there again
        if len(points) > 1 or self._expected[histogram]:
            self._expected[histogram] = len(bounds)
        if now - self._waits_since.setdefault(histogram, now) > _PATIENCE:
            bounds &= set().union(*points.values())
            self._count(histogram)
        while len(points) > _MOST_WAITING:
            del points[min(points)]
        if self._expected[histogram] and math.inf in bounds:
            for time in sorted(points):
                if bounds <= points[time].keys():
                    yield time, points.pop(time)

    def _put_back(self, histogram: int, time: int, values: dict[float, float]) -> None:
        """Makes a point wait again whose increments were not taken: only some of its samples come again."""
        self._waiting.setdefault(histogram, {}).setdefault(time, {}).update(values)

    def _drop_older(self, whole: BucketSamples) -> None:
        """Drops what waits for points that later ones contain."""
        if not self._waiting:
            return
        order = np.argsort(whole.times, kind="stable")
        newest = dict(zip(whole.streams[order].tolist(), whole.times[order].tolist()))
        for histogram in self._waiting.keys() & newest.keys():
            left = {time: values for time, values in self._waiting[histogram].items() if time > newest[histogram]}
            self._waits_since.pop(histogram, None)
            if left:
                self._waiting[histogram] = left
            else:
                del self._waiting[histogram]


def _increments(whole: BucketSamples, context: DecodeContext, deltas: HistogramDeltas) -> DecodedRows:
    """Returns what whole points add to the ones before them, a row for each bucket. A point's samples are in order."""
    is_first = np.ones(len(whole.streams), bool)
    is_first[1:] = (whole.streams[1:] != whole.streams[:-1]) | (whole.times[1:] != whole.times[:-1])
    firsts = np.flatnonzero(is_first)
    is_sum = np.isneginf(whole.bounds)
    has_sum = is_sum[firsts]
    sums = np.where(has_sum, whole.values[firsts], np.nan)
    buckets = np.flatnonzero(~is_sum)
    lengths = np.diff(np.append(firsts, len(is_first))) - has_sum
    offsets = np.cumsum(lengths) - lengths
    high, totals = whole.bounds[buckets], np.rint(np.clip(whole.values[buckets], 0.0, _LARGEST)).astype(np.int64)
    shapes = histogram_bucket_shapes(high, offsets, lengths) ^ has_sum
    _, places, index = np.unique(shapes, return_index=True, return_inverse=True)
    lists = [high[offsets[place] : offsets[place] + lengths[place] - 1] for place in places.tolist()]
    requests, streams, times = whole.requests[firsts], whole.streams[firsts], whole.times[firsts]
    unknown = np.full(len(streams), np.nan)
    changed = deltas.increments(
        streams,
        times,
        np.zeros_like(times),
        np.nan_to_num(sums),
        lengths,
        totals,
        shapes,
        unknown,
        unknown,
        context.table.capacity,
    )
    context.undos.append(partial(deltas.undo, changed.undo))
    kept = changed.rows
    stated = np.where(has_sum[kept], changed.sums, np.nan)
    of_points = HistogramTotals(
        requests[kept],
        streams[kept],
        times[kept],
        stated,
        unknown[kept],
        unknown[kept],
        changed.is_least,
        changed.is_greatest,
    )
    counts = _counts(changed.counts, lengths[kept])
    edges = BucketEdges(lists, index)
    return bucket_rows(of_points, lengths[kept], counts, edges, index[kept], context)


def _counts(totals: Ints, lengths: Ints) -> Ints:
    """Returns what each bucket holds, where `totals` are those up to its bound."""
    counts = np.diff(totals, prepend=0)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    counts[starts] = totals[starts]
    if len(counts) and counts.min() < 0:  # a client that does not read its buckets at one moment
        for start, end in zip(starts.tolist(), ends.tolist()):
            upto = np.minimum.accumulate(totals[start:end][::-1])[::-1]
            counts[start:end] = np.diff(upto, prepend=0)
    return counts
