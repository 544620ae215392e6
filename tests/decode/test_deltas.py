"""Cumulative streams as increments: what is added up is what was counted, whatever happens on the way."""

import random
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import Format
from penstock.testing import FakeClock
from tests.decode.support import RandomStream, decode, decoder, exponential, histogram, increments, sum_of
from tests.receive.support import NOW, SECOND, counter, request

BEFORE = NOW - 3600 * SECOND  # before the decoder's own start


def test_a_stream_that_began_after_us_counts_from_its_first_value() -> None:
    using = decoder()

    assert increments(using, counter("c", (NOW + SECOND, 5.0), start=NOW)) == [5.0]
    assert increments(using, counter("c", (NOW + 2 * SECOND, 7.5), start=NOW)) == [2.5]


def test_a_stream_that_waited_for_us_to_listen_counts_from_its_first_value() -> None:
    using = Decoder(IntakeConfig(), FakeClock(NOW / SECOND), began=NOW / SECOND - 10)

    assert increments(using, counter("c", (NOW, 5.0), start=NOW - 5 * SECOND)) == [5.0]
    assert increments(using, counter("d", (NOW, 5.0), start=NOW - 15 * SECOND)) == []


@pytest.mark.parametrize(("initial", "first"), [("auto", []), ("drop", []), ("keep", [5.0])])
def test_a_stream_that_began_before_us_is_measured_from_its_first_value(initial: str, first: list[float]) -> None:
    using = decoder(initial_value=initial)

    assert increments(using, counter("c", (NOW, 5.0), start=BEFORE)) == first
    assert increments(using, counter("c", (NOW + SECOND, 7.0), start=BEFORE)) == [2.0]


def test_several_points_of_one_request_follow_each_other_in_time_not_in_place() -> None:
    using = decoder()
    points = [(NOW + 3 * SECOND, 9.0), (NOW + SECOND, 2.0), (NOW + 2 * SECOND, 5.0)]

    assert sorted(increments(using, counter("c", *points, start=NOW))) == [2.0, 3.0, 4.0]


def test_a_value_that_falls_is_a_reset_and_counts_whole() -> None:
    using = decoder()
    increments(using, counter("c", (NOW + SECOND, 100.0), start=NOW))

    assert increments(using, counter("c", (NOW + 2 * SECOND, 3.0), start=NOW)) == [3.0]


def test_a_new_start_is_a_reset_though_the_value_grew() -> None:
    using = decoder()
    increments(using, counter("c", (NOW + SECOND, 5.0), start=NOW))

    assert increments(using, counter("c", (NOW + 4 * SECOND, 9.0), start=NOW + 2 * SECOND)) == [9.0]


