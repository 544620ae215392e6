"""The send queue beside a plain loop of the same HTTP client, both into one local sink: trust the ratios.

Arms are interleaved, every figure is the median of its rounds. The sink is a process of its own that reads, waits where
a latency is asked for, and answers. Rates are by the wall clock; the processor time is that of this process.

    python -m bench.export [--rounds 5] [--batches 2000] [--only pass-through]

| what                                          | bound                                  |
|-----------------------------------------------|----------------------------------------|
| drain at `disk`, 50 KB                        | >= 0.80 of a plain loop in one thread  |
| 16 workers, an answer takes 20 ms, 5 KB       | >= 0.95 of a plain loop in 16 threads  |
"""

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import Queue

from penstock import (
    BreakerConfig,
    Durability,
    FastQueue,
    FastQueueConfig,
    PipelineSplitConfig,
    SendQueue,
    SendQueueConfig,
)
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
from penstock.export.http_client import HttpClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"
BATCH = 50 * 1024
SMALL = 5 * 1024
LARGE = 1024 * 1024
LATENCY = 0.02  # seconds: a destination in another region
MANY = 16  # workers that hide it
IN_MEMORY = FastQueueConfig(max_size=1_000_000, max_bytes="8Gi", inmemory_blocks=100_000)
SPILLED = replace(IN_MEMORY, inmemory_blocks=64)
ON_DISK = replace(IN_MEMORY, durability=Durability.DISK)
QUIET = SendQueueConfig(adaptive_enabled=False)


# -- the sink ----------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket, latency: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(bytearray(1 << 20))
    pending = b""
    while True:
        while b"\r\n\r\n" not in pending:
            part = connection.recv(65536)
            if not part:
                return
            pending += part
        head, _, rest = pending.partition(b"\r\n\r\n")
        left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) - len(rest)
        while left > 0:
            left -= connection.recv_into(view, min(left, len(view)))
        pending = b""
        if latency:
            time.sleep(latency)
        connection.sendall(ANSWER)


def sink(port: Connection, latency: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port.send(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, latency), daemon=True).start()


def start_sink(latency: float = 0.0) -> tuple[multiprocessing.Process, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=sink, args=(theirs, latency), daemon=True)
    process.start()
    return process, ours.recv()  # type: ignore[return-value]


# -- arms --------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds by the wall and by this process's processor time."""

    def __init__(self) -> None:
        self.began = (time.perf_counter(), time.process_time())

    def stop(self) -> tuple[float, float]:
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]


def config_of(port: int, compression: str = "none") -> OtlpHttpConfig:
    return OtlpHttpConfig(url=f"http://127.0.0.1:{port}", compression=compression)  # type: ignore[arg-type]


def plain_loop(port: int, bodies: list[bytes], threads: int, compression: str = "none") -> tuple[float, float]:
    """Nothing but prepare and post, in so many threads."""
    exporter = OtlpHttpExporter(config_of(port, compression))
    shares = [bodies[number::threads] for number in range(threads)]

    def loop(share: list[bytes]) -> None:
        for body in share:
            exporter.send(exporter.prepare(body))

    workers = [threading.Thread(target=loop, args=(share,)) for share in shares]
    watch = Stopwatch()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    spent = watch.stop()
    exporter.close()
    return spent


def through_queue(
    port: int,
    bodies: list[bytes],
    config: SendQueueConfig,
    compression: str = "none",
    *,
    filled: bool,
    limits: FastQueueConfig = IN_MEMORY,
) -> tuple[float, float]:
    """All of it through a send queue; `filled`: it is in the queue already, as after an outage.

    What lies on the disk by then has been there for a while: the kernel is not still writing it while it is drained.
    """
    with tempfile.TemporaryDirectory() as folder, FastQueue(folder, limits) as queue:
        for body in bodies if filled else ():
            queue.push(body)
        if filled and limits is not IN_MEMORY:
            queue.flush()
        sender = SendQueue(queue, OtlpHttpExporter(config_of(port, compression)), config)
        watch = Stopwatch()
        sender.start()
        if not filled:
            for body in bodies:
                sender.push(body)
        assert sender.flush(300)
        spent = watch.stop()
        assert sender.stats().exported_batches == len(bodies)
        sender.close()
        return spent


