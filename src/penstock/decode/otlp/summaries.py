"""Summaries as numbers. Their quantiles cannot be merged, so they are kept as Prometheus keeps them:

<name>{quantile="0.99"}    a gauge
<name>_count, <name>_sum   counters
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.decode.column_scan import MessageLayout, float64_at, scan, uint64_at
from penstock.decode.group import Group, Rows
from penstock.decode.message_spans import repeated_messages
from penstock.decode.numbers import Numbers, taken, times_of
from penstock.decode.otlp.attributes import text_of
from penstock.decode.otlp.request import OtlpReader
from penstock.decode.otlp.walk import CUMULATIVE, GAUGE, SUM, Family
from penstock.decode.outcome import TooMany
from penstock.decode.scanned_points import Found, streams_by_key
from penstock.protobuf import field_bytes

_QUANTILE = MessageLayout(fixed={0x09: "quantile", 0x11: "value"})
_NOTHING = pa.scalar(b"", pa.binary())
_MOST_BYTES = 512 << 20  # of the quantiles' labels: each has all of its point's
_PARTS = 3  # that each summary becomes: its count, its sum, its quantiles


def summary_numbers(found: Found, group: Group, reader: OtlpReader) -> Numbers:
    """The numbers that summaries are made of."""
    times, fine = times_of(found, group)
    columns, data = found.fields, found.data
    starts = np.where(columns["start"] > 0, uint64_at(data, columns["start"]).view(np.int64), 0)
    counts = np.where(columns["count"] > 0, uint64_at(data, columns["count"]), np.uint64(0)).astype(np.float64)
    sums = np.where(columns["sum"] > 0, float64_at(data, columns["sum"]), 0.0)
    points = np.arange(len(times))

    keys = found.keys()
    owner, begins, ends = repeated_messages(data, columns["quantiles"], columns["quantiles_end"])
    if pc.sum(pc.binary_length(keys).take(owner), min_count=0).as_py() > _MOST_BYTES:
        raise TooMany("more quantiles than can be told apart")
    inner = scan(data, begins, ends, _QUANTILE).columns  # one that cannot be read says nothing, and is 0
    quantiles, of_quantile = np.unique(
        float64_at(data, inner["quantile"]) * (inner["quantile"] > 0), return_inverse=True
    )
    labels = pa.array([_label("quantile", text_of(quantile)) for quantile in quantiles.tolist()], pa.binary())
    labelled = pc.binary_join_element_wise(keys.take(owner), labels.take(of_quantile), _NOTHING)

    rows = np.concatenate([points, points, owner])
    part = np.repeat(np.arange(_PARTS), [len(points), len(points), len(owner)])
    used, of_used = np.unique(found.which, return_inverse=True)  # there are families of other points, too
    families = [part for number in used.tolist() for part in _parts(found.families[number])]
    none = np.zeros(len(points), np.int64)
    made = replace(
        found,
        # As if they had come as numbers: so they do once their shape is known.
        fields={
            "start": columns["start"][rows],
            "time": columns["time"][rows],
            "double": np.concatenate([none, columns["sum"], inner["value"]]),
            "int": np.concatenate([columns["count"], none, np.zeros(len(owner), np.int64)]),
        },
        families=families,
        namespaces=[reader.namespace(family) for family in families],
        which=of_used[rows] * _PARTS + part,
        requests=found.requests[rows],
        metrics=found.metrics[rows],
        streams=found.streams[rows],
    )
    values = np.concatenate([counts, sums, float64_at(data, inner["value"]) * (inner["value"] > 0)])
    streams = streams_by_key(made, fine[rows], group, pa.concat_arrays([keys, keys, labelled]))
    return taken(Rows(made.requests, streams, times[rows], values), starts[rows])


def _parts(family: Family) -> tuple[Family, Family, Family]:
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
