"""Which process keeps a stream: always the same one, and together they count what one alone would."""

import struct
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.otlp.walk import CUMULATIVE, DELTA, EXPONENTIAL, GAUGE, HISTOGRAM, SUM, SUMMARY, OtlpFamily
from penstock.decode.outcome import DecodeStatus, Format
from penstock.decode.stream_owners import HandoverBodies, StreamOwners
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.testing import FakeClock
from tests.decode.support import exponential, histogram
from tests.examples import examples
from tests.receive.support import NOW, SECOND, counter, gauge, request

texts = st.binary(max_size=40)
families = st.builds(
    OtlpFamily,
    texts,
    texts,
    texts,
    st.sampled_from([GAUGE, SUM, HISTOGRAM, EXPONENTIAL, SUMMARY]),
    st.sampled_from([0, DELTA, CUMULATIVE]),
    st.sampled_from([0, 1]),
)


def is_cumulative(family: OtlpFamily) -> bool:
    if family.data == SUM:
        return family.temporality == CUMULATIVE and bool(family.is_monotonic)
    return family.data == SUMMARY or (family.data != GAUGE and family.temporality == CUMULATIVE)


@given(families, st.integers(1, 9))
def test_every_process_finds_the_same_owner_and_what_adds_up_by_itself_stays(family: OtlpFamily, count: int) -> None:
    found = [StreamOwners(own, count).of_family(family) for own in range(count)]

    assert found == (found[:1] * count if is_cumulative(family) else list(range(count)))
    assert all(0 <= owner < count for owner in found)


@given(texts, texts, texts | st.sampled_from([b"x_sum", b"x_count", b"x_sum_count", b"_sum"]))
def test_what_a_summary_becomes_lives_where_sums_of_that_name_do(resource: bytes, scope: bytes, name: bytes) -> None:
    summary = OtlpFamily(resource, scope, name, SUMMARY, 0, 0)
    for ending in (b"_count", b"_sum"):
        part = OtlpFamily(resource, scope, name + ending, SUM, CUMULATIVE, 1)

        assert StreamOwners(0, 7).of_family(part) == StreamOwners(0, 7).of_family(summary)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_streams_of_one_sender_are_spread_evenly(count: int) -> None:
    owners = StreamOwners(0, count)
    by_metric = Counter(
        owners.of_family(OtlpFamily(b"shop", b"", f"app.metric.{number}".encode(), SUM, CUMULATIVE, 1))
        for number in range(1000)
    )
    by_series = Counter(owners.of_series("requests_total", f'{{"path":"/things/{number}"}}') for number in range(1000))

    for spread in (by_metric, by_series):
        assert len(spread) == count
        assert max(spread.values()) < 1.3 * 1000 / count


# -- together they count what one does ---------------------------------------------------------------------------------


def decoders(count: int) -> list[Decoder]:
    clock = FakeClock(NOW / SECOND)
    if count == 1:
        return [Decoder(IntakeConfig(), clock, began=NOW / SECOND - 10)]
    return [
        Decoder(IntakeConfig(), clock, began=NOW / SECOND - 10, owners=StreamOwners(own, count)) for own in range(count)
    ]


def refuse(*_: object) -> None:
    raise AssertionError("what was handed over is never handed on")


def received(among: list[Decoder], at: int, kind: Format, bodies: list[bytes]) -> list[Decoded]:
    """What becomes of a group that one of them receives, there and where its parts are handed to."""
    elsewhere: HandoverBodies = {}
    found = [among[at].decode(kind, bodies, hand_over=lambda bodies, _: elsewhere.update(bodies))]
    for owner, parts in elsewhere.items():
        assert owner != at
        handed = among[owner].decode(kind, list(parts.values()), handed_over=range(len(parts)), hand_over=refuse)
        assert not handed.outcomes.errors
        found.append(handed)
    return found


def counted(decoded: list[Decoded]) -> list[tuple[Any, ...]]:
    """Every row that is added up, in no order."""
    return sorted(
        (chunk.metric, str(chunk.kind), *(repr(row[name]) for name in sorted(row)))
        for one in decoded
        for chunk in one.chunks
        for row in chunk.points.to_pylist()
    )


def named(metric: Metric, name: str) -> Metric:
    metric.name = name
    return metric


def metrics_at(turn: int, value: int, names: str) -> list[Metric]:
    time = NOW + turn * SECOND
    made = []
    for name in names:
        made += [
            counter(f"counter.{name}", (time, float(value)), (time + 1, value + 0.5), start=NOW, shop="north"),
            counter(f"delta.{name}", (time, 3.0), start=time - 1, temporality=1),
            counter(f"level.{name}", (time, float(value)), start=NOW, is_monotonic=False),
            gauge(f"gauge.{name}", value / 3, time=time),
            named(histogram(time, [value, 2 * value, value], 15.0 * value), f"histogram.{name}"),
            named(exponential(time, [value, value], 3.0 * value), f"exponential.{name}"),
        ]
        summary = Metric(name=f"summary.{name}")
        point = summary.summary.data_points.add(time_unix_nano=time, start_time_unix_nano=NOW, count=value)
        point.sum = 2.0 * value
        point.quantile_values.add(quantile=0.5, value=1.0)
        made.append(summary)
    return made


groups = st.lists(
    st.tuples(
        st.integers(0, 3),  # the process that receives it
        st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["x", "xy", "zyx"])), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(60))
