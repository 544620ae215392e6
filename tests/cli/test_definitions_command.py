"""`penstock definitions`: what is checked, what is tried, what is written to begin with."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.definitions_command import SETS
from penstock.cli.main import main
from penstock.model.definition_file import load_definitions

DEFINED = """
metrics:
  - {name: by_service, source: duration, entity: [service], function: apdex, threshold: 500}
  - {name: failures, source: duration, entity: [service.name], function: percent, match: {status: "500"}}
  - {name: slowest, source: duration, entity: [], function: top_n, n: 1, record: [route], keep_source: true}
  - {name: none, source: duration, filter: {service.name: nowhere}}
  - {name: misspelt, source: oders}
"""
EVENTS = [
    {"metric": "duration", "value": 0.25, "labels": {"service.name": "shop", "route": "/a"}},
    {"metric": "duration", "value": 0.75, "labels": {"service.name": "shop", "route": "/b"}},
    {"metric": "orders", "value": 3, "labels": {}},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.yaml"
    path.write_text(DEFINED)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["definitions", *map(str, words)])


def tried(file: Path, *events: object) -> Result:
    recorded = file.with_name("recorded.json")
    recorded.write_text(json.dumps(events))
    return run("try", file, recorded)


def test_check_says_what_each_definition_makes_and_what_leaves_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "metrics.yaml"
    entries = "{name: a, source: x, keep_source: true}, {name: b, source: y, entity: [host], function: max}"
    path.write_text(f"metrics: [{entries}]\nundefined: drop\n")

    ran = run("check", path)

    assert ran.exit_code == 0
    assert ran.stdout.splitlines() == [
        f"{path}: fine, 2 definitions of 2 metrics",
        "  a  avg of x by all its labels, and the source as it is",
        "  b  max of y by host",
    ]
    first, second = ran.stderr.splitlines()
    assert "not by their own labels: y; keep_source: true" in first
    assert "undefined: drop" in second


def test_check_names_the_place_of_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "metrics.yaml"
    path.write_text("metrics: [{name: a, source: x, function: apdex}]")
    ran = run("check", path)
    assert ran.exit_code == 2
    assert f"{path}: metrics[0] (a).threshold: apdex needs it" in ran.output


def test_a_trial_says_what_each_definition_gives_and_what_does_not_fit(file: Path) -> None:
    ran = tried(file, *EVENTS)

    assert ran.exit_code == 1
    parts = {text.split(":")[0]: text for text in ran.stdout.split("\n\n")}
    labels = "duration has route, service.name"
    assert "takes 2 of 2 points, 1 series" in parts["by_service"]
    assert f"problem: label 'service' (entity) never occurs; {labels}" in parts["by_service"]
    assert "threshold 500 is far above every value (the greatest is 0.75)" in parts["by_service"]
    assert f"note: label 'status' (match) never occurs; {labels}" in parts["failures"]
    assert "0.75  route='/b'" in parts["slowest"]
    assert "takes 0 of 2 points" in parts["none"]
    assert "problem: no point passes the filter" in parts["none"]
    assert "problem: no point of oders came; did you mean orders?" in parts["misspelt"]
    assert ran.stdout.endswith("kept by their own labels: orders\n")


def test_a_trial_of_definitions_that_fit_ends_with_0(file: Path) -> None:
    file.write_text("metrics: [{name: made, source: orders, entity: [], function: sum_per_min}]")
    ran = tried(file, *({"metric": "orders", "value": 5, "time": 60 * minute} for minute in range(4)))
    assert ran.exit_code == 0, ran.output
    assert "         5  (all)" in ran.stdout


def test_a_trial_says_that_reports_of_a_counter_are_increments(file: Path, tmp_path: Path) -> None:
    file.write_text("metrics: [{name: a, source: orders, function: avg}, {name: b, source: orders, function: sum}]")
    sum_ = {"aggregationTemporality": 1, "isMonotonic": True, "dataPoints": [{"timeUnixNano": "1", "asInt": "5"}]}
    request = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "orders", "sum": sum_}]}]}]}
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(request))

    ran = run("try", file, recorded)

    first, second = ran.stdout.split("\n\n")[1:]
    assert "orders is a counter and each point an increment: avg is of increments" in first
    assert "increment" not in second


def test_a_trial_without_points_says_where_to_find_some(file: Path, tmp_path: Path) -> None:
    ran = run("try", file, "--segments", tmp_path / "none")
    assert ran.exit_code == 1
    assert "name the folder of sealed segments with --segments" in ran.output
    recorded = tmp_path / "recorded.json"
    recorded.write_text('{"metric": ')
    ran = run("try", file, recorded)
    assert ran.exit_code == 1
    assert f"{recorded}: not read as events: not JSON" in ran.output
    assert run("try", file, recorded, "--listen", "127.0.0.1:0").exit_code == 2


@pytest.mark.parametrize("name", ["services", "prometheus"])
def test_init_writes_a_set_that_is_also_among_the_examples(name: str, tmp_path: Path) -> None:
    out = tmp_path / "definitions.yaml"
    assert run("init", name, "--out", out).exit_code == 0
    assert run("init", name, "--out", out).exit_code == 2
    assert load_definitions(out).metrics
    example = Path(__file__).parents[2] / "examples" / "definitions" / f"{name}.yaml"
    assert out.read_text() == example.read_text() == (SETS / f"{name}.yaml").read_text()
