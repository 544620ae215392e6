"""Summaries as numbers. Their quantiles cannot be merged, so they are kept as Prometheus keeps them:

<name>{quantile="0.99"}    a gauge
<name>_count, <name>_sum   counters
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.decode.column_scan import MessageLayout, float64_at, scan_body_columns, uint64_at
from penstock.decode.decode_context import DecodeContext
from penstock.decode.message_spans import repeated_messages_in_bodies
from penstock.decode.otlp.attributes import otlp_attribute_text
from penstock.decode.otlp.otlp_reader import OtlpReader
from penstock.decode.otlp.scanned_points import ScannedOtlpPoints, otlp_stream_starts
from penstock.decode.otlp.walk import CUMULATIVE, GAUGE, SUM, OtlpFamily
from penstock.decode.outcome import TooMany
from penstock.decode.rows import DecodedNumbers, DecodedRows
from penstock.protobuf import field_bytes

_QUANTILE = MessageLayout(fixed={0x09: "quantile", 0x11: "value"})
_EMPTY = pa.scalar(b"", pa.binary())
_MAX_LABEL_BYTES = 512 << 20  # of the quantiles' labels: each has all of its point's
_PARTS = 3  # of each summary: its count, its sum, its quantiles


def summary_numbers(points: ScannedOtlpPoints, context: DecodeContext, reader: OtlpReader) -> DecodedNumbers:
    """Returns the numbers that summaries are made of."""
    times, is_valid = points.times(context)
    columns, data = points.fields, points.data
    counts = np.where(columns["count"] > 0, uint64_at(data, columns["count"]), np.uint64(0)).astype(np.float64)
    sums = np.where(columns["sum"] > 0, float64_at(data, columns["sum"]), 0.0)
    summaries = np.arange(len(times))

    keys = points.keys()
    summary, begins, ends = repeated_messages_in_bodies(data, columns["quantiles"], columns["quantiles_end"])
    if pc.sum(pc.binary_length(keys).take(summary), min_count=0).as_py() > _MAX_LABEL_BYTES:
        raise TooMany("more quantiles than can be told apart")
    inner = scan_body_columns(data, begins, ends, _QUANTILE).columns  # one that cannot be read is 0
    quantiles, of_quantile = np.unique(
        float64_at(data, inner["quantile"]) * (inner["quantile"] > 0), return_inverse=True
    )
    labels = pa.array(
        [_label("quantile", otlp_attribute_text(quantile)) for quantile in quantiles.tolist()], pa.binary()
    )
    labelled = pc.binary_join_element_wise(keys.take(summary), labels.take(of_quantile), _EMPTY)

    rows = np.concatenate([summaries, summaries, summary])
    part = np.repeat(np.arange(_PARTS), [len(summaries), len(summaries), len(summary)])
    used, of_used = np.unique(points.family, return_inverse=True)  # there are families of other points, too
    families = [part for number in used.tolist() for part in _parts(points.families[number])]
    none = np.zeros(len(summaries), np.int64)
    made = replace(
        points,
        # The fields of numbers: once a shape is known, its summaries come as numbers.
        fields={
            "start": columns["start"][rows],
            "time": columns["time"][rows],
            "double": np.concatenate([none, columns["sum"], inner["value"]]),
            "int": np.concatenate([columns["count"], none, np.zeros(len(summary), np.int64)]),
        },
        families=families,
        namespaces=[reader.namespace(family) for family in families],
        family=of_used[rows] * _PARTS + part,
        requests=points.requests[rows],
        metrics=points.metrics[rows],
        streams=points.streams[rows],
    )
    values = np.concatenate([counts, sums, float64_at(data, inner["value"]) * (inner["value"] > 0)])
    streams = made.resolve_streams(is_valid[rows], context, pa.concat_arrays([keys, keys, labelled]))
    return DecodedNumbers.with_stream(
        DecodedRows(made.requests, streams, times[rows], values), otlp_stream_starts(data, columns)[rows]
    )


def _parts(family: OtlpFamily) -> tuple[OtlpFamily, OtlpFamily, OtlpFamily]:
    counter = family._replace(data=SUM, temporality=CUMULATIVE, is_monotonic=1)
    return (
        counter._replace(name=family.name + b"_count"),
        counter._replace(name=family.name + b"_sum"),
        family._replace(data=GAUGE),
    )


def _label(name: str, value: str) -> bytes:
    """A serialised attribute of a point."""
    any_value = field_bytes(1, value.encode())
    return field_bytes(7, field_bytes(1, name.encode()) + field_bytes(2, any_value))
