"""Private servers that scrape, are scraped, or keep what was scraped, as those of `tests.servers`."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.servers import Prometheus, Server, provide

INTERVAL = "250ms"


def body_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


class NodeExporter(Server):
    """Figures of this machine: about a thousand series."""

    name = "node-exporter"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = provide("prometheus-node-exporter", "prometheus-node-exporter")

    def command(self) -> tuple[list[str], dict[str, str]]:
        return [self._program, f"--web.listen-address=127.0.0.1:{self.port}"], {"GOMAXPROCS": "1"}


class ScrapingPrometheus(Prometheus):
    """Scrapes itself and the targets, and writes what it finds to `port` over several connections."""

    def __init__(self, folder: Path, port: int, *targets: int) -> None:
        super().__init__(folder)
        others = ", ".join(f'"127.0.0.1:{target}"' for target in targets)
        (folder / "prometheus.yml").write_text(
            f"""
global: {{scrape_interval: {INTERVAL}, scrape_timeout: {INTERVAL}}}
scrape_configs:
  - job_name: itself
    static_configs: [{{targets: ["127.0.0.1:{self.port}"]}}]
  - job_name: others
    static_configs: [{{targets: [{others}]}}]
remote_write:
  - url: http://127.0.0.1:{port}/api/v1/write
    queue_config: {{batch_send_deadline: 100ms, min_shards: 3, max_samples_per_send: 200}}
    metadata_config: {{send_interval: 500ms}}
"""
        )

    def failed_samples(self) -> float:
        """How many samples it has given up, because of an answer that told it to."""
        lines = body_of(f"{self.url}/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("prometheus_remote_storage_samples_f"))


class VictoriaMetrics(Server):
    """A single node with its data in a folder of its own."""

    name = "VictoriaMetrics"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = provide("victoria-metrics", "victoria-metrics")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        arguments = [f"-storageDataPath={self.folder / 'data'}", f"-httpListenAddr=127.0.0.1:{self.port}"]
        return [self._program, *arguments], {"GOMAXPROCS": "1"}

    def newest(self, metric: str) -> int:
        """The time of the newest sample of a metric, in milliseconds; 0 if there is none."""
        return max((max(samples) for labels, samples in self.export(metric)), default=0)

    def export(self, metric: str = "") -> list[tuple[dict[str, str], dict[int, float]]]:
        """All series, or those of one metric: labels, and values by milliseconds."""
        body_of(f"{self.url}/internal/force_flush")
        match = metric or "%7B__name__!=%22%22%7D"
        lines = body_of(f"{self.url}/api/v1/export?match[]={match}").splitlines()
        series = map(json.loads, lines)
        return [(one["metric"], dict(zip(one["timestamps"], map(float, one["values"])))) for one in series]


class VmAgent(Server):
    """Scrapes the targets, and writes what it finds to each of the stores."""

    name = "vmagent"

    def __init__(self, folder: Path, targets: Sequence[int], stores: Sequence[int]) -> None:
        super().__init__(folder)
        self._program = provide("victoria-metrics", "vmagent")
        self._stores = stores
        listed = ", ".join(f'"127.0.0.1:{target}"' for target in targets)
        (folder / "scrape.yml").write_text(
            f"""
global: {{scrape_interval: {INTERVAL}, scrape_timeout: {INTERVAL}}}
scrape_configs:
  - job_name: targets
    static_configs: [{{targets: [{listed}]}}]
"""
        )

    def command(self) -> tuple[list[str], dict[str, str]]:
        arguments = [
            f"-promscrape.config={self.folder / 'scrape.yml'}",
            f"-httpListenAddr=127.0.0.1:{self.port}",
            f"-remoteWrite.tmpDataPath={self.folder / 'data'}",
            "-remoteWrite.flushInterval=100ms",
            *(f"-remoteWrite.url=http://127.0.0.1:{store}/api/v1/write" for store in self._stores),
        ]
        return [self._program, *arguments], {"GOMAXPROCS": "1"}

    def refused_packets(self) -> float:
        """How many packets it has dropped, because of an answer that told it to."""
        lines = body_of(f"http://127.0.0.1:{self.port}/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vmagent_remotewrite_packets_dropped"))
