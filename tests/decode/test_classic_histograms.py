"""Classic histograms of Prometheus become one distribution each, however their series arrive."""

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import Format
from penstock.decode.stream_owners import HandoverBodies, StreamOwners
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.model.point import PointKind
from penstock.protobuf import field_bytes, field_varint
from penstock.testing import FakeClock
from tests.decode.support import decoder, sample
from tests.decode.test_remote_write import STALE
from tests.receive.support import NOW, SECOND

MILLIS = NOW // 1_000_000
BOUNDS = (0.1, 0.5, 1.0)
HISTOGRAM = 3
Series = tuple[dict[str, str], list[tuple[int, float]]]


def scrape(step: int, values: list[float], labels: dict[str, str] | None = None) -> list[Series]:
    """What a scrape finds of the histogram `h` after these observations."""
    labels, time = labels or {}, MILLIS + 1000 * step
    found: list[Series] = [
        (
            {"__name__": "h_bucket", "le": f"{bound:g}".replace("inf", "+Inf"), **labels},
            [(time, float(sum(value <= bound for value in values)))],
        )
        for bound in (*BOUNDS, math.inf)
    ]
    found.append(({"__name__": "h_sum", **labels}, [(time, math.fsum(values))]))
    found.append(({"__name__": "h_count", **labels}, [(time, float(len(values)))]))
    return found


def decode(using: Decoder, *bodies: bytes) -> Decoded:
    return using.decode(Format.REMOTE_WRITE, list(bodies))


def buckets(*groups: Decoded) -> Counter[float]:
    """How many values the distribution `h` has, by the value that stands for their bucket."""
    found: Counter[float] = Counter()
    for decoded in groups:
        for chunk in decoded.chunks:
            if chunk.kind is PointKind.DISTRIBUTION:
                assert chunk.metric == "h"
                for row in chunk.points.to_pylist():
                    found[row["value"]] += row["count"]
    return found


def total(name: str, *groups: Decoded) -> float:
    """The sum of the distribution `h`, or of a counter."""
    rows = [row for one in groups for chunk in one.chunks if chunk.metric == name for row in chunk.points.to_pylist()]
    return math.fsum(row.get("sum", row["value"]) for row in rows)


def test_buckets_and_sum_become_one_distribution_and_the_count_stays_a_counter() -> None:
    using = decoder()
    before, seen = [0.05], [0.05, 0.05, 0.2, 0.3, 0.7, 5.0]

    decode(using, write_request(scrape(0, before)))
    decoded = decode(using, write_request(scrape(1, seen)))

    assert buckets(decoded) == {0.05: 1, 0.3: 2, 0.75: 1, 1.0: 1}
    assert total("h", decoded) == total("h_sum", decoded) == pytest.approx(6.25)
    assert total("h_count", decoded) == 5
    assert {chunk.metric for chunk in decoded.chunks} == {"h", "h_sum", "h_count"}
    assert {row["entity"] for chunk in decoded.chunks for row in chunk.points.to_pylist()} == {"{}"}


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_a_scrape_may_come_in_any_pieces_in_any_order_and_twice(rng: random.Random, pieces: int) -> None:
    using = decoder()
    seen: list[float] = []
    groups = []
    for step in range(6):
        seen += [rng.choice([0.05, 0.2, 0.7, 3.0]) for _ in range(rng.randrange(4))]
        series = scrape(step, seen, {"a": "1"}) + scrape(step, seen, {"a": "2"})
        rng.shuffle(series)
        bodies = [write_request(series[place::pieces]) for place in range(pieces)]
        for body in bodies:
            decoded = decode(using, body)
            if rng.random() < 0.3:  # not taken: it comes again
                decoded.undo()
                decoded = decode(using, body)
            groups.append(decoded)
            if rng.random() < 0.3:  # taken, but the answer was lost
                groups.append(decode(using, body))
        if step == 0:
            baseline = list(seen)

    counted = len(seen) - len(baseline)
    assert sum(buckets(*groups).values()) == 2 * counted
    assert total("h", *groups) == pytest.approx(2 * (math.fsum(seen) - math.fsum(baseline)))
    counts = Counter(place_of(value) for value in seen[len(baseline) :])
    assert Counter(place_of(value) for value in buckets(*groups).elements()) == counts + counts


