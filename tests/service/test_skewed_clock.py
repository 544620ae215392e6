"""A sender whose clock is ahead, and a service that is killed: what it counted before the kill is not counted again."""

import time
import urllib.request
from pathlib import Path

from penstock.testing import wait_until
from tests.receive.support import SECOND, counter, request
from tests.service.running import HEADERS, Running, sealed_sum

AHEAD = 300 * SECOND


def send(running: Running, began: int, value: float) -> None:
    body = request(counter("sales", (time.time_ns() + AHEAD, value), start=began)).SerializeToString()
    sent = urllib.request.Request(f"http://127.0.0.1:{running.port}/v1/metrics", body, HEADERS)
    assert urllib.request.urlopen(sent, timeout=30).status == 200


def test_a_counter_of_a_clock_that_is_ahead_is_counted_once_over_a_kill(tmp_path: Path) -> None:
    running = Running(tmp_path)
    with running:
        began = time.time_ns() + AHEAD
        send(running, began, 100.0)
        running.kill()
        running.start()
        send(running, began, 120.0)
        send(running, began, 150.0)
        running.stop()
    segments = tmp_path / "segments"
    wait_until(lambda: sealed_sum(segments, "sales") == 130.0, 10.0)  # 20 came while it was down
