"""One place declares every metric, and what is watched shows up in a scrape."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import telemetry
from penstock.errors import UndeclaredMetric
from penstock.telemetry import DECLARATIONS, Buckets, Declaration, Sample, Telemetry, declared


def values(rendered: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(rendered.decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def test_a_scrape_shows_what_watched_sources_say_at_that_moment() -> None:
    points = {"cpu": 1}
    watched = Telemetry()
    watched.watch(lambda: [Sample("penstock_points_received_total", n, (m,)) for m, n in points.items()])

    assert values(watched.render()) == {("penstock_points_received_total", ("cpu",)): 1}
    points["cpu"] = 5
    assert values(watched.render()) == {("penstock_points_received_total", ("cpu",)): 5}


def test_samples_of_one_name_and_labels_from_several_sources_add_up() -> None:
    watched = Telemetry()
    for _ in range(2):
        watched.watch(lambda: [Sample("penstock_segments_sealed_total", 3)])

    assert values(watched.render()) == {("penstock_segments_sealed_total", ()): 6}


def test_type_lines_name_the_very_metric_that_follows() -> None:
    watched = Telemetry()
    watched.watch(lambda: [Sample("penstock_fastqueue_chunk_rotations", 3), Sample("penstock_queue_push_total", 1)])

    lines = watched.render().decode().splitlines()
    assert "# TYPE penstock_fastqueue_chunk_rotations counter" in lines
    assert "penstock_fastqueue_chunk_rotations 3.0" in lines
    assert "# TYPE penstock_queue_push_total counter" in lines


def test_every_metric_is_rendered_as_the_type_that_it_is_declared_as() -> None:
    watched = Telemetry()
    plain = [one for one in DECLARATIONS.values() if one.kind != "histogram"]
    watched.watch(lambda: [Sample(one.name, 1, ("x",) * len(one.labels)) for one in plain])

    lines = watched.render().decode().splitlines()
    types = dict(line.removeprefix("# TYPE ").split() for line in lines if line.startswith("# TYPE "))
    assert types == {one.name: one.kind for one in plain}


def test_a_source_that_is_no_longer_watched_is_silent() -> None:
    watched = Telemetry()
    unwatch = watched.watch(lambda: [Sample("penstock_segments_sealed_total", 3)])
    unwatch()
    unwatch()

    assert values(watched.render()) == {}


def test_a_name_that_is_not_declared_is_refused() -> None:
    watched = Telemetry()
    watched.watch(lambda: [Sample("penstock_no_such_thing", 3)])

    with pytest.raises(UndeclaredMetric, match="penstock_no_such_thing"):
        watched.render()
    with pytest.raises(UndeclaredMetric, match="histogram"):
        Buckets("penstock_segments_sealed_total")


def test_labels_that_do_not_fit_the_declaration_are_refused() -> None:
    watched = Telemetry()
    watched.watch(lambda: [Sample("penstock_points_received_total", 3)])

    with pytest.raises(ValueError, match="zip"):
        watched.render()


@pytest.fixture
def with_histogram(monkeypatch: pytest.MonkeyPatch) -> str:
    name = "penstock_test_seconds"
    monkeypatch.setitem(telemetry.DECLARATIONS, name, Declaration(name, "histogram", "Seconds", ("k",), (0.1, 1.0)))
    return name


def test_buckets_hold_what_is_below_them_and_those_of_one_series_add_up(with_histogram: str) -> None:
    watched = Telemetry()
    for values_seen in ([0.1, 0.5, 7.0], [0.05]):
        buckets = Buckets(with_histogram, ("a",))
        for value in values_seen:
            buckets.observe(value)
        watched.watch(lambda buckets=buckets: [buckets])  # type: ignore[misc]

    assert values(watched.render()) == {
        (f"{with_histogram}_bucket", ("a", "0.1")): 2,
        (f"{with_histogram}_bucket", ("a", "1.0")): 3,
        (f"{with_histogram}_bucket", ("a", "+Inf")): 4,
        (f"{with_histogram}_count", ("a",)): 4,
        (f"{with_histogram}_sum", ("a",)): pytest.approx(7.65),
    }


def test_two_queues_are_told_apart_by_the_labels_they_are_watched_with() -> None:
    watched = Telemetry()
    for name, ratio in (("relay", 0.8), ("segments", 0.3)):
        watched.watch(lambda ratio=ratio: [Sample("penstock_queue_utilization_ratio", ratio)], queue=name)  # type: ignore[misc]

    assert values(watched.render()) == {
        ("penstock_queue_utilization_ratio", ("relay",)): 0.8,
        ("penstock_queue_utilization_ratio", ("segments",)): 0.3,
    }


def test_every_declaration_is_ours_and_says_what_it_counts() -> None:
    for name, declaration in DECLARATIONS.items():
        assert declared(name) is declaration
        assert name.startswith("penstock_")
        assert declaration.help
        assert not declaration.buckets or declaration.kind == "histogram"