def place_of(value: float) -> int:
    """Of the bucket; what is beyond the last bound stands at it."""
    return sum(value > bound for bound in BOUNDS[:-1]) + (value >= BOUNDS[-1])


def test_a_point_that_never_becomes_whole_is_contained_in_the_next() -> None:
    using = decoder()
    groups = [decode(using, write_request(scrape(step, [0.2] * step))) for step in (0, 1)]
    groups.append(decode(using, write_request(scrape(2, [0.2] * 2)[1:])))
    assert not buckets(groups[-1])

    groups.append(decode(using, write_request(scrape(3, [0.2] * 3))))

    assert sum(buckets(*groups).values()) == 3


def test_a_client_that_was_restarted_counts_from_zero() -> None:
    using = decoder()
    groups = [decode(using, write_request(scrape(*one))) for one in ((0, [0.2]), (1, [0.2] * 5), (2, [0.45] * 2))]

    assert buckets(*groups) == {0.2: 4, 0.45: 2}
    assert sample(using, "penstock_receive_resets_total") == 3  # of the distribution, the sum and the count


def test_bounds_that_end_are_not_waited_for_and_may_come_again() -> None:
    using = decoder()
    groups = [decode(using, write_request(scrape(step, [0.2] * step))) for step in (0, 1)]
    ended = [(labels, [(time, STALE)]) for labels, [(time, _)] in scrape(2, [])[:1]]
    groups.append(decode(using, write_request(ended + scrape(2, [0.2] * 2)[1:])))  # another shape: measured from
    groups.append(decode(using, write_request(scrape(3, [0.2] * 3)[1:])))
    assert sum(buckets(*groups).values()) == 2

    groups += [decode(using, write_request(scrape(step, [0.2] * step))) for step in (4, 5)]
    assert sum(buckets(*groups).values()) == 3


def test_a_series_that_stays_away_without_a_word_is_waited_for_only_so_long() -> None:
    clock = FakeClock(NOW / SECOND)
    using = Decoder(IntakeConfig(), clock)
    groups = [decode(using, write_request(scrape(step, [0.2] * step))) for step in (0, 1)]

    for step in range(2, 12):
        clock.advance(60.0)
        groups.append(decode(using, write_request(scrape(60 * step, [0.2] * step)[1:])))

    assert sum(buckets(*groups).values()) > 3


def test_a_histogram_of_a_hundred_buckets_is_described_once() -> None:
    using = decoder()
    body = write_request(
        [({"__name__": "h_bucket", "le": str(bound)}, [(MILLIS, 1.0)]) for bound in [*range(100), "+Inf"]]
    )
    decode(using, body)
    described = using._remote_write._namespace.describe

    def never(key: bytes) -> Any:
        raise AssertionError(key)

    using._remote_write._namespace.describe = never
    decode(using, body)
    using._remote_write._namespace.describe = described
    assert sample(using, "penstock_receive_streams") == 1


def test_more_series_of_buckets_than_streams_are_allowed_are_refused() -> None:
    using = decoder(max_streams=10)
    body = write_request([({"__name__": "h_bucket", "le": str(bound)}, [(MILLIS, 1.0)]) for bound in range(30)])

    decode(using, body)
    decoded = decode(using, write_request([({"__name__": "h_bucket", "le": "31"}, [(MILLIS, 1.0)])]))

    assert decoded.outcomes.rejected.tolist() == [1]
    assert "10 series of buckets" in str(decoded.outcomes.messages[0])


def test_a_histogram_goes_on_after_a_restart(tmp_path: Path) -> None:
    using = decoder()
    for step in (0, 1):
        decode(using, write_request(scrape(step, [0.2] * step)))
    using.save(tmp_path / "streams.arrow")

    using = decoder()
    using.restore(tmp_path / "streams.arrow")
    groups = [decode(using, write_request(scrape(step, [0.2] * step))) for step in (5, 6)]

    assert sum(buckets(*groups).values()) == 5


