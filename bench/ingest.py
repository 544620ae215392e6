"""From request to segment: how many points a second one core takes, what a million costs, how soon they are answered.

The edge (receiver, L1, durable queue at `disk`, segments) is one process on one core; the load comes from another
process on the others. Rates are given by the wall clock and by the edge's processor time (points a second if it had
the core for itself), since the machine may be busy with other things. For remote writes, Prometheus and VictoriaMetrics
are measured beside it in the same way.

    python -m bench.ingest [--seconds 5] [--series 1000 10000 100000] [--only otlp] [--no-peers] [--senders 40]
        [--shuffled]    points of a metric in another order in every request (OTLP), as some SDKs and collectors have it
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from bench.ingest_peers import peers
from bench.ingest_requests import POINTS, SENDERS, otlp_requests, remote_writes
from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.batch import ThreadPolicy
from penstock.export.exporters.segment_exporter import SegmentExporter
from penstock.export.send_queue import SendQueue
from penstock.receive.config import HttpReceiverConfig
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from penstock.receive.recent_requests import RecentRequests
from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior

EDGE_CORE = 0
PATHS = {"otlp": "/v1/metrics", "remote_write": "/api/v1/write"}
HEADERS = {
    "otlp": "Content-Type: application/x-protobuf\r\n",
    "remote_write": "Content-Type: application/x-protobuf\r\nContent-Encoding: snappy\r\n"
    "X-Prometheus-Remote-Write-Version: 0.1.0\r\n",
}


# -- the edge ----------------------------------------------------------------------------------------------------------


def edge(folder: str, pipe: Connection, knows_repeats: bool) -> None:
    """A whole edge in one process; ends when the pipe says so."""
    os.sched_setaffinity(0, {EDGE_CORE})
    config = FastQueueConfig(durability=Durability.DISK, full_behavior=FullBehavior.BLOCK, max_bytes="8Gi")
    queue = FastQueue(Path(folder) / "queue", config)
    segments = SegmentExporter(Path(folder) / "segments")
    sender = SendQueue(queue, segments).start()
    l1 = L1.with_own_queue(
        "bench", queue.push_many, L1Config(durability=Durability.DISK, max_bytes="256Mi"), threads=ThreadPolicy.fixed(1)
    )
    recent = RecentRequests(Path(folder) / "requests", 1_000_000, 900.0) if knows_repeats else None
    intake = Intake(l1, recent=recent).start()
    receiver = HttpReceiver(HttpReceiverConfig(port=0), intake).start()
    pipe.send(receiver.port)
    pipe.recv()
    receiver.close(10.0)
    intake.close(10.0)
    l1.close(10.0)
    sender.flush()
    sender.close(30.0)
    queue.close()
    pipe.send((segments.rows, segments.segments))


@contextmanager
def running_edge(*, knows_repeats: bool = True) -> Iterator[tuple[int, int]]:
    """The port and process id of an edge, which recognises requests that come again."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=edge, args=(folder, theirs, knows_repeats))
        process.start()
        try:
            port = ours.recv()
            assert process.pid is not None
            yield port, process.pid
            ours.send(None)
            ours.recv()
        finally:
            process.join(60)
            process.kill()


# -- the load ----------------------------------------------------------------------------------------------------------


