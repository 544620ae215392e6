"""Metric definitions: what they make of points, and errors that name the place."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.model.definition import Definition
from penstock.model.definition_file import load_definitions, parse_definitions
from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import IDENTITY, STATES, merged
from penstock.model.point import DISTRIBUTIONS, POINTS, PointKind, chunk_type, entity_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "definitions" / "services.yaml"
REQUESTS = [  # service, endpoint, status, milliseconds
    ("shop", "/a", "200", 100.0),
    ("shop", "/a", "200", 700.0),
    ("shop", "/b", "500", 2500.0),
    ("shop", "/b", "404", 10.0),
    ("blog", "/", "200", 20.0),
]


def define(**keys: Any) -> Definition:
    given = {"name": "made", "source": "requests", **keys}
    return parse_definitions({"metrics": [given]}).metrics[0]


def values(definition: Definition) -> dict[str, float]:
    entities = [entity_of({"service": s, "endpoint": e, "status": c}) for s, e, c, _ in REQUESTS]
    chunk = chunk_type("requests").of(entities, list(range(len(REQUESTS))), [ms for *_, ms in REQUESTS])
    rows = with_finals(definition.partials(chunk.points), Level.MINUTE).to_pylist()
    return {row["entity"]: row["value"] for row in rows}


SHOP, BLOG = '{"service":"shop"}', '{"service":"blog"}'


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"function": "avg"}, {SHOP: 827.5, BLOG: 20.0}),
        ({"function": "cpm"}, {SHOP: 4.0, BLOG: 1.0}),
        ({"function": "max", "filter": {"status": "200"}}, {SHOP: 700.0, BLOG: 20.0}),
        ({"function": "max", "filter": {"status": {"not": ["500"]}, "service": "shop"}}, {SHOP: 700.0}),
        ({"function": "count", "filter": {"value": {"above": 20, "at_most": 700}}}, {SHOP: 2.0}),
        ({"function": "percent", "match": {"status": {"matches": "2.."}}}, {SHOP: 50.0, BLOG: 100.0}),
        ({"function": "apdex", "threshold": 500}, {SHOP: (2 + 0.5) / 4, BLOG: 1.0}),
        (
            {"function": "rate", "numerator": {"status": "500"}, "denominator": {"status": {"not": "404"}}},
            {SHOP: 100 / 3, BLOG: 0.0},
        ),
        ({"function": "latest"}, {SHOP: 10.0, BLOG: 20.0}),
    ],
)
def test_each_function_gives_what_a_person_would_work_out(keys: dict[str, Any], expected: dict[str, float]) -> None:
    assert values(define(entity=["service"], **keys)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "keys",
    [
        {"function": "avg"},
        {"function": "sum"},
        {"function": "cpm"},
        {"function": "count", "filter": {"value": {"above": 20}}},
        {"function": "percent", "match": {"value": {"above": 50}}},
        {"function": "rate", "numerator": {"status": "500"}, "denominator": {"status": {"not": "404"}}},
        {"function": "apdex", "threshold": 500},
        {"function": "percentile"},
        {"function": "histogram", "bounds": [50, 500]},
    ],
)
def test_a_distribution_counts_as_the_values_that_it_stands_for(keys: dict[str, Any]) -> None:
    counts = [3, 1, 4, 1, 5]
    entities = [entity_of({"service": s, "endpoint": e, "status": c}) for s, e, c, _ in REQUESTS]
    figures = [ms for *_, ms in REQUESTS]
    times = pa.array([0] * len(REQUESTS), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    totals = [count * ms for count, ms in zip(counts, figures)]
    distribution = pa.table([entities, times, figures, counts, totals, figures, figures], schema=DISTRIBUTIONS)
    spread = [index for index, count in enumerate(counts) for _ in range(count)]
    single = distribution.select(POINTS.names).take(spread)

    for scope in ({"entity": ["service"]}, {}):
        definition = define(**keys, **scope)
        assert_same_partials(merged(definition.partials(distribution)), merged(definition.partials(single)))


def assert_same_partials(found: pa.Table, expected: pa.Table) -> None:
    order = [(name, "ascending") for name in IDENTITY]
    found, expected = found.sort_by(order), expected.sort_by(order)
    assert found.select(list(IDENTITY)).equals(expected.select(list(IDENTITY)))
    for state in STATES[:4]:  # a distribution has no last value
        assert found[state.name].to_pylist() == pytest.approx(expected[state.name].to_pylist())


def test_a_top_n_keeps_the_labels_that_are_not_of_the_entity_as_its_record() -> None:
    definition = define(function="top_n", n=1, entity=["service"], record=["endpoint"])
    entities = [entity_of({"service": s, "endpoint": e}) for s, e, *_ in REQUESTS]
    chunk = chunk_type("requests").of(entities, [0] * len(REQUESTS), [ms for *_, ms in REQUESTS])

    rows = merged(definition.partials(chunk.points)).to_pylist()

    assert {(row["entity"], row["record"], row["max"]) for row in rows} == {
        (SHOP, '{"endpoint":"/b"}', 2500.0),
        (BLOG, '{"endpoint":"/"}', 20.0),
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"function": "percent", "match": {"code": {"matches": "5.."}}}, 10.0),
        ({"function": "rate", "numerator": {"code": "500"}, "denominator": {"code": {"not": "404"}}}, 20.0),
    ],
    ids=["percent", "rate"],
)
def test_in_a_share_an_increment_of_a_counter_counts_as_often_as_it_says(keys: dict[str, Any], expected: float) -> None:
    counter = chunk_type("requests", PointKind.COUNTER)
    entities = [entity_of({"code": code}) for code in ("200", "200", "404", "500")]
    chunk = counter.of(entities, [0, 1, 2, 3], [39.0, 1.0, 50.0, 10.0])

    partials = define(entity=[], **keys).partials(chunk.points, chunk.kind)

    assert [row["value"] for row in with_finals(partials, Level.MINUTE).to_pylist()] == [expected]


def test_a_definition_knows_which_labels_it_names_and_which_of_its_entity_came() -> None:
    definition = define(
        entity=["service", "region"],
        filter={"endpoint": {"not": "/health"}},
        function="rate",
        numerator={"status": "500"},
        denominator={"tier": "gold"},
    )
    assert definition.labels == {
        "service": "entity", "region": "entity", "endpoint": "filter", "status": "numerator", "tier": "denominator"
    }  # fmt: skip
    assert dict(definition.seen_labels) == {"service": False, "region": False}
    values(definition)
    assert dict(definition.seen_labels) == {"service": True, "region": False}


def test_a_source_is_removed_unless_one_of_its_definitions_keeps_it() -> None:
    entries = [
        {"name": "a", "source": "x"},
        {"name": "b", "source": "x", "keep_source": True},
        {"name": "c", "source": "y"},
    ]
    definitions = parse_definitions({"metrics": entries, "undefined": "drop"})
    assert (definitions.keeps("x"), definitions.keeps("y"), definitions.keeps("z")) == (True, False, False)
    assert definitions.removed == ["y"]


def test_what_is_kept_without_a_definition_may_be_asked_for_by_kind() -> None:
    asked = {"gauge": "drop", "event": ["percentile", "latest"], "histogram": "keep"}
    definitions = parse_definitions(
        {"metrics": [{"name": "a", "source": "x", "keep_source": True}], "undefined": asked}
    )

    assert [kind for kind in PointKind if definitions.keeps("y", kind)] == [
        PointKind.EVENT,
        PointKind.COUNTER,
        PointKind.DISTRIBUTION,
    ]
    assert definitions.keeps("x", PointKind.GAUGE)
    found = {kind.value: [str(function) for function in functions] for kind, functions in definitions.kept.items()}
    assert found == {
        "gauge": ["avg"],
        "event": ["percentile(6)", "latest"],
        "counter": ["sum"],
        "distribution": ["percentile(6)"],
    }


def test_the_example_holds_the_well_known_metrics() -> None:
    definitions = load_definitions(EXAMPLE)

    made = {metric.name: str(metric.function) for metric in definitions.of("http.server.request.duration")}
    assert made["service_percentile"] == "percentile(6)"
    assert made["service_apdex"] == "apdex(0.5)"
    assert "endpoint_percentile" in definitions.not_at(Level.DAY)
    assert definitions.ttls(Level.MINUTE)["endpoint_sla"] == 3 * 86400


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "a mapping with the key 'metrics' is expected, got list"),
        ({"metric": []}, "metric: unknown; known are metrics, undefined"),
        ({"metrics": "a"}, "metrics: a list is expected, got str"),
        ({"metrics": ["a"]}, r"metrics\[0\]: a mapping is expected, got str"),
        ({"metrics": [{"source": "x"}]}, r"metrics\[0\]\.name: a text is expected, got None"),
        ({"metrics": [{"name": "a", "source": "x"}, {"name": "b"}]}, r"metrics\[1\] \(b\)\.source: a text is expected"),
        ({"metrics": [{"name": "a", "source": "x"}] * 2}, r"metrics\[1\]\.name: 'a' is defined twice"),
        (
            {"metrics": [{"name": "x", "source": "x", "keep_source": True}]},
            r"metrics\[0\]\.name: 'x' is the source that keep_source of 'x' keeps; choose another name",
        ),
        (
            {"metrics": [{"name": "a", "source": "x", "keep_source": "yes"}]},
            r"metrics\[0\] \(a\)\.keep_source: true or false is expected, got 'yes'",
        ),
        ({"undefined": "maybe"}, "undefined: keep, drop or a mapping of gauge, event, counter, histogram is expected"),
        ({"undefined": {"events": "keep"}}, "undefined.events: unknown; known are counter, event, gauge, histogram"),
        (
            {"undefined": {"counter": "percentile"}},
            "undefined.counter: one of drop, keep is expected, got 'percentile'",
        ),
        ({"undefined": {"histogram": ["latest"]}}, "undefined.histogram: one of drop, keep, percentile is expected"),
        (
            {"undefined": {"gauge": "p95"}},
            "undefined.gauge: one of drop, keep, percentile, latest is expected, got 'p95'",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_place(document: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_definitions(document)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"functon": "avg"}, r" \(made\)\.functon: unknown"),
        ({"function": "p99"}, r" \(made\)\.function: one of avg, sum"),
        ({"function": "apdex"}, r" \(made\)\.threshold: apdex needs it"),
        ({"function": "distinct"}, r" \(made\)\.of: distinct needs it"),
        ({"function": "distinct", "of": None}, r" \(made\)\.of: a text or a list of texts is expected"),
        ({"function": "distinct", "of": "user", "threshold": 3}, r" \(made\)\.threshold: unknown"),
        (
            {"function": "distinct", "of": "user", "relative_error": 0.001},
            r" \(made\)\.function: relative_error must be at least 0.0041, got 0.001",
        ),
        (
            {"function": "histogram", "bounds": [2, 1]},
            r" \(made\)\.function: function histogram: needs ascending bounds, got 2,1",
        ),
        ({"levels": ["week"]}, r" \(made\)\.levels: a list of minute, hour, day"),
        ({"ttl": {"minute": "soon"}}, r" \(made\)\.ttl: durations like 7d"),
        ({"filter": []}, r" \(made\)\.filter: a mapping of labels is expected"),
        ({"filter": {"l": {"is": 1}}}, r" \(made\)\.filter\.l\.is: unknown"),
        ({"filter": {"l": {"matches": "("}}}, r" \(made\)\.filter\.l\.matches: not a regular expression"),
        ({"filter": {"value": 3}}, r" \(made\)\.filter\.value: a mapping with above, at_least"),
        ({"filter": {"value": {"above": "much"}}}, r" \(made\)\.filter\.value: numbers are expected"),
        ({"name": "a\0b"}, r"\.name: a metric's name .* got 'a\\x00b'"),
        ({"name": "\ud800"}, r"\.name: half a character"),
        ({"name": "n" * 513}, r"\.name: .* 1 to 512 characters, got 513"),
        ({"source": "\ud800"}, r" \(made\)\.source: half a character"),
        ({"entity": "service"}, r" \(made\)\.entity: a list of labels is expected"),
        ({"entity": ["\ud800"]}, r" \(made\)\.entity: half a character"),
        ({"function": "top_n", "record": ["b", "\ud800"]}, r" \(made\)\.record: half a character"),
    ],
)
def test_a_definition_that_makes_no_sense_is_refused_by_place(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics\[0\]" + complaint):
        define(**keys)


def test_a_boolean_in_the_file_is_what_labels_have_in_its_place() -> None:
    (definition,) = parse_definitions(
        {"metrics": [{"name": "a", "source": "b", "filter": {"cached": True, "hit": {"not": [False]}}}]}
    ).metrics
    assert definition.filter.accepts({"cached": "true", "hit": "true"})
    assert not definition.filter.accepts({"cached": "true", "hit": "false"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"metrics: [{name: a}]", r"metrics\[0\] \(a\)\.source"),
        (b"metrics: [", "not YAML"),
        (b"metrics: [{name: \xff, source: x}]", "not YAML"),
        (None, "No such file"),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, text: bytes | None, complaint: str) -> None:
    path = tmp_path / "metrics.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"metrics\.yaml: {complaint}"):
        load_definitions(path)
