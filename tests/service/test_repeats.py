"""Requests that come again are recognised by the running service: answered with success and not counted."""

import http.client
import json
import time
from pathlib import Path

import pytest

from penstock.testing import wait_until
from tests.service.running import HEADERS, Running, orders, sealed_sum

pytestmark = pytest.mark.server

JSON = {"Content-Type": "application/json"}


def send(port: int, body: bytes, path: str = "/v1/metrics", headers: dict[str, str] = HEADERS) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def counted(service: Running, expected: float, metric: str = "orders") -> float:
    wait_until(lambda: sealed_sum(service.folder / "segments", metric) >= expected)
    return sealed_sum(service.folder / "segments", metric)


def sample(service: Running, name: str) -> float:
    lines = service.ask("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and not line.startswith("#"))


def test_a_request_whose_answer_was_lost_counts_once_also_after_a_kill(tmp_path: Path) -> None:
    bodies = [orders(10, number) for number in range(20)]
    with Running(tmp_path) as service:
        assert [send(service.port, body) for body in bodies for _ in range(2)] == [200] * 40
        assert sample(service, "penstock_receive_repeated_total") == 20
        service.kill()
        service.start()
        assert [send(service.port, body) for body in bodies] == [200] * 20
        assert sample(service, "penstock_receive_repeated_total") == 20
        assert send(service.port, orders(1)) == 200
        assert service.stop() == 0
    assert counted(service, 201) == 201


def test_the_block_alone_says_what_was_taken(tmp_path: Path) -> None:
    """As after a power cut, or a kill between push and answer: the shared table is not there."""
    bodies = [orders(10, number) for number in range(5)]
    with Running(tmp_path) as service:
        assert [send(service.port, body) for body in bodies] == [200] * 5
        service.kill()
        (tmp_path / "requests.table").unlink()
        service.start()
        assert [send(service.port, body) for body in bodies] == [200] * 5
        assert send(service.port, orders(1)) == 200
        assert service.stop() == 0
    assert counted(service, 51) == 51


def test_any_of_several_processes_knows_what_another_has_taken(tmp_path: Path) -> None:
    bodies = [orders(10, number) for number in range(10)]
    with Running(tmp_path, processes="2") as service:
        for _ in range(6):  # each time a new connection, which reaches either process
            assert [send(service.port, body) for body in bodies] == [200] * 10
        service.kill()
        service.start()
        for _ in range(3):
            assert [send(service.port, body) for body in bodies] == [200] * 10
        assert send(service.port, orders(1)) == 200
        assert service.stop() == 0
    assert counted(service, 101) == 101


def test_events_are_known_by_their_times_or_by_the_senders_key(tmp_path: Path) -> None:
    timed = json.dumps([{"metric": "timed", "value": 1, "time": time.time()}]).encode()
    plain = json.dumps([{"metric": "plain", "value": 1}]).encode()
    keyed = json.dumps([{"metric": "keyed", "value": 1}]).encode()
    with Running(tmp_path) as service:
        for _ in range(3):
            assert send(service.port, timed, "/v1/events", JSON) == 200
            assert send(service.port, plain, "/v1/events", JSON) == 200
            for key in ("a", "b"):
                assert send(service.port, keyed, "/v1/events", {**JSON, "Idempotency-Key": key}) == 200
        assert service.stop() == 0
    assert [counted(service, count, metric) for metric, count in (("timed", 1), ("plain", 3), ("keyed", 2))] == [
        1,
        3,
        2,
    ]


def test_with_a_window_of_nothing_every_request_is_counted(tmp_path: Path) -> None:
    body = orders(10)
    with Running(tmp_path, intake_repeat_window="0") as service:
        assert [send(service.port, body) for _ in range(3)] == [200] * 3
        assert service.stop() == 0
    assert counted(service, 30) == 30
