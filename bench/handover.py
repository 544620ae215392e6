"""What it costs that every cumulative stream is kept by one process: `penstock run --processes N` under load.

The same requests (14 counters, 6 histograms of 11 buckets, 1 000 points each) once as deltas, which are counted where
they arrive, and once as cumulative points, of which each process hands on what the others keep. So half of them travel
with two processes. Figures are of all receiving processes together; the load shares the machine with them.

    python -m bench.handover [--processes 2] [--seconds 5] [--series 10000] [--senders 40]
"""

import argparse
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from bench.ingest import Feeder
from bench.ingest_requests import CUMULATIVE, DELTA, POINTS, SENDERS, otlp_requests, remote_writes

KINDS = ["counter"] * 14 + ["histogram"] * 6
START = 60.0  # seconds


@contextmanager
def running(processes: int) -> Iterator[tuple[int, list[psutil.Process]]]:
    """The port and the receiving processes of a service."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        port, admin = _free_port(), _free_port()
        flags = ["--processes", str(processes), "--receivers-http-listen", f"127.0.0.1:{port}", "--admin-listen"]
        flags += [f"127.0.0.1:{admin}", "--receivers-grpc-enabled", "false", "--spark-enabled", "false"]
        with open(Path(folder) / "log", "wb") as log:
            command = [sys.executable, "-m", "penstock", "run", *flags]
            service = subprocess.Popen(command, cwd=folder, stderr=log)
            try:
                _await(admin)
                receivers = psutil.Process(service.pid).children() if processes > 1 else [psutil.Process(service.pid)]
                yield port, receivers
            finally:
                service.terminate()
                service.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(admin: int) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=5):
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
    raise TimeoutError("penstock run does not start")


def measure(name: str, feeder: partial[Feeder], processes: int, seconds: float) -> None:
    with running(processes) as (port, receivers):
        load = feeder(port=port)
        load.run(lambda slot: slot >= 3 * len(load.fills))

        def used() -> float:
            return sum(sum(receiver.cpu_times()[:2]) for receiver in receivers)

        load.latencies.clear()
        began, before, first = time.perf_counter(), used(), load.sent
        load.run(lambda _: time.perf_counter() > began + seconds)
        took, cpu, points = time.perf_counter() - began, used() - before, (load.sent - first) * POINTS
        ranked = statistics.quantiles(load.latencies, n=100)
        memory = sum(receiver.memory_info().rss for receiver in receivers) / 1e6
    print(
        f"| {name} | {processes} | {points / took / 1e3:,.0f} k | {cpu / points * 1e6:.2f} s | "
        f"{ranked[49] * 1e3:.0f} ms | {ranked[98] * 1e3:.0f} ms | {memory:,.0f} MB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--senders", type=int, default=SENDERS)
    chosen = parser.parse_args()
    loads = {
        "OTLP, deltas": ("otlp", otlp_requests(chosen.series, kinds=KINDS, temporality=DELTA)),
        "OTLP, cumulative": ("otlp", otlp_requests(chosen.series, kinds=KINDS, temporality=CUMULATIVE)),
        "remote write, half of it counters": ("remote_write", remote_writes(chosen.series)),
    }
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    print("| load | processes | points/s (wall) | CPU per M points | p50 | p99 | memory |")
    print("|---|---|---|---|---|---|---|")
    for processes in chosen.processes:
        for name, (kind, fills) in loads.items():
            measure(name, partial(Feeder, kind=kind, fills=fills, senders=chosen.senders), processes, chosen.seconds)


if __name__ == "__main__":
    main()
