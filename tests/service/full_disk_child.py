"""What `test_full_disk` runs with a disk of 16 MB under `<folder>/data`: a relay whose destination is down.

python -m tests.service.full_disk_child <folder> <durability> <how it ends: kill or stop>
"""

import http.client
import os
import re
import sys
from pathlib import Path

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving
from tests.service.running import HEADERS, Running

REQUESTS = 60
FILLER_BYTES = 900_000  # of each: the disk takes about 17 of them
LATE = 4


class FullDisk:
    """A service whose queue fills the disk while its destination is down, and what it answered with success."""

    def __init__(self, folder: Path, durability: str) -> None:
        self.destination = Misbehaving()
        with self.destination.running():
            pass  # it has a port now, and is down
        self.service = Running(
            folder,
            "spark: {enabled: false}\npipelines: {rollup: false}\n",
            data_dir=str(folder / "data"),
            exporter_type="otlp_http",
            exporter_url=self.destination.url,
            exporter_compression="none",
            queue_durability=durability,
            queue_inmemory_blocks="10",
            queue_retry_interval="0.1",
            queue_max_retry_delay="0.2",
            shutdown_timeout="5s",
            intake_repeat_window="0",  # its table takes more than this disk has
        )
        self.durability = durability
        self.answered: list[int] = []
        self.refused = 0

    def fill(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=30)
        for number in range(REQUESTS):
            connection.request("POST", "/v1/metrics", numbered(number), HEADERS)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                self.answered.append(number)
            else:
                assert answer.status == 503, answer.status
                self.refused += 1

    def arrived(self) -> set[int]:
        return {number_of(request.body) for request in self.destination.requests}


def numbered(number: int) -> bytes:
    """A request with its number, and enough beside it that no compression makes small."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name=f"{number}")
    metric.gauge.data_points.add(as_double=1.0).attributes.add(key="x").value.string_value = os.urandom(
        FILLER_BYTES // 2
    ).hex()
    return bytes(request.SerializeToString())


def number_of(body: bytes) -> int:
    request = ExportMetricsServiceRequest.FromString(body)
    return int(request.resource_metrics[0].scope_metrics[0].metrics[0].name)


def kill(full: FullDisk) -> None:
    """What was answered with success arrives after `kill -9`, all of it."""
    with full.service as service:
        full.fill()
        assert full.answered
        assert full.refused
        service.kill()
        with full.destination.running():
            service.start()
            wait_until(lambda: full.arrived() >= set(full.answered), 30.0)
            assert service.stop() == 0


def stop(full: FullDisk) -> None:
    """What was answered with success arrives after a stop, or the stop says how much of it is lost."""
    with full.service as service:
        full.fill()
        code = service.stop()
        told = [re.fullmatch(r"queue relay lost (\d+) batches .*", line.get("what", "")) for line in service.log()]
        lost = sum(int(found[1]) for found in told if found)
        assert bool(lost) == (full.durability == "memory")
        assert code == (LATE if lost else 0), (code, service.text())
        with full.destination.running():
            service.start()
            wait_until(lambda: len(full.arrived()) == len(full.answered) - lost, 30.0)
            assert service.stop() == 0
    assert full.arrived() <= set(full.answered)


if __name__ == "__main__":
    the_disk = FullDisk(Path(sys.argv[1]), sys.argv[2])
    {"kill": kill, "stop": stop}[sys.argv[3]](the_disk)
