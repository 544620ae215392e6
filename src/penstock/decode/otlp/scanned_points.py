"""OTLP points that were located in a group of requests: where their fields are, and which streams they belong to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, decode_texts, float64_at, uint64_at
from penstock.decode.decode_context import DecodeContext
from penstock.decode.otlp.walk import OtlpFamily
from penstock.decode.outcome import PointRefusal
from penstock.decode.rows import DecodedNumbers, DecodedRows
from penstock.decode.series import NO_STREAM, SeriesNamespace

_NO_VALUE = 1  # the flag of a point that only says that its stream has ended

Mask = NDArray[np.bool_]
Learn = Callable[["ScannedOtlpPoints", Ints], None]


@dataclass(frozen=True, slots=True)
class ScannedOtlpPoints:
    """Points of one layout: their fields as `scan` gives them, and their streams."""

    data: Bytes
    fields: dict[str, Ints]
    requests: Ints
    metrics: Ints  # the number of each point's metric in its group, ascending
    streams: Ints  # NO_STREAM where it has to be looked up
    families: list[OtlpFamily]
    namespaces: list[SeriesNamespace]
    family: Ints  # the index of each point's family, where its stream has to be looked up
    learn: Learn
    """Called with the stream of every point, NO_STREAM for those that were not taken."""

    def take(self, rows: Any) -> "ScannedOtlpPoints":
        return replace(
            self,
            fields={name: column[rows] for name, column in self.fields.items()},
            requests=self.requests[rows],
            metrics=self.metrics[rows],
            streams=self.streams[rows],
            family=self.family[rows],
        )

    def keys(self) -> Any:
        """Returns the serialised attributes of every point as an Arrow array; empty where its stream is known."""
        return decode_texts(self.data, self.fields["attributes"], self.fields["attributes_end"])

    def times(self, context: DecodeContext) -> tuple[Ints, Mask]:
        """Returns the time of every point, and which points have a value and a time that is taken."""
        at = self.fields["time"]
        times = np.where(at > 0, uint64_at(self.data, at), np.uint64(0))
        is_timely = (times > 0) & (times <= np.uint64(context.latest))
        has_value = self.fields["flags"] & _NO_VALUE == 0
        if not is_timely.all():
            context.outcomes.reject(
                self.requests[~is_timely & has_value], PointRefusal.TIME, "a point without a time, or one far ahead"
            )
        return times.view(np.int64), is_timely & has_value

    def resolve_streams(self, is_valid: Mask, context: DecodeContext, keys: Any = None) -> Ints:
        """Returns the stream of each point, NO_STREAM for those that are not valid or are refused.

        `keys` stand in for the points' own attributes.
        """
        streams = np.where(is_valid, self.streams, NO_STREAM)
        context.table.seen[streams[streams != NO_STREAM]] = context.now
        asked = np.flatnonzero(is_valid & (self.streams == NO_STREAM))
        if not len(asked):
            return streams
        if keys is None:
            keys = (self if len(asked) == len(is_valid) else self.take(asked)).keys()
        elif len(asked) < len(is_valid):
            keys = keys.take(asked)
        streams[asked] = context.resolve(self.namespaces, self.family[asked], keys, self.requests[asked]).streams
        self.learn(self, streams)
        return streams

    def numbers(self, context: DecodeContext) -> DecodedNumbers:
        """Returns gauges and sums as numbers."""
        times, is_valid = self.times(context)
        double, integer = self.fields["double"], self.fields["int"]
        is_integer = integer > double  # where there are both, the later one counts
        values = float64_at(self.data, double)
        if is_integer.any():
            values = np.where(is_integer, uint64_at(self.data, integer).view(np.int64).astype(np.float64), values)
        has_number = is_integer | (double > 0)
        if not has_number.all():
            context.outcomes.reject(
                self.requests[is_valid & ~has_number], PointRefusal.VALUE, "a point without a value"
            )
            is_valid &= has_number
        starts = otlp_stream_starts(self.data, self.fields)
        streams = self.resolve_streams(is_valid, context)
        return DecodedNumbers.with_stream(DecodedRows(self.requests, streams, times, values), starts)


def otlp_stream_starts(data: Bytes, fields: dict[str, Ints]) -> Ints:
    """Returns when the stream of every point began; 0 where the point does not say."""
    at = fields["start"]
    return np.where(at > 0, uint64_at(data, at).view(np.int64), 0)
