"""A real Prometheus that scrapes itself and writes to us: what we count is what it says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import MissingRequirement
from penstock.model.point import PointKind
from penstock.receive.http_receiver import HttpReceiver
from penstock.testing import wait_until
from tests.conftest import missing
from tests.receive.support import KeepingSink
from tests.servers import Prometheus

pytestmark = pytest.mark.server
COUNTER = "process_cpu_seconds_total"
TYPES = {
    "prometheus_http_requests_total": PointKind.COUNTER,
    "prometheus_http_request_duration_seconds_bucket": PointKind.COUNTER,
    "go_goroutines": PointKind.GAUGE,
}


class Scraping(Prometheus):
    """It scrapes itself every 200 ms, and writes what it finds to `port`."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder)
        (folder / "prometheus.yml").write_text(
            f"""
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: itself
    static_configs: [{{targets: ["127.0.0.1:{self.port}"]}}]
remote_write:
  - url: http://127.0.0.1:{port}/api/v1/write
    queue_config: {{batch_send_deadline: 200ms}}
    metadata_config: {{send_interval: 300ms}}
"""
        )


@pytest.fixture
def scraping(http: HttpReceiver, tmp_path: Path) -> Iterator[Scraping]:
    try:
        server = Scraping(tmp_path / "prometheus", http.port)
    except MissingRequirement as error:
        missing(error)
    with server:
        yield server


def values_of(server: Prometheus, name: str, at: float) -> dict[float, float]:
    """What it says of its only series of that name, by time."""
    (series,) = server.query(f"{name}[1h]", at)
    return {round(float(time), 3): float(value) for time, value in series["values"]}


def test_what_a_real_prometheus_writes_adds_up_to_what_it_says(scraping: Scraping, sink: KeepingSink) -> None:
    wait_until(lambda: len(sink.points(COUNTER)) >= 8 and len(sink.points("up")) >= 8, 60)
    wait_until(lambda: TYPES.keys() <= {chunk.metric for chunk in sink.chunks})  # a series has a way of its own to us
    increments, ups = sink.points(COUNTER, PointKind.COUNTER), sink.points("up")
    last = max(row["time"] for row in increments).timestamp()
    first = min(row["time"] for row in increments).timestamp()
    scraped, up = (values_of(scraping, name, at=last + 60) for name in (COUNTER, "up"))
    start = max(time for time in scraped if time < first)

    assert {round(row["time"].timestamp(), 3): row["value"] for row in ups}.items() <= up.items()
    assert 1.0 in up.values()  # and 0 where a busy machine was too slow to be scraped in time
    assert increments[0]["labels"] == {"instance": f"127.0.0.1:{scraping.port}", "job": "itself"}
    total = sum(row["value"] for row in increments if row["time"].timestamp() <= last)
    assert total == pytest.approx(scraped[round(last, 3)] - scraped[start])
    assert {chunk.metric: chunk.kind for chunk in sink.chunks if chunk.metric in TYPES} == TYPES