def push_latencies(port: int, count: int, *, alive: bool) -> list[float]:
    """Seconds of each push, a thousand a second, while the destination takes or refuses."""
    target = port if alive else closed_port()
    with tempfile.TemporaryDirectory() as folder, FastQueue(folder, IN_MEMORY) as queue:
        breaker = BreakerConfig(reset_timeout=0.2)
        config = SendQueueConfig(adaptive_enabled=False, circuit_breaker=breaker, retry_interval=0.1)
        with SendQueue(queue, OtlpHttpExporter(config_of(target)), config) as sender:
            body = random.randbytes(BATCH)
            taken = timed(lambda: sender.push(body), range(count))
            sender.close(1.0)
    return taken


def timed(push: Callable[[], object], turns: Iterable[object]) -> list[float]:
    """Seconds of each, about a thousand a second."""
    taken = []
    for _ in turns:
        before = time.perf_counter()
        push()
        taken.append(time.perf_counter() - before)
        time.sleep(0.001)
    return taken


def push_beside_drain(port: int, backlog: int, limits: FastQueueConfig) -> list[float]:
    """Seconds of each push until a backlog is gone that was there before."""
    body = random.randbytes(BATCH)
    with tempfile.TemporaryDirectory() as folder, FastQueue(folder, limits) as queue:
        for _ in range(backlog):
            queue.push(body)
        if limits is not IN_MEMORY:
            queue.flush()
        with SendQueue(queue, OtlpHttpExporter(config_of(port)), QUIET) as sender:
            taken = timed(lambda: sender.push(body), iter(sender.__len__, 0))
            assert sender.flush(300)
            assert sender.stats().exported_batches == backlog + len(taken)
    return taken


def put_beside_thread(port: int, backlog: int) -> list[float]:
    """The same with a `queue.Queue` and a thread that does nothing but send what is in it."""
    body = random.randbytes(BATCH)
    exporter = OtlpHttpExporter(config_of(port))
    waiting: Queue[bytes | None] = Queue()
    sent = []

    def drain() -> None:
        while (batch := waiting.get()) is not None:
            exporter.send(exporter.prepare(batch))
            sent.append(len(batch))

    for _ in range(backlog):
        waiting.put(body)
    thread = threading.Thread(target=drain)
    thread.start()
    taken = timed(lambda: waiting.put(body), iter(waiting.qsize, 0))
    waiting.put(None)
    thread.join()
    exporter.close()
    assert len(sent) == backlog + len(taken)
    return taken


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# -- tables ------------------------------------------------------------------------------------------------------------


def median(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


def compare(
    arms: dict[str, Callable[[], tuple[float, float]]], rounds: int, count: int, size: int, bounds: dict[str, float]
) -> None:
    """Run the arms and print each as a share of the first one, with its bound.

    In another order each round: what one leaves behind, as files that the kernel has yet to forget, slows the next.
    """
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name in random.sample(list(arms), len(arms)):
            spent[name].append(arms[name]())
    plain = median(next(iter(spent.values())))[0]
    print(f"{'':34}{'batches/s':>10}{'MB/s':>8}{'of the loop':>13}{'CPU µs':>9}  bound")
    for name, measured in spent.items():
        wall, cpu = median(measured)
        bound = bounds.get(name)
        verdict = "" if bound is None else f">= {bound:.2f} {'ok' if plain / wall >= bound else 'MISSED'}"
        print(
            f"{name:34}{count / wall:10.0f}{count * size / wall / 1e6:8.0f}{plain / wall:13.2f}"
            f"{cpu / count * 1e6:9.0f}  {verdict}"
        )


def pass_through(port: int, rounds: int, count: int) -> None:
    # Different bodies, as in production: one that is sent again and again never leaves the processor's cache.
    bodies = [random.randbytes(BATCH) for _ in range(count)]
    workers = QUIET.worker_count()
    print(f"\nPass-through of {count} serialised batches of {BATCH // 1024} KB, no compression, {workers} workers")
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        "plain loop, 1 thread": lambda: plain_loop(port, bodies, 1),
        "send queue, pushed while it sends": lambda: through_queue(port, bodies, QUIET, filled=False),
        "send queue, drain from memory": lambda: through_queue(port, bodies, QUIET, filled=True),
        "send queue, drain of a spill": lambda: through_queue(port, bodies, QUIET, filled=True, limits=SPILLED),
        "send queue, drain at disk": lambda: through_queue(port, bodies, QUIET, filled=True, limits=ON_DISK),
    }
    compare(arms, rounds, count, BATCH, {"send queue, drain at disk": 0.8})