@given(groups, st.integers(2, 4))
def test_otlp_is_counted_as_one_process_counts_it_whoever_receives_it(
    given_groups: list[tuple[int, list[tuple[str, str]]]], count: int
) -> None:
    several, alone = decoders(count), decoders(1)
    for turn, (receiver, requests) in enumerate(given_groups, 1):
        bodies = [
            request(*metrics_at(10 * turn + place, 5 * turn + place, names), resource={"service.name": service})
            for place, (service, names) in enumerate(requests)
        ]
        written = [body.SerializeToString() for body in bodies]

        assert counted(received(several, receiver % count, Format.OTLP, written)) == counted(
            received(alone, 0, Format.OTLP, written)
        )


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 3), st.permutations("abcdef")), min_size=1, max_size=5), st.integers(2, 4))
def test_remote_writes_are_counted_as_one_process_counts_them_whoever_receives_them(
    turns: list[tuple[int, list[str]]], count: int
) -> None:
    several, alone = decoders(count), decoders(1)
    for turn, (receiver, names) in enumerate(turns, 1):
        time = NOW // 1_000_000 + turn
        bodies = [
            write_request([({"__name__": f"{name}_total", "job": "x"}, [(time, 2.0 * turn)]) for name in names]),
            write_request(
                [({"job": "x", "__name__": f"{name}_total"}, [(time + 1, 2.0 * turn + 1)]) for name in names]
            ),
            write_request([({"__name__": name}, [(time, 1.0)]) for name in names]),
        ]

        assert counted(received(several, receiver % count, Format.REMOTE_WRITE, bodies)) == counted(
            received(alone, 0, Format.REMOTE_WRITE, bodies)
        )


def wide(tag: int, content: bytes) -> bytes:
    """A field whose length is written in four bytes, as by writers that leave room for it first."""
    size = len(content)
    return bytes([tag, size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21]) + content


def noncanonical_report(turn: int, *, with_histogram: bool) -> bytes:
    """Counters of one sender and a histogram whose buckets are not packed, none of it in protobuf's own bytes."""
    time = NOW + turn * SECOND
    metrics = [
        counter(f"c{number}", (time, 10.0 * turn), start=NOW - SECOND).SerializeToString() for number in range(8)
    ]
    if with_histogram:
        fixed = b"".join(tag + struct.pack("<Q", value) for tag, value in ((b"\x11", NOW), (b"\x19", time)))
        buckets = b"".join(b"\x31" + struct.pack("<Q", turn) for _ in range(2)) + b"\x39" + struct.pack("<d", 1.0)
        point = fixed + b"\x21" + struct.pack("<Q", 2 * turn) + buckets
        metrics.append(wide(0x0A, b"h") + wide(0x4A, wide(0x0A, point) + b"\x10\x02"))
    resource = wide(0x0A, b"\x0a\x0cservice.name" + wide(0x12, b"\x0a\x04shop"))
    of_scope = b"".join(wide(0x12, metric) for metric in metrics)
    return wide(0x0A, wide(0x0A, resource) + wide(0x12, of_scope))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("odd_turns", [range(1, 7), range(2, 7, 2), range(4, 7)])
def test_a_stream_is_the_same_whether_or_not_its_request_is_written_oddly(count: int, odd_turns: range) -> None:
    several = decoders(count)
    rows = [
        row
        for turn in range(1, 7)
        for decoded in received(
            several, turn % count, Format.OTLP, [noncanonical_report(turn, with_histogram=turn in odd_turns)]
        )
        for chunk in decoded.chunks
        for row in chunk.points.to_pylist()
        if chunk.metric != "h"
    ]

    assert sum(row["value"] for row in rows) == 8 * 60.0


def test_what_metadata_says_everybody_hears() -> None:
    several = decoders(2)
    body = write_request([({"__name__": "jobs"}, [(NOW // 1_000_000, 1.0)])])
    metadata = bytes([0x1A, 8, 0x08, 1, 0x12, 4]) + b"jobs"  # a counter, whatever its name

    (decoded, handed) = received(several, 0, Format.REMOTE_WRITE, [metadata])

    assert not decoded.chunks
    assert not handed.chunks
    for using in several:
        found = using.decode(Format.REMOTE_WRITE, [body], handed_over=[0])
        assert not found.chunks  # first seen, and only measured from: a gauge would be there


def test_a_request_whose_owner_is_down_is_answered_so_and_the_others_of_its_group_are_taken() -> None:
    owners = StreamOwners(0, 2, {1})
    using = Decoder(IntakeConfig(), FakeClock(NOW / SECOND), began=NOW / SECOND - 10, owners=owners)
    plain = request(gauge("load", 0.5)).SerializeToString()
    names = [f"c{number}" for number in range(20)]
    away = next(
        name
        for name in names
        if using.decode(Format.OTLP, [request(counter(name, (NOW, 1.0))).SerializeToString()]).outcomes.errors
    )

    decoded = using.decode(
        Format.OTLP, [request(counter(away, (NOW, 1.0))).SerializeToString(), plain], hand_over=refuse
    )

    assert decoded.outcomes.answer(0).status is DecodeStatus.BROKEN
    assert decoded.outcomes.answer(1).status is DecodeStatus.TAKEN
    assert [chunk.metric for chunk in decoded.chunks] == ["load"]
