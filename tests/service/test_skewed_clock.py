"""Clocks that are wrong, and a service that is killed: what it counted before the kill is not counted again."""

import time
import urllib.request
from pathlib import Path

import pytest

from penstock.testing import wait_until
from tests.campaigns.wrong_clock import WrongClock
from tests.receive.support import SECOND, counter, request
from tests.service.running import HEADERS, Running, orders, sealed_sum

AHEAD = 300 * SECOND


def send(running: Running, began: int, value: float) -> None:
    body = request(counter("sales", (time.time_ns() + AHEAD, value), start=began)).SerializeToString()
    post(running, body)


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


@pytest.mark.server
@pytest.mark.parametrize("ahead", [7200, -7200])
@pytest.mark.parametrize("table", ["kept", "lost"])
def test_a_request_that_comes_again_after_the_clock_was_set_is_known(tmp_path: Path, ahead: int, table: str) -> None:
    running = Running(tmp_path)
    clock = WrongClock(running)
    bodies = [orders(10, number) for number in range(5)]
    with running:
        for body in bodies:
            post(running, body)
        running.kill()
        clock.set(ahead)
        if table == "lost":
            (tmp_path / "requests.table").unlink()
        running.start()
        for body in bodies:
            post(running, body)
        assert running.stop() == 0
    assert sealed_sum(tmp_path / "segments", "orders") == 50


def post(running: Running, body: bytes) -> None:
    sent = urllib.request.Request(f"http://127.0.0.1:{running.port}/v1/metrics", body, HEADERS)
    assert urllib.request.urlopen(sent, timeout=30).status == 200