def test_histograms_that_expired_are_forgotten_with_all_of_their_series() -> None:
    clock = FakeClock(NOW / SECOND)
    using = Decoder(IntakeConfig(), clock)
    for step in (0, 1):
        decode(using, write_request(scrape(step, [0.2] * step)))
    clock.advance(3601.0)
    assert using.expire() == 3

    histograms = using._remote_write.histograms
    assert len(histograms) == 0
    assert not histograms._bounds
    assert not histograms._is_histogram.any()
    assert np.all(histograms._histogram_of_sum == -1)


def test_all_series_of_a_histogram_belong_to_one_process() -> None:
    clock = FakeClock(NOW / SECOND)
    processes = [Decoder(IntakeConfig(), clock, owners=StreamOwners(own, 3)) for own in range(3)]
    groups: list[Decoded] = []
    handed: list[HandoverBodies] = []
    for step in range(3):
        for place in range(4):  # each piece through another process
            body = write_request(scrape(step, [0.2] * step, {"a": "1"})[place::4])
            decoded = processes[place % 3].decode(
                Format.REMOTE_WRITE, [body], hand_over=lambda bodies, points: handed.append(bodies)
            )
            groups.append(decoded)
            for owner, bodies in handed.pop().items() if handed else ():
                groups.append(processes[owner].decode(Format.REMOTE_WRITE, [*bodies.values()], handed_over=[0]))

    assert sum(buckets(*groups).values()) == 2
    assert total("h", *groups) == pytest.approx(0.4)


def test_buckets_that_are_not_read_at_one_moment_add_up_to_the_count() -> None:
    using = decoder()
    decode(using, write_request(scrape(0, [])))
    torn = scrape(1, [0.2] * 3)
    torn[1][1][0] = (torn[1][1][0][0], 4.0)  # more up to 0.5 than in all

    assert (
        sum(buckets(decode(using, write_request(torn)), decode(using, write_request(scrape(2, [0.2] * 4)))).values())
        == 4
    )


@pytest.mark.parametrize("kind", [None, 5])
def test_quantiles_of_a_summary_are_values_whatever_metadata_says(kind: int | None) -> None:
    using = decoder()
    metadata = b"" if kind is None else field_bytes(3, field_varint(1, kind) + field_bytes(2, b"gc"))
    quantile, count = {"__name__": "gc", "quantile": "0.5"}, {"__name__": "gc_count"}

    decode(using, metadata + write_request([(quantile, [(MILLIS, 0.25)]), (count, [(MILLIS, 1.0)])]))
    decoded = decode(using, write_request([(quantile, [(MILLIS + 1, 0.25)]), (count, [(MILLIS + 1, 3.0)])]))

    assert {(chunk.metric, chunk.kind) for chunk in decoded.chunks} == {
        ("gc", PointKind.GAUGE),
        ("gc_count", PointKind.COUNTER),
    }
    assert (total("gc", decoded), total("gc_count", decoded)) == (0.25, 2.0)


@pytest.mark.parametrize("name", ["up", "requests_total", "h_bucket"])
def test_what_is_not_a_number_is_left_out_without_a_refusal(name: str) -> None:
    using = decoder()
    labels = {"__name__": name, "le": "+Inf"}
    values = [1.0, math.nan, 3.0, math.inf, 4.0]

    groups = [decode(using, write_request([(labels, [(MILLIS + n, value)])])) for n, value in enumerate(values)]

    assert not any(one.outcomes.rejected.any() or one.outcomes.errors for one in groups)
    assert not any(one.outcomes.answer(0).is_useless for one in groups)
    rows = [row for one in groups for chunk in one.chunks for row in chunk.finite().points.to_pylist()]
    counted = [row["count"] if "count" in row else row["value"] for row in rows]
    assert counted == ([1.0, 3.0, 4.0] if name == "up" else [2, 1])


def test_a_gauge_histogram_stays_as_it_is() -> None:
    using = decoder()
    metadata = field_bytes(3, field_varint(1, 4) + field_bytes(2, b"h"))

    decoded = decode(using, metadata + write_request(scrape(0, [0.2])))

    assert {(chunk.metric, chunk.kind) for chunk in decoded.chunks if chunk.metric == "h_bucket"} == {
        ("h_bucket", PointKind.GAUGE)
    }
