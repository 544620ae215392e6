"""Definitions in a running service, with real clients: right numbers, or a warning."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.model.finals import with_finals
from penstock.model.level import Level
from penstock.model.partial import PARTIALS
from penstock.model.segment import read, sealed
from penstock.testing import wait_until
from tests.service.running import Running
from tests.service.sdk_services import APDEX, ERRORS, REQUESTS, SERVICES, serve_requests

EXAMPLES = Path(__file__).parents[2] / "examples" / "definitions"
# As the set for services was before: it fits no SDK.
MISFIT = """
metrics:
  - {name: by_service, source: http.server.request.duration, entity: [service], function: avg}
  - {name: statements, source: db.query.duration, entity: [service], function: avg}
"""


def day_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Final values of everything that is sealed, as of one day, by metric and entity."""
    partials = pa.concat_tables([read(folder / segment.name) for segment in sealed(folder)])
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

    named = {(line.get("definitions") or line["definition"], line.get("label")) for line in warnings()}
    assert len(warnings()) == 2
    assert named == {("statements", None), ("by_service", "service")}
