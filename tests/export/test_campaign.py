"""A destination that goes down under load and comes back: everything arrives, memory stays bounded."""

import os
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from penstock.export import BreakerConfig, SendQueue, SendQueueConfig
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
from penstock.spool import Durability
from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving

BATCH = 50 * 1024
WORKERS = 4
IN_MEMORY = 100  # blocks: 5 MB
SLACK = 64 << 20  # bytes that the process may grow by beyond what the queue may hold in memory


@pytest.mark.parametrize(
    ("down", "per_second", "reset_timeout"),
    [
        pytest.param(1.0, 200, 0.3, id="a second"),
        pytest.param(60.0, 300, 30.0, id="a minute", marks=[pytest.mark.soak, pytest.mark.timeout(400)]),
    ],
)
def test_what_was_pushed_during_an_outage_arrives_after_it(
    tmp_path: Path, down: float, per_second: int, reset_timeout: float
) -> None:
    server = Misbehaving(keep=16)
    config = SendQueueConfig(
        path=tmp_path / "queue",
        max_bytes="8Gi",
        workers=WORKERS,
        inmemory_blocks=IN_MEMORY,
        durability=Durability.MEMORY,
        circuit_breaker=BreakerConfig(reset_timeout=reset_timeout),
        retry_interval=reset_timeout / 6,
    )
    filler = random.randbytes(BATCH - 16)
    pushed: list[bytes] = []
    ending = threading.Event()

    def push_steadily(sender: SendQueue) -> None:
        while not ending.wait(1 / per_second):
            pushed.append(b"%016d" % len(pushed))
            sender.push(pushed[-1] + filler)

    with server.running():
        exporter = OtlpHttpExporter(OtlpHttpConfig(url=server.url, compression="none", timeout=5.0))
        sender = SendQueue.open(exporter, config).start()
        load = threading.Thread(target=push_steadily, args=(sender,), daemon=True)
        load.start()
        wait_until(lambda: len(server.requests) > per_second // 10)
        memory = psutil.Process(os.getpid()).memory_info().rss
    before = len(server.requests)
    most = 0
    ends = time.monotonic() + down
    while time.monotonic() < ends:
        ending.wait(0.01)
        most = max(most, sender.stats().queue.inmemory_blocks)
    grown = psutil.Process(os.getpid()).memory_info().rss - memory
    waiting = len(sender)
    assert len(server.requests) == before

    up = time.monotonic()
    with server.running():
        wait_until(lambda: len(server.requests) > before, timeout=reset_timeout + 30)
        first = time.monotonic() - up
        ending.set()
        load.join()
        wait_until(lambda: not len(sender), timeout=300)
        empty = time.monotonic() - up
        stats = sender.stats()
        sender.close()

    times = Counter(request.body for request in server.requests)
    assert set(times) == set(pushed)
    assert sum(times.values()) - len(pushed) <= WORKERS  # those whose answer was cut off
    assert stats.data_loss == 0
    assert stats.queue.dropped == dict.fromkeys(stats.queue.dropped, 0)
    assert stats.queue.dead_lettered == 0
    assert most <= IN_MEMORY
    assert grown < IN_MEMORY * BATCH + SLACK
    assert first <= reset_timeout + 5.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(  # noqa: T201 - the campaign's report
        f"\ndown {down:.0f} s, {waiting} batches ({waiting * BATCH / 1e6:.0f} MB) waited, at most {most} in memory, "
        f"process grew by {grown / 1e6:.0f} MB (peak {peak:.0f} MB); "
        f"first batch {first:.1f} s after it was up, queue empty after {empty:.1f} s, "
        f"{sum(times.values()) - len(pushed)} sent twice, circuit opened {stats.circuit_opened} times"
    )
