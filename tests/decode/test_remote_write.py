"""Prometheus remote writes into columns."""

import math
import struct
from typing import Any

import cramjam
import pytest

from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import Format
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.model.point import PointKind
from penstock.protobuf import field_bytes, field_double, field_varint
from penstock.receive.http_receiver import HttpReceiver
from tests.decode.support import decoder
from tests.receive.support import NOW, KeepingSink, call, post

MILLIS = NOW // 1_000_000
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]


def as_it_is(*labels: tuple[str, str]) -> bytes:
    """A sample of a series whose labels are in this order, and as often."""
    pairs = [field_bytes(1, field_bytes(1, name.encode()) + field_bytes(2, value.encode())) for name, value in labels]
    return field_bytes(1, b"".join(pairs) + field_bytes(2, field_double(1, 1.0) + field_varint(2, MILLIS)))


def write(*series: tuple[dict[str, str], list[tuple[int, float]]]) -> bytes:
    return write_request(series)


def decode(using: Decoder, *bodies: bytes) -> Decoded:
    return using.decode(Format.REMOTE_WRITE, list(bodies))


def rows(decoded: Decoded) -> list[tuple[str, PointKind, str, float]]:
    return [
        (chunk.metric, chunk.kind, row["entity"], row["value"])
        for chunk in decoded.chunks
        for row in chunk.points.to_pylist()
    ]


def test_gauges_come_as_they_are_with_their_labels() -> None:
    body = write(
        ({"__name__": "up", "job": "a"}, [(MILLIS, 1.0), (MILLIS + 1, 0.0)]), ({"__name__": "up"}, [(MILLIS, 2.0)])
    )

    found = rows(decode(decoder(), body))

    assert found == [
        ("up", PointKind.GAUGE, '{"job":"a"}', 1.0),
        ("up", PointKind.GAUGE, '{"job":"a"}', 0.0),
        ("up", PointKind.GAUGE, "{}", 2.0),
    ]


@pytest.mark.parametrize("name", ["requests_total", "latency_count", "latency_sum", "latency_bucket"])
def test_counters_are_told_by_their_names_and_come_as_increments(name: str) -> None:
    using = decoder()
    for step, value in enumerate([100.0, 103.0, 103.0, 1.0]):
        decoded = decode(using, write(({"__name__": name}, [(MILLIS + step, value)])))
        expected = [[], [3.0], [0.0], [1.0]][step]
        assert [value for *_, value in rows(decoded)] == expected


def test_metadata_knows_better_than_names() -> None:
    using = decoder()
    metadata = field_bytes(3, field_varint(1, 1) + field_bytes(2, b"requests"))
    decode(using, write(({"__name__": "requests"}, [(MILLIS, 5.0)])))

    decode(using, metadata + write(({"__name__": "requests"}, [(MILLIS + 1, 6.0)])))
    found = rows(decode(using, write(({"__name__": "requests"}, [(MILLIS + 2, 8.0)]))))

    assert found == [("requests", PointKind.COUNTER, "{}", 2.0)]


def test_the_mark_of_a_series_that_ended_is_no_value() -> None:
    decoded = decode(
        decoder(), write(({"__name__": "up"}, [(MILLIS, STALE)]), ({"__name__": "up"}, [(MILLIS, math.nan)]))
    )

    assert len(rows(decoded)) == 1
    assert not decoded.outcomes.rejected.any()


@pytest.mark.parametrize(
    ("body", "rejected", "message"),
    [
        (write(({"job": "a"}, [(MILLIS, 1.0)])), 1, "without a name"),
        (as_it_is(("__name__", "up"), ("a", "1"), ("a", "2")), 1, "two labels of one name"),
        (write(({"__name__": "up"}, [(MILLIS + 10**9, 1.0), (MILLIS, 1.0)])), 1, "far ahead"),
        (field_bytes(1, field_bytes(1, field_bytes(1, b"__name__")) + field_bytes(4, b"")), 2, "native"),
    ],
)
def test_a_bad_sample_is_refused_alone(body: bytes, rejected: int, message: str) -> None:
    good = write(({"__name__": "good"}, [(MILLIS, 1.0)]))

    decoded = decode(decoder(), good, body, good)

    assert decoded.outcomes.rejected.tolist() == [0, rejected, 0]
    assert message in str(decoded.outcomes.messages[1])
    assert len([row for row in rows(decoded) if row[0] == "good"]) == 2


@pytest.mark.parametrize(
    "body", [b"\xff", b"\x0a\x05abc", b"\x0a\x02\x12\x05", field_bytes(1, field_bytes(2, b"\xff"))]
)
def test_what_is_not_a_write_is_refused_alone(body: bytes) -> None:
    good = write(({"__name__": "good"}, [(MILLIS, 1.0)]))

    decoded = decode(decoder(), good, body, good)

    assert list(decoded.outcomes.errors) == [1]
    assert [row[0] for row in rows(decoded)] == ["good", "good"]


def test_of_names_that_no_metric_may_have_no_type_is_remembered() -> None:
    using = decoder()
    families = [b"x" * 100_000, b"a\0b", b"\xed\xa0\x80", b"", b"fine"]
    metadata = [field_bytes(3, field_varint(1, 1) + field_bytes(2, family)) for family in families]

    decoded = decode(using, b"".join(metadata) + write(({"__name__": "fine"}, [(MILLIS, 1.0)])))

    assert not decoded.outcomes.errors
    assert using._remote_write.types == {"fine": 1}


def test_labels_in_any_order_and_empty_ones_are_one_series() -> None:
    using = decoder()
    decoded = decode(
        using,
        as_it_is(("__name__", "up"), ("a", "1"), ("b", "2")),
        as_it_is(("b", "2"), ("c", ""), ("a", "1"), ("__name__", "up")),
    )
    assert [row[2] for row in rows(decoded)] == ['{"a":"1","b":"2"}'] * 2
    assert next(one.value for one in using.samples() if one.name == "penstock_receive_streams") == 1


def test_a_sender_that_names_neither_type_nor_encoding_is_taken_as_prometheus_takes_it(
    http: HttpReceiver, sink: KeepingSink
) -> None:
    body = bytes(cramjam.snappy.compress_raw(write(({"__name__": "up"}, [(MILLIS, 1.0)]))))
    assert call("POST", http.port, "/api/v1/write", body).status == 204
    assert sink.values("up") == [1.0]


def answered(port: int, body: bytes, **headers: str) -> Any:
    every = {"Content_Type": "application/x-protobuf", "Content_Encoding": "snappy", **headers}
    return post(port, "/api/v1/write", bytes(cramjam.snappy.compress_raw(body)), **every)


def test_answers_are_what_prometheus_expects(http: HttpReceiver, sink: KeepingSink) -> None:
    good = write(({"__name__": "up"}, [(MILLIS, 1.0)]))

    assert answered(http.port, good)[::2] == (204, b"")
    partly = answered(http.port, good + write(({"__name__": "up"}, [(0, 1.0)])))
    assert partly.status == 400
    assert b"1 samples not taken" in partly.body
    assert (
        answered(http.port, good, Content_Type="application/x-protobuf;proto=io.prometheus.write.v2.Request").status
        == 415
    )
    sink.refuses = True
    assert answered(http.port, good).status == 429
    assert sink.values("up") == [1.0, 1.0]
