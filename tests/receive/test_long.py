"""Requests that are valid, and made to keep us busy or to fill our memory."""

import time
from collections.abc import Callable, Iterator

import pytest

from penstock.decode.outcome import DecodeStatus, Format, TooMany
from penstock.protobuf import encode_varint, field_bytes
from penstock.receive.intake import Intake
from tests.decode.support import decode, decoder
from tests.receive.support import NOW, SECOND, KeepingSink, Sender, counter, gauge, request

SIZE = 4 << 20
POINT = b"\x19" + NOW.to_bytes(8, "little") + b"\x21" + bytes(8)


def field(tag: int, content: bytes) -> bytes:
    return field_bytes(tag >> 3, content)


def metric(name: bytes, points: bytes) -> bytes:
    return field(0x12, field(0x0A, name) + field(0x2A, points))


def otlp(*metrics: bytes) -> bytes:
    return field(0x0A, field(0x12, b"".join(metrics)))


def series(samples: bytes) -> bytes:
    return field(0x0A, field(0x0A, field(0x0A, b"__name__") + field(0x12, b"m")) + samples)


def names(count: int) -> Iterator[bytes]:
    return (b"%06x" % number for number in range(count))


def quantiles() -> bytes:
    point = field(0x3A, bytes(600_000)) + b"\x32\x00" * 1000 + POINT[:9]
    return otlp(field(0x12, field(0x0A, b"m") + field(0x5A, field(0x0A, point))))


ENDLESS: dict[str, tuple[Format, Callable[[], bytes]]] = {  # made where they are sent: all of them are 20 MiB
    "points": (Format.OTLP, lambda: otlp(metric(b"m", b"\x0a\x00" * (SIZE // 2)))),
    "points of many metrics": (Format.OTLP, lambda: otlp(*(metric(name, b"\x0a\x00" * 20_000) for name in names(60)))),
    "fields": (Format.OTLP, lambda: otlp(metric(b"m", field(0x0A, b"\x78\x00" * (SIZE // 2) + POINT)))),
    "attributes": (Format.OTLP, lambda: otlp(metric(b"m", field(0x0A, b"\x3a\x00" * (SIZE // 2) + POINT)))),
    "metrics": (Format.OTLP, lambda: otlp(*(metric(name, b"") for name in names(250_000)))),
    "quantiles": (Format.OTLP, quantiles),
    "series": (Format.REMOTE_WRITE, lambda: b"\x0a\x00" * (SIZE // 2)),
    "samples": (Format.REMOTE_WRITE, lambda: series(b"\x12\x00" * (SIZE // 2))),
    "metadata": (Format.REMOTE_WRITE, lambda: b"\x1a\x00" * (SIZE // 2)),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_request_without_end_is_given_up_in_seconds(name: str) -> None:
    kind, make = ENDLESS[name]
    body, using = make(), decoder()
    before = time.thread_time()
    with pytest.raises(TooMany, match="more"):
        using.decode(kind, [body])
    assert time.thread_time() - before < 10.0  # some had taken minutes


def test_a_request_without_end_is_too_large_and_its_neighbours_are_taken_once() -> None:
    sink = KeepingSink()
    intake = Intake(sink, began=NOW / 1e9)
    sender = Sender(intake)
    good = [
        request(counter("c", (NOW + place * SECOND, 10.0 * place), start=NOW + 1)).SerializeToString()
        for place in (1, 2)
    ]
    for place, body in enumerate((good[0], quantiles(), good[1])):
        sender.send(body, place)
    intake.start()
    assert intake.close(30.0)
    assert {place: answer.status for place, answer in sender.answers} == {
        0: DecodeStatus.TAKEN,
        1: DecodeStatus.TOO_LARGE,
        2: DecodeStatus.TAKEN,
    }
    assert sum(sink.values("c")) == 20.0


def test_a_series_of_many_samples_is_read_whole() -> None:
    count = 5_000
    samples = b"".join(
        field(0x12, b"\x09" + b"\x00" * 6 + b"\xf0\x3f" + b"\x10" + encode_varint(NOW // 1_000_000 - place))
        for place in range(count)
    )
    for requests in (1, 60):
        decoded = decoder().decode(Format.REMOTE_WRITE, [series(samples)] * requests)
        assert not decoded.outcomes.errors
        assert sum(map(len, decoded.chunks)) == count * requests


def test_a_point_of_many_fields_is_read_whole_and_a_broken_one_is_refused() -> None:
    filler = b"\x78\x05" * 1000  # an unknown field
    whole = otlp(metric(b"m", field(0x0A, filler + POINT + filler)))
    broken = otlp(metric(b"m", field(0x0A, filler + POINT + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")))
    decoded = decoder().decode(Format.OTLP, [whole, broken])
    assert list(decoded.outcomes.errors) == [1]
    assert [len(chunk) for chunk in decoded.chunks] == [1]


def test_metrics_of_which_nothing_is_taken_are_not_remembered() -> None:
    using = decoder()
    decode(request(*(gauge(f"m{place}") for place in range(100))), using=using)
    decode(request(*(gauge(f"m{place}", 1.0, time=0) for place in range(100))), using=using)
    assert not using._otlp.namespaces
    decode(request(gauge("m", 1.0)), using=using)
    assert len(using._otlp.namespaces) == 1