def latency(port: int, rounds: int, count: int) -> None:
    bodies = [random.randbytes(SMALL) for _ in range(count)]
    config = replace(QUIET, workers=MANY)
    print(f"\n{count} batches of {SMALL // 1024} KB, each answered after {LATENCY * 1e3:.0f} ms, {MANY} workers")
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        f"plain loop, {MANY} threads": lambda: plain_loop(port, bodies, MANY),
        "send queue, drain at disk": lambda: through_queue(port, bodies, config, filled=True, limits=ON_DISK),
    }
    compare(arms, rounds, count, SMALL, {"send queue, drain at disk": 0.95})


def split(port: int, rounds: int, count: int) -> None:
    rng = random.Random(1)
    words = [rng.randbytes(8) for _ in range(500)]
    bodies = [b"".join(rng.choices(words, k=LARGE // 8)) for _ in range(8)] * (count // 8)
    workers = QUIET.worker_count()
    ratio = LARGE / len(OtlpHttpExporter(config_of(port, "zstd")).prepare(bodies[0]).body)
    print(f"\n{len(bodies)} compressible batches of 1 MB with zstd (ratio {ratio:.1f})")
    divided = SendQueueConfig(adaptive_enabled=False, pipeline_split=PipelineSplitConfig(enabled=True))
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        f"plain loop, {workers} threads": lambda: plain_loop(port, bodies, workers, "zstd"),
        "send queue": lambda: through_queue(port, bodies, QUIET, "zstd", filled=True),
        "send queue, pipeline split": lambda: through_queue(port, bodies, divided, "zstd", filled=True),
    }
    compare(arms, rounds, len(bodies), LARGE, {})


def push(port: int, rounds: int, count: int) -> None:
    print(f"\nLatency of push at durability memory, {count} pushes of {BATCH // 1024} KB, a thousand a second")
    backlog = 4 * count
    arms: dict[str, Callable[[], list[float]]] = {
        "destination alive": lambda: push_latencies(port, count, alive=True),
        "destination dead": lambda: push_latencies(port, count, alive=False),
        f"beside a drain of {backlog}": lambda: push_beside_drain(port, backlog, IN_MEMORY),
        "beside a drain of a spill": lambda: push_beside_drain(port, backlog, replace(IN_MEMORY, inmemory_blocks=2048)),
        "so with a thread and a queue.Queue": lambda: put_beside_thread(port, backlog),
    }
    print(f"{'':36}{'p50 µs':>9}{'p99 µs':>9}{'max µs':>9}")
    taken: dict[str, list[list[float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            taken[name].append(sorted(arm()))
    p99 = []
    for name, measured in taken.items():
        figures = [statistics.median(one[int(len(one) * share)] for one in measured) for share in (0.5, 0.99)]
        figures.append(statistics.median(one[-1] for one in measured))
        p99.append(figures[1])
        print(f"{name:36}" + "".join(f"{seconds * 1e6:9.0f}" for seconds in figures))
    print(f"p99 beside a drain: {p99[2] / p99[4]:.2f} of the thread's, of a spill {p99[3] / p99[4]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--only", choices=["pass-through", "latency", "split", "push"])
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, {given.rounds} rounds")
    process, port = start_sink()
    distant, distant_port = start_sink(LATENCY)
    try:
        HttpClient(config_of(port), "/v1/metrics").post(b"", {})
        if given.only in (None, "pass-through"):
            pass_through(port, given.rounds, given.batches)
        if given.only in (None, "latency"):
            latency(distant_port, given.rounds, given.batches)
        if given.only in (None, "split"):
            split(port, given.rounds, max(8, given.batches // 20))
        if given.only in (None, "push"):
            push(port, given.rounds, given.batches)
    finally:
        process.kill()
        distant.kill()


if __name__ == "__main__":
    main()
