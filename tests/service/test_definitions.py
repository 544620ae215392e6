"""Definitions in a running service, with real clients: right numbers, or a warning."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from penstock.errors import MissingRequirement
from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.model.segment import read_segment, sealed
from penstock.testing import wait_until
from tests.conftest import missing
from tests.scrapers import ScrapingPrometheus
from tests.servers import free_port
from tests.service.running import Running
from tests.service.sdk_services import APDEX, ERRORS, REQUESTS, SERVICES, Recorder, answer_requests, serve_requests

EXAMPLES = Path(__file__).parents[2] / "examples" / "definitions"
# As the set for services was before: it fits no SDK.
MISFIT = """
metrics:
  - {name: by_service, source: http.server.request.duration, entity: [service], function: avg}
  - {name: statements, source: db.query.duration, entity: [service], function: avg}
"""


def day_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Final values of everything that is sealed, as of one day, by metric and entity."""
    partials = pa.concat_tables([read_segment(folder / segment.name) for segment in sealed(folder)])
    place = PARTIALS.get_field_index("bucket")
    days = pa.array([0] * partials.num_rows, pa.int64()).cast(PARTIALS.field("bucket").type)
    rows = with_finals(partials.set_column(place, "bucket", days), Level.DAY).to_pylist()
    return {(row["metric"], row["entity"]): row for row in rows}


def test_the_set_for_services_gives_the_right_numbers_for_what_an_sdk_sends(tmp_path: Path) -> None:
    (tmp_path / "services.yaml").write_text((EXAMPLES / "services.yaml").read_text())
    text = "data_dir: ./data\nspark: {enabled: false}\ndefinitions: services.yaml\n"  # found beside penstock.yaml
    (tmp_path / "data").mkdir()
    with Running(tmp_path, text) as running:
        serve_requests(running.port)
        assert running.stop() == 0, running.text()

    rows = day_of(tmp_path / "data" / "segments")
    assert "http.server.request.duration" not in {metric for metric, _ in rows}
    for name, (good, slow) in SERVICES.items():
        entity = json.dumps({"service.name": name}, separators=(",", ":"))
        mean = (good * (REQUESTS - ERRORS) + slow * ERRORS) / REQUESTS
        assert rows["service_apdex", entity]["value"] == pytest.approx(APDEX[name])
        assert rows["service_sla", entity]["value"] == pytest.approx(90.0)
        assert rows["service_error_rate", entity]["value"] == pytest.approx(10.0)
        assert rows["service_resp_time", entity]["value"] == pytest.approx(mean)
        assert rows["service_cpm", entity]["count"] == REQUESTS
        endpoint = {"http.request.method": "GET", "http.route": "/cart", "service.name": name}
        assert rows["endpoint_sla", json.dumps(endpoint, separators=(",", ":"))]["value"] == pytest.approx(90.0)


