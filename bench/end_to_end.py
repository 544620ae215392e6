"""From sender to table, as a user has it: senders, `penstock run` and Spark on the same machine.

Senders push delta sums as fast as they are answered. A probe every half second shows how long it takes from its answer
to its row in the minute table. The lag is flat if the second half of a run lags no more than half again as long as the
first; if it is not, the run is repeated at a lower rate. At the end every answered point must be in every table.

    python -m bench.end_to_end [--seconds 30] [--series 10000] [--rounds 1]
        [--before CHECKOUT]    another checkout with its own .venv, run in turns with this one; prints the ratio
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from tests.servers import free_port

from bench.ingest import Feeder
from bench.ingest_requests import POINTS, otlp_requests

LEVELS = ("minute", "hour", "day")
PROBE = "probe"
KINDS = ["delta"] * 20
FLAT = 1.5  # the second half of a run may lag so many times as long as the first
EVERY = 0.5  # seconds between two probes


class Service:
    """`penstock run` of a checkout, in a folder of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self.admin, self.port = free_port(), free_port()
        self.tables = folder / "tables"
        (folder / "penstock.yaml").write_text(
            f"data_dir: {folder}\ntables: {{location: {self.tables}}}\nadmin: {{listen: '127.0.0.1:{self.admin}'}}\n"
            f"receivers: {{http: {{listen: '127.0.0.1:{self.port}'}}, grpc: {{enabled: false}}}}\n"
            "segments: {queue: {max_bytes: 4Gi}}\n"
        )
        self.log = folder / "log.jsonl"
        command = [python, "-m", "penstock", "run", "-c", str(folder / "penstock.yaml")]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)

    def wait_until_ready(self, timeout: float = 120.0) -> None:
        """Until requests are taken and Spark works."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if b"Spark works" in self.log.read_bytes() and self._is_ready():
                return
            time.sleep(0.2)
        raise RuntimeError(f"penstock run did not start:\n{self.log.read_text()}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(300) != 0:
            raise RuntimeError(f"penstock run ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Probes:
    """Probes that count up: the greatest one in the table says which have arrived."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._enough = threading.Event()
        self._answered: dict[int, float] = {}
        self.lags: dict[int, float] = {}
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._watch)]
        for thread in self._threads:
            thread.start()

    @property
    def sent(self) -> int:
        return len(self._answered)

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=60)
        number = 0
        while not self._enough.wait(EVERY):
            number += 1
            body = json.dumps([{"metric": PROBE, "value": number}])
            connection.request("POST", "/v1/events", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"a probe was refused: {answer.status}")
            self._answered[number] = time.monotonic()

    def _watch(self) -> None:
        seen: set[str] = set()
        while not self._enough.wait(0.2):
            try:
                files = set(DeltaTable(str(self._service.tables / "minute")).file_uris())
            except Exception:  # the table is made by the first batch
                continue
            arrived = max((greatest_probe(file) for file in files - seen), default=0)
            now = time.monotonic()
            for number, answered in self._answered.items():
                if number <= arrived and number not in self.lags:
                    self.lags[number] = now - answered
            seen |= files


def greatest_probe(file: str) -> int:
    try:
        rows = pq.read_table(file, columns=["max"], filters=[("metric", "=", PROBE)])
    except OSError:
        return 0  # compacted in between
    return int(pc.max(rows["max"]).as_py() or 0)


def points_of(tables: Path, level: str) -> int:
    """The points that a table holds, without the probes."""
    rows = DeltaTable(str(tables / level)).to_pyarrow_dataset().to_table(columns=["metric", "count"])
    return int(pc.sum(rows.filter(pc.not_equal(rows["metric"], PROBE))["count"]).as_py() or 0)


@dataclass(frozen=True)
class Run:
    """What one run showed."""

    rate: float
    lag: float
    slowest: float
    is_flat: bool
    points: int


def run(python: str, series: int, seconds: float, pace: float) -> Run:
    """One service, loaded for so long; every answered point is then looked for in every table."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        service = Service(python, Path(folder))
        try:
            service.wait_until_ready()
            fills = otlp_requests(series, kinds=KINDS)
            feeder = Feeder(service.port, "otlp", fills)
            feeder.run(lambda slot: slot >= 2 * len(fills))  # warms up
            probes = Probes(service)
            first, began = feeder.sent, time.monotonic()
            feeder.run(lambda _: time.monotonic() - began > seconds, pace)
            took, sent = time.monotonic() - began, feeder.sent - first
            time.sleep(EVERY)
            deadline = time.monotonic() + 120
            while len(probes.lags) < probes.sent and time.monotonic() < deadline:
                time.sleep(0.2)
            probes.stop()
            service.stop()
        finally:
            service.kill()
        for level in LEVELS:
            held, answered = points_of(service.tables, level), feeder.sent * POINTS
            if held != answered:
                raise RuntimeError(f"{level}: {answered:,} points were answered, {held:,} are in the table")
        lags = [lag for _, lag in sorted(probes.lags.items())]
        early, late = lags[2 : len(lags) // 2], lags[len(lags) // 2 :]  # the first batches still warm Spark up
        is_flat = statistics.median(late) <= FLAT * statistics.median(early)
        return Run(sent * POINTS / took, statistics.median(lags), max(lags), is_flat, feeder.sent * POINTS)


def highest(python: str, series: int, seconds: float) -> Run:
    """The first run with a flat lag: at full load, then at lower and lower rates."""
    pace = 0.0
    while True:
        found = run(python, series, seconds, pace)
        if found.is_flat or found.rate < 50_000:
            return found
        print(f"  {found.rate / 1e3:,.0f} k points/s: the lag grows, {found.slowest:.1f} s in the end", flush=True)
        pace = POINTS / (0.85 * found.rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, help="another checkout, set up, to run in turns with this one")
    chosen = parser.parse_args()
    arms = {"this checkout": sys.executable}
    if chosen.before is not None:
        arms["before"] = str(chosen.before / ".venv" / "bin" / "python")
    found: dict[str, list[Run]] = {name: [] for name in arms}
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, delta sums over {chosen.series:,} series\n")
    for _ in range(chosen.rounds):
        for name, python in arms.items():
            one = highest(python, chosen.series, chosen.seconds)
            found[name].append(one)
            print(
                f"{name}: {one.rate / 1e3:,.0f} k points/s, {'flat' if one.is_flat else 'growing'} lag, a row after "
                f"{one.lag:.1f} s (slowest {one.slowest:.1f} s), {one.points:,} points exact at every level",
                flush=True,
            )
    if len(arms) > 1:
        ours, before = (statistics.median(one.rate for one in found[name]) for name in ("this checkout", "before"))
        print(f"\nratio {ours / before:.2f}")


if __name__ == "__main__":
    main()
