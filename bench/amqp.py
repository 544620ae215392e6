"""Consumers side by side on one private broker: `make bench PART=amqp`.

Every arm runs in a process of its own on a queue that is already full; arms take turns, and the table shows medians.
Handler p95 and RSS are the arm's own; CPU is per message and of the consumer only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pika
from tests.servers import RabbitMQ

BODY = b"x" * 200
Result = dict[str, Any]


class Bench:
    """One broker, and arms that take turns on it."""

    def __init__(self, broker: RabbitMQ, rounds: int) -> None:
        self._broker = broker
        self._rounds = rounds
        self._number = 0

    def compare(self, arms: dict[str, tuple[str, Result]], rounds: int | None = None) -> dict[str, Result]:
        """The median of each figure of each arm."""
        found: dict[str, list[Result]] = {name: [] for name in arms}
        for _ in range(rounds or self._rounds):
            for name, (arm, settings) in arms.items():
                found[name].append(self._run(arm, dict(settings)))
        return {name: _medians(results) for name, results in found.items()}

    def _run(self, arm: str, settings: Result) -> Result:
        self._number += 1
        queue = f"bench{self._number}"
        fill = _fill_dramatiq if arm == "dramatiq" else _fill
        fill(self._broker.url, queue, settings["messages"])
        command = [sys.executable, "-m", "bench.amqp_arms", arm]
        settings |= {"url": self._broker.url, "queue": queue}
        ran = subprocess.run([*command, json.dumps(settings)], capture_output=True, text=True, timeout=180, check=False)
        if ran.returncode:
            raise RuntimeError(f"{arm} failed:\n{ran.stderr[-2000:]}")
        _delete(self._broker.url, queue)
        result: Result = json.loads(ran.stdout.splitlines()[-1])
        return result


def _channel(url: str) -> Any:
    return pika.BlockingConnection(pika.URLParameters(url)).channel()


def _fill(url: str, queue: str, messages: int) -> None:
    channel = _channel(url)
    channel.queue_declare(queue, durable=True)
    for _ in range(messages):
        channel.basic_publish("", queue, BODY)
    channel.confirm_delivery()
    channel.connection.close()
    _wait_for(url, queue, messages)


def _fill_dramatiq(url: str, queue: str, messages: int) -> None:
    import dramatiq
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    broker = RabbitmqBroker(url=url, confirm_delivery=False)
    handle = dramatiq.Actor(
        lambda body: None, broker=broker, actor_name="handle", queue_name=queue, priority=0, options={}
    )
    for _ in range(messages):
        handle.send("x")  # its envelope makes about 200 bytes of it
    broker.close()
    _wait_for(url, queue, messages)


def _wait_for(url: str, queue: str, messages: int) -> None:
    channel = _channel(url)
    while channel.queue_declare(queue, passive=True).method.message_count < messages:
        channel.connection.sleep(0.02)
    channel.connection.close()


def _delete(url: str, queue: str) -> None:
    channel = _channel(url)
    for suffix in ("", ".DQ", ".XQ"):
        channel.queue_delete(queue + suffix)
    channel.connection.close()


def _medians(results: list[Result]) -> Result:
    return {
        key: None if results[0][key] is None else statistics.median(result[key] for result in results)
        for key in results[0]
    }


def show(title: str, rows: dict[str, Result], note: Callable[[Result], str] = lambda row: "") -> None:
    print(f"\n{title}")
    print("| Arm | msg/s | handler p95 | deliver→ack p95 | ack frames | CPU/message | RSS | |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        settle = "" if row["settle_p95_ms"] is None else f"{row['settle_p95_ms']:.0f} ms"
        print(
            f"| {name} | {row['rate']:,.0f} | {row['handler_p95_ms']:.2f} ms | {settle} | {row['ack_frames']:,.0f} "
            f"| {row['cpu_us']:.0f} µs | {row['rss_mb']:.0f} MB | {note(row)} |",
            flush=True,
        )


def ours(
    messages: int, workers: int, prefetch: Any, sleep: float, execution: str = "thread", settle: bool = False
) -> Any:
    return "penstock", {
        "messages": messages, "workers": workers, "prefetch": prefetch, "sleep": sleep, "execution": execution,
        "settle": settle,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each no-op arm (5)")
    parser.add_argument("--messages", type=int, default=30_000, help="messages of each no-op arm (30 000)")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder, RabbitMQ(Path(folder)) as broker:
        bench = Bench(broker, options.rounds)
        noop(bench, options.messages)
        waiting(bench)
        prefetch(bench)
        memory(bench)
    print(f"\nload average {os.getloadavg()[0]:.2f}")


def noop(bench: Bench, messages: int) -> None:
    each = {"messages": messages, "sleep": 0.0}
    rows = bench.compare(
        {
            "plain pika, no threads, multiple acks": ("plain_pika", {**each, "prefetch": 320, "every": 64}),
            "plain pika, no threads, ack each": ("plain_pika", {**each, "prefetch": 320, "every": 1}),
            "penstock, 1 thread": ours(messages, 1, 320, 0.0),
            "penstock, 8 threads": ours(messages, 8, 320, 0.0),
            "penstock, 32 threads": ours(messages, 32, 320, 0.0),
            "penstock, async": ours(messages, 32, 320, 0.0, "async"),
            "aio-pika": ("aio_pika", {**each, "prefetch": 320}),
            "FastStream": ("faststream", {**each, "prefetch": 320}),
            "dramatiq, 8 threads": ("dramatiq", {**each, "workers": 8}),
        }
    )
    limit = rows["plain pika, no threads, multiple acks"]["rate"]
    show(f"No-op handler, 200 B, {messages:,} messages", rows, lambda row: f"{row['rate'] / limit:.2f} of plain pika")


def waiting(bench: Bench) -> None:
    """A handler that waits 100 ms. Ideal: workers ÷ 0.1 s."""
    for workers in (1, 32, 64, 200):
        messages = workers * 30
        rows = {"penstock, threads": ours(messages, workers, None, 0.1)}
        if workers == 32:
            each = {"messages": messages, "sleep": 0.1}
            rows |= {
                "penstock, async": ours(messages, workers, None, 0.1, "async"),
                "aio-pika": ("aio_pika", {**each, "prefetch": 32}),
                "FastStream": ("faststream", {**each, "prefetch": 32}),
                "dramatiq": ("dramatiq", {**each, "workers": 32}),
            }
        found = bench.compare(rows, rounds=3)
        show(f"100 ms handler, {workers} workers", found, partial(_of_ideal, workers / 0.1))


def _of_ideal(ideal: float, row: Result) -> str:
    return f"{row['rate'] / ideal:.3f} of ideal"


def prefetch(bench: Bench) -> None:
    arms = {
        "penstock, prefetch by the seed's formula (320)": ours(1600, 32, 320, 0.1, settle=True),
        'penstock, prefetch="latency" (64)': ours(1600, 32, "latency", 0.1, settle=True),
    }
    rows = bench.compare(arms, rounds=3)
    seed, latency = (row["settle_p95_ms"] for row in rows.values())
    show("Deliver→ack, 100 ms handler, 32 workers", rows)
    print(f"\nlatency ÷ seed's formula: {latency / seed:.3f}")


def memory(bench: Bench) -> None:
    show(
        "Memory, 200 workers, prefetch 1000, 1 ms handler",
        bench.compare({"penstock": ours(20_000, 200, 1000, 0.001)}, 1),
    )


if __name__ == "__main__":
    main()