@pytest.mark.server
def test_the_set_for_prometheus_gives_the_right_shares_of_counters(tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())
    by_name = {entry["name"]: entry for entry in document["metrics"]}
    by_name["prometheus_error_rate"]["match"] = {"code": {"matches": "4.."}}  # a question that makes no sense is a 400
    by_name["prometheus_error_rate"]["keep_source"] = True
    (tmp_path / "metrics.yaml").write_text(yaml.safe_dump(document))
    running = Running(tmp_path, "spark: {enabled: false}\ndefinitions: metrics.yaml\n")
    try:
        scraping = ScrapingPrometheus(tmp_path / "prometheus", running.port)
    except MissingRequirement as error:
        missing(error)

    def ask_nonsense() -> bool:
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{scraping.url}/api/v1/query?query=(", timeout=10)
        return False

    def counted() -> float:
        """Refused questions, as the tables would say: what came after the first was scraped."""
        with suppress(FileNotFoundError, pa.ArrowInvalid):
            rows = day_of(tmp_path / "segments")
            return float(sum(row["sum"] for (metric, entity), row in rows.items() if is_refusal(metric, entity)))
        return 0.0

    def is_refusal(metric: str, entity: str) -> bool:
        return metric == "prometheus_http_requests_total" and json.loads(entity)["code"] == "400"

    with running, scraping:
        wait_until(lambda: ask_nonsense() or counted() >= 30)
        assert running.stop() == 0, running.text()

    rows = day_of(tmp_path / "segments")
    kept = {entity: row["sum"] for (metric, entity), row in rows.items() if metric == "prometheus_http_requests_total"}
    assert {json.loads(entity)["job"] for entity in kept} == {"itself"}
    refused = sum(count for entity, count in kept.items() if is_refusal("prometheus_http_requests_total", entity))
    job = '{"job":"itself"}'
    assert rows["prometheus_error_rate", job]["value"] == pytest.approx(100 * refused / sum(kept.values()))
    assert rows["job_availability", job]["value"] == pytest.approx(100 * up_share(rows))
    assert any(metric == "process_memory" and '"instance"' in entity for metric, entity in rows)
    (scrapes,) = [row for (metric, entity), row in rows.items() if is_scrape(metric, entity)]
    assert scrapes["count"] > 0  # a classic histogram of Prometheus is a distribution
    assert scrapes["function"] == "percentile(6)"
    assert 0 < scrapes["p50"] <= scrapes["p99"] < 10


def is_scrape(metric: str, entity: str) -> bool:
    return metric == "prometheus_percentile" and json.loads(entity)["handler"] == "/metrics"


def up_share(rows: dict[tuple[str, str], dict[str, Any]]) -> float:
    """Of the scrapes of that job, how many succeeded: `up` is kept as it is, too."""
    ups = [row for (metric, entity), row in rows.items() if metric == "up" and json.loads(entity)["job"] == "itself"]
    return float(sum(row["sum"] for row in ups) / sum(row["count"] for row in ups))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_running_service_warns_once_of_what_does_not_fit_what_comes(tmp_path: Path, processes: str) -> None:
    (tmp_path / "metrics.yaml").write_text(MISFIT)
    text = "spark: {enabled: false}\ndefinitions: metrics.yaml\ndefinitions_warn_after: 500ms\n"

    def warnings() -> list[dict[str, Any]]:
        return [line for line in running.log() if line["level"] == "warning" and "definitions try" in str(line)]

    with Running(tmp_path, text, processes=processes) as running:
        serve_requests(running.port)
        wait_until(lambda: len(warnings()) == 2)
        serve_requests(running.port)
        assert running.stop() == 0, running.text()

    unmatched, unseen = sorted(warnings(), key=lambda line: "label" in line)
    assert "statements" in unmatched["definitions"].split(", ")  # a slow machine may have sent nothing by then
    assert (unseen["definition"], unseen["label"]) == ("by_service", "service")


def trial(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "definitions", "try", str(EXAMPLES / "services.yaml"), *words]
    return subprocess.Popen([*command, "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_right(tried: subprocess.Popen[str]) -> None:
    """What the trial says of two services is what they recorded."""
    out, errors = tried.communicate(timeout=60)
    assert tried.returncode == 1, errors  # neither service has a database
    found = {one["definition"]: one for one in json.loads(out)}
    assert found["database_resp_time"]["problems"] == ["no point of db.client.operation.duration came"]
    for name, value in (("service_apdex", APDEX), ("service_sla", 90.0), ("service_error_rate", 10.0)):
        one = found[name]
        assert (one["taken"], one["points"], one["problems"]) == (2 * REQUESTS, 2 * REQUESTS, [])
        expected = value if isinstance(value, dict) else dict.fromkeys(SERVICES, value)
        given = {series["labels"]["service.name"]: series["value"] for series in one["series"]}
        assert given == pytest.approx(expected)


def test_definitions_are_tried_with_what_an_sdk_sends_now(tmp_path: Path) -> None:
    port = free_port()
    tried = trial(tmp_path, "--listen", f"127.0.0.1:{port}", "--for", "1h")
    assert tried.stderr is not None
    assert f"listening on 127.0.0.1:{port}" in tried.stderr.readline()
    serve_requests(port)
    tried.send_signal(signal.SIGINT)
    assert_right(tried)


def test_definitions_are_tried_with_recorded_requests(tmp_path: Path) -> None:
    for name in SERVICES:
        recorder = Recorder(tmp_path / "recorded.jsonl")
        answer_requests(name, PeriodicExportingMetricReader(recorder, export_interval_millis=3_600_000))
    assert_right(trial(tmp_path, "recorded.jsonl"))


def test_definitions_are_tried_with_what_a_service_has_sealed(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        serve_requests(running.port)
        assert running.stop() == 0, running.text()
    assert_right(trial(tmp_path))
