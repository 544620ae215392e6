"""Power cuts under the whole service, on a real file system: what was answered at `fsync` is in the tables, once.

make soak PART=power    PENSTOCK_CUTS=10 for each kind of tables; PENSTOCK_SEED=… repeats a campaign
"""

import http.client
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.compute as pc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA

from penstock.model.level import Level
from penstock.tables.port import open_tables
from penstock.testing import wait_until
from tests.cut_disk import CutDisk
from tests.service.running import HEADERS, Running

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(7200)]
CUTS = int(os.environ.get("PENSTOCK_CUTS", "10"))
SEED = int(os.environ.get("PENSTOCK_SEED") or random.SystemRandom().randrange(1 << 32))
PACE = 0.05  # seconds between two requests
PLACES = 3  # points of a request, each of a series of its own
# Everything happens often: a batch every half second, and segments go as soon as they are in the tables.
SETTINGS = """
segments: {queue: {durability: fsync}}
spark: {master: 'local[1]', trigger: 500ms, keep_segments: 1s, conf: {spark.driver.memory: 512m}}
tables: {fold_every: 4s, maintain_every: 7s}
"""


class Ledger(threading.Thread):
    """Sends requests, each with series of its own, and notes those that were answered as safe."""

    def __init__(self, port: int, name: str) -> None:
        super().__init__(name=f"ledger-{name}", daemon=True)
        self._port = port
        self._name = name
        self._enough = threading.Event()
        self.sent: list[str] = []
        self.answered: set[str] = set()

    def stop(self) -> None:
        self._enough.set()
        self.join()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        while not self._enough.wait(PACE):
            request = f"{self._name}-{len(self.sent)}"
            self.sent.append(request)
            try:
                connection.request("POST", "/v1/metrics", _body(request), HEADERS)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                continue
            if answer.status == 200:
                self.answered.add(request)


def _body(request: str) -> bytes:
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="orders")
    metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_DELTA
    metric.sum.is_monotonic = True
    now = time.time_ns()
    for place in range(PLACES):
        point = metric.sum.data_points.add(as_double=1.0, time_unix_nano=now, start_time_unix_nano=now - 1_000_000)
        point.attributes.add(key="request").value.string_value = request
        point.attributes.add(key="place").value.string_value = str(place)
    return bytes(message.SerializeToString())


class Machine:
    """The service on a disk whose power is cut. Its settings and its log lie elsewhere."""

    def __init__(self, folder: Path, disk: CutDisk, location: str) -> None:
        self.disk = disk
        self._seen: set[Path] = set()
        self.location = location.format(disk.folder)
        (folder / "service").mkdir()
        self.running = Running(
            folder / "service", SETTINGS, data_dir=str(disk.folder), tables_location=location.format(disk.folder)
        )

    def cut_power(self) -> None:
        processes = [psutil.Process(self.running.process.pid)] if self.running.process else []
        processes += [child for one in processes for child in one.children(recursive=True)]
        self.disk.cut()
        for one in processes:
            if one.is_running():
                one.kill()
        self.running.wait()
        psutil.wait_procs(processes, 30)
        self.disk.come_back()

    def commits(self) -> int:
        """How often a table was seen to change: by an entry of Delta's log, or by a folder of Parquet's."""
        for pattern in ("tables/*/_delta_log/*.json", "tables/*/batch-*", "tables/*/final-*"):
            self._seen.update(self.disk.folder.glob(pattern))
        return len(self._seen)

    def has_sealed_all(self) -> bool:
        """Whether nothing waits before Spark any more."""
        return _metric(self, 'penstock_queue_size{queue="rollup"}') == 0

    def found(self, level: Level) -> Counter[str]:
        """The points of each request in a table."""
        rows = open_tables(self.location).partials(level)
        counted: Counter[str] = Counter()
        for row in rows.filter(pc.equal(rows["metric"], "orders")).to_pylist():
            counted[json.loads(row["entity"])["request"]] += row["count"]
        return counted


@pytest.fixture(params=["{}/tables", "parquet:{}/tables"], ids=["delta", "parquet"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    with CutDisk(tmp_path / "disk.img", tmp_path / "disk", is_private=True) as disk:
        made = Machine(tmp_path, disk, request.param)
        try:
            yield made
        finally:
            made.running.kill()


def test_what_was_answered_is_in_the_tables_once_after_power_cuts_at_any_moment(machine: Machine) -> None:
    _say(f"\nPENSTOCK_SEED={SEED} PENSTOCK_CUTS={CUTS}")
    rng = random.Random(SEED)
    ledgers = []
    for number in range(CUTS):
        machine.running.start()
        ledgers.append(Ledger(machine.running.port, str(number)))
        ledgers[-1].start()
        moment = _wait_for_a_moment(machine, ledgers[-1], rng)
        machine.cut_power()
        ledgers[-1].stop()
        _say(f"cut {number + 1} {moment}: {len(ledgers[-1].answered)} of {len(ledgers[-1].sent)} requests answered")
    machine.running.start()
    answered = {request for ledger in ledgers for request in ledger.answered}
    sent = {request for ledger in ledgers for request in ledger.sent}
    wait_until(lambda: machine.has_sealed_all() and _metric(machine, "penstock_spark_lag_segments") == 0, 600)

    for level in Level:
        found = machine.found(level)
        assert answered <= found.keys(), f"lost: {sorted(answered - found.keys())[:10]}"
        assert found.keys() <= sent
        assert {request: count for request, count in found.items() if count != PLACES} == {}
    torn = _metric(machine, "penstock_tables_torn_files")
    _say(f"{len(answered)} requests answered, {len(found)} in the tables, {len(sent)} sent, {torn:.0f} files torn")
    assert machine.running.stop() == 0


def _wait_for_a_moment(machine: Machine, ledger: Ledger, rng: random.Random) -> str:
    """One in five before Spark is up; else within a batch or a fold, each of which changes tables, or between them."""
    if rng.random() < 0.2:
        answers = rng.randrange(1, 50)
        wait_until(lambda: len(ledger.answered) >= answers, 300)
        return f"after {answers} answers"
    changes = machine.commits() + rng.randrange(1, 20)
    wait_until(lambda: machine.commits() >= changes, 600)
    return f"at {changes} changes of tables"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _metric(machine: Machine, name: str) -> float:
    lines = machine.running.ask("/metrics")[1].splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), -1.0)