def test_a_start_that_only_jitters_is_no_reset() -> None:
    using = decoder()
    increments(using, counter("c", (NOW + 5 * SECOND, 5.0), start=NOW))

    assert increments(using, counter("c", (NOW + 6 * SECOND, 9.0), start=NOW + SECOND // 2)) == [4.0]


def test_what_is_not_younger_was_counted_already() -> None:
    using = decoder()
    increments(using, counter("c", (NOW + 2 * SECOND, 5.0), start=NOW))

    assert increments(using, counter("c", (NOW + 2 * SECOND, 5.0), start=NOW)) == []
    assert increments(using, counter("c", (NOW + SECOND, 3.0), start=NOW)) == []
    assert increments(using, counter("c", (NOW + 3 * SECOND, 6.0), start=NOW)) == [1.0]


def test_streams_of_two_instances_are_kept_apart_and_share_their_entity() -> None:
    using = decoder()
    for instance, value in (("a", 5.0), ("b", 100.0), ("a", 7.0), ("b", 101.0)):
        time = NOW + int(value) * SECOND
        resource = {"service.name": "shop", "service.instance.id": instance}
        decoded = decode(request(counter("c", (time, value), start=NOW), resource=resource), using=using)
        assert set(decoded.chunks[0].points["entity"].to_pylist()) == {'{"service.name":"shop"}'}
        assert decoded.chunks[0].points["value"].to_pylist() in ([5.0], [100.0], [2.0], [1.0])


def test_labels_in_another_order_are_the_same_stream() -> None:
    using = decoder()
    increments(using, counter("c", (NOW + SECOND, 5.0), start=NOW, a="1", b="2"))

    assert increments(using, counter("c", (NOW + 2 * SECOND, 6.0), start=NOW, b="2", a="1")) == [1.0]


def test_what_was_not_taken_after_all_comes_again_with_the_next_value() -> None:
    using = decoder()
    increments(using, counter("c", (NOW + SECOND, 5.0), start=NOW))
    lost = decode(request(counter("c", (NOW + 2 * SECOND, 8.0), start=NOW)), using=using)

    lost.undo()

    assert increments(using, counter("c", (NOW + 2 * SECOND, 8.0), start=NOW)) == [3.0]
    lost = decode(request(counter("c", (NOW + 3 * SECOND, 10.0), start=NOW)), using=using)
    assert increments(using, counter("c", (NOW + 4 * SECOND, 11.0), start=NOW)) == [1.0]
    lost.undo()  # which is known only now
    assert increments(using, counter("c", (NOW + 5 * SECOND, 12.0), start=NOW)) == [3.0]


def counted(using: Decoder, metric: Metric) -> tuple[list[int], Any]:
    """Counts by ascending value, and the sum."""
    decoded = decode(request(metric), using=using)
    rows = sorted(
        (row["value"], row["count"], row["sum"]) for chunk in decoded.chunks for row in chunk.points.to_pylist()
    )
    return [count for _, count, _ in rows], pytest.approx(sum(total for *_, total in rows))


def test_a_cumulative_histogram_counts_what_each_bucket_gained() -> None:
    using = decoder()

    assert counted(using, histogram(NOW + SECOND, [1, 2, 3], 90.0)) == ([1, 2, 3], 90.0)
    assert counted(using, histogram(NOW + 2 * SECOND, [1, 4, 3], 120.0)) == ([2], 30.0)
    assert counted(using, histogram(NOW + 3 * SECOND, [1, 0, 0], 5.0)) == ([1], 5.0)
    assert counted(using, histogram(NOW + 3 * SECOND, [1, 0, 0], 5.0)) == ([], 0.0)


def test_a_histogram_with_new_bounds_is_measured_from_anew() -> None:
    using = decoder()
    counted(using, histogram(NOW + SECOND, [1, 2, 3], 90.0))

    assert counted(using, histogram(NOW + 2 * SECOND, [2, 2, 3, 1], 95.0, bounds=(1.0, 2.0, 3.0))) == ([], 0.0)
    assert counted(using, histogram(NOW + 3 * SECOND, [2, 3, 3, 1], 97.0, bounds=(1.0, 2.0, 3.0))) == ([1], 2.0)


def test_a_histogram_that_was_not_taken_comes_again() -> None:
    using = decoder()
    counted(using, histogram(NOW + SECOND, [1, 2, 3], 90.0))
    lost = decode(request(histogram(NOW + 2 * SECOND, [1, 4, 3], 120.0)), using=using)

    lost.undo()

    assert counted(using, histogram(NOW + 2 * SECOND, [1, 4, 3], 120.0)) == ([2], 30.0)


def test_a_cumulative_exponential_histogram_survives_a_change_of_scale() -> None:
    using = decoder()

    assert counted(using, exponential(NOW + SECOND, [1, 1, 1, 1], 10.0, scale=1)) == ([1, 1, 1, 1], 10.0)
    assert counted(using, exponential(NOW + 2 * SECOND, [2, 3], 16.0, scale=0)) == ([1], 6.0)
    assert counted(using, exponential(NOW + 3 * SECOND, [1], 1.0, scale=0)) == ([1], 1.0)


def test_an_exponential_histogram_that_was_not_taken_comes_again() -> None:
    using = decoder()
    counted(using, exponential(NOW + SECOND, [1, 1], 3.0))
    lost = decode(request(exponential(NOW + 2 * SECOND, [1, 4], 12.0)), using=using)

    lost.undo()

    assert counted(using, exponential(NOW + 2 * SECOND, [1, 4], 12.0)) == ([3], 9.0)


@pytest.mark.parametrize("kind", ["counter", "histogram", "exponential"])
def test_whatever_fails_and_however_late_that_is_known_everything_is_counted_once(kind: str) -> None:
    rng = random.Random(4)
    for _ in range(30):
        using = decoder()
        stream, total = RandomStream(kind, rng), 0.0
        failing: list[tuple[Decoded, list[bytes]]] = []
        for _ in range(rng.randrange(40)):
            bodies = stream.reports()
            decoded = using.decode(Format.OTLP, bodies)
            if rng.random() < 0.4:
                failing.append((decoded, bodies))
            else:
                total += sum_of(decoded)
            if rng.random() < 0.4:
                total += repeated(using, failing)
        total += repeated(using, failing)
        last = using.decode(Format.OTLP, [stream.report()])
        assert total + sum_of(last) == pytest.approx(stream.counted)


def repeated(using: Decoder, failing: list[tuple[Decoded, list[bytes]]]) -> float:
    """Their senders send them again."""
    found = 0.0
    while failing:
        decoded, bodies = failing.pop(0)
        decoded.undo()
        found += sum_of(using.decode(Format.OTLP, bodies))
    return found