@dataclass
class Feeder:
    """Sends requests over kept-alive connections, each of them only once, and waits for every answer."""

    port: int
    kind: str
    fills: list[Callable[[int, int], bytes]]
    senders: int = SENDERS
    path: str = ""
    sent: int = 0
    latencies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.time_ns()
        self._turns = [0] * self.senders
        head = f"POST {self.path or PATHS[self.kind]} HTTP/1.1\r\nHost: bench\r\n{HEADERS[self.kind]}Content-Length: "
        self._head = head.encode()

    def next(self, connection: int, of: int) -> bytes:
        """The next request of a connection. Each has series of its own, so that those come in the order of time."""
        places = range(connection, len(self.fills), of)
        count, turn = divmod(self._turns[connection], len(places))
        self._turns[connection] += 1
        with self._lock:
            self.sent += 1
        # Ten milliseconds for each turn: younger than the last, and never ahead of the clock by much.
        body = self.fills[places[turn]](self._began + count * 10_000_000, count + 1)
        return self._head + str(len(body)).encode() + b"\r\n\r\n" + body

    def run(self, until: Callable[[int], bool], pace: float = 0.0) -> None:
        """Send until told; with `pace`, one request every so many seconds, whether answered or not."""
        began = time.perf_counter()
        slots = iter(range(1 << 60))
        connections = min(self.senders, len(self.fills))

        def work(number: int) -> None:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    with self._lock:
                        slot = next(slots)
                    if until(slot):
                        return
                    request = self.next(number, connections)
                    due = time.perf_counter()
                    if pace:
                        due = began + slot * pace
                        time.sleep(max(0.0, due - time.perf_counter()))
                    connection.sendall(request)
                    _expect_success(connection)
                    self.latencies.append(time.perf_counter() - due)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _expect_success(connection: socket.socket) -> None:
    answer = b""
    while b"\r\n\r\n" not in answer:
        part = connection.recv(65536)
        if not part:
            raise ConnectionError(f"closed after {answer!r}")
        answer += part
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 204")):
        raise RuntimeError(answer[:500])
    lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = (int(lines[0].split(b":")[1]) if lines else 0) - len(rest)
    while left > 0:
        left -= len(connection.recv(left))


@dataclass(frozen=True)
class Figures:
    """What one run showed."""

    points_a_second: float
    per_core: float
    cpu_a_million: float
    p50: float
    p99: float
    megabytes: float


def measure(pid: int, feeder: Feeder, seconds: float) -> Figures:
    """All series once to warm up, full load for so long, then half of it."""
    process = psutil.Process(pid)
    feeder.run(lambda slot: slot >= 2 * len(feeder.fills))

    def cpu() -> float:
        times = process.cpu_times()
        return times.user + times.system

    deadline, before, first = time.perf_counter() + seconds, cpu(), feeder.sent
    began = time.perf_counter()
    feeder.run(lambda _: time.perf_counter() > deadline)
    took, used = time.perf_counter() - began, cpu() - before
    points = (feeder.sent - first) * POINTS
    feeder.latencies.clear()
    pace = 2 * took * POINTS / points
    feeder.run(lambda slot: slot * pace > seconds, pace)
    ranked = statistics.quantiles(feeder.latencies, n=100)
    memory = process.memory_info().rss / 1e6
    return Figures(points / took, points / used, used / points * 1e6, ranked[49], ranked[98], memory)


def show(name: str, series: int, figures: Figures) -> None:
    print(
        f"| {name} | {series:,} | {figures.points_a_second / 1e3:,.0f} k | {figures.per_core / 1e3:,.0f} k | "
        f"{figures.cpu_a_million:.2f} s | {figures.p50 * 1e3:.0f} ms | {figures.p99 * 1e3:.0f} ms | "
        f"{figures.megabytes:,.0f} MB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--series", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--only", choices=list(PATHS), default=None)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--senders", type=int, default=SENDERS, help="connections, each of which waits for its answer")
    parser.add_argument("--shuffled", action="store_true", help="points of a metric in another order every time (OTLP)")
    chosen = parser.parse_args()
    others = set(range(os.cpu_count() or 1)) - {EDGE_CORE}
    os.sched_setaffinity(0, others or {EDGE_CORE})
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, one of them for the receiver\n")
    print("| receiver | series | points/s (wall) | points/s/core | CPU per M points | p50 | p99 (half load) | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in PATHS if chosen.only is None else [chosen.only]:
        for series in chosen.series:
            fills = otlp_requests(series, shuffled=chosen.shuffled) if kind == "otlp" else remote_writes(series)
            feeder = partial(Feeder, kind=kind, fills=fills, senders=chosen.senders)
            with running_edge() as (port, pid):
                show(f"penstock, {kind}", series, measure(pid, feeder(port=port), chosen.seconds))
            with running_edge(knows_repeats=False) as (port, pid):
                show(f"penstock, {kind}, repeats count", series, measure(pid, feeder(port=port), chosen.seconds))
            for name, peer in peers() if kind == "remote_write" and not chosen.no_peers else ():
                with peer() as (port, pid, path):
                    show(f"{name}, {kind}", series, measure(pid, feeder(port=port, path=path), chosen.seconds))


if __name__ == "__main__":
    main()
