"""Requests under way from one thread, each on its own connection; and one worker that does the work of all so."""

import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import PayloadTooLarge, TransientExportError
from penstock.export import SendQueue, http1
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
from penstock.export.exporters.remote_write_exporter import RemoteWriteConfig, RemoteWriteExporter
from penstock.export.http_client import HttpClient, HttpConfig
from penstock.export.send_workers import Workers
from penstock.spool import Durability, FastQueue, FastQueueConfig
from penstock.testing import wait_until
from tests.export import misbehaving
from tests.export.misbehaving import Behaviour, Misbehaving, answer, said
from tests.export.quick import numbered, quick


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    with Misbehaving().running() as running:
        yield running


def client_of(server: Misbehaving, timeout: float = 5.0) -> HttpClient:
    return HttpClient(HttpConfig(url=server.url, timeout=timeout))


def both_at_once(parties: int) -> Behaviour:
    """Answers none before so many requests are there."""
    barrier = threading.Barrier(parties)
    success = answer(200)

    def behave(connection: socket.socket) -> bool:
        barrier.wait(20)
        return success(connection)

    return behave


def test_several_requests_are_under_way_on_a_connection_each(server: Misbehaving) -> None:
    server.behaviours = [both_at_once(3)] * 3
    client = client_of(server)
    answers = [client.begin(b"%d" % number, {}) for number in range(3)]
    assert [take().status for take in answers] == [200] * 3
    assert sorted(request.body for request in server.requests) == [b"0", b"1", b"2"]
    assert server.connections == 3
    for _ in range(2):  # they are kept, and used again
        for take in [client.begin(b"again", {}) for _ in range(3)]:
            take()
    assert server.connections == 3
    client.close()


def test_each_answer_is_that_to_its_own_request(server: Misbehaving) -> None:
    client = client_of(server)
    server.behaviours = [answer(200, b"one")]
    first = client.begin(b"1", {})
    wait_until(lambda: len(server.requests) == 1)
    server.behaviours = [answer(413)]
    second = client.begin(b"2", {})
    wait_until(lambda: len(server.requests) == 2)
    with pytest.raises(PayloadTooLarge):
        second()
    assert first().body == b"one"
    client.close()


def test_who_comes_after_the_timeout_gets_what_is_there_and_waits_for_nothing_more(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(server, timeout=5.0)
    is_answered = threading.Event()
    server.behaviours = [said(answer(200), is_answered), server.silent]
    there = client.begin(b"1", {})
    assert is_answered.wait(20)
    hanging = client.begin(b"2", {})
    wait_until(lambda: len(server.requests) == 2)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 60.0)
    assert there().status == 200
    waited: list[float] = []
    receive = http1.Connection.receive

    def note(connection: http1.Connection, most: int, deadline: float) -> http1.Answer:
        waited.append(deadline - time.monotonic())
        return receive(connection, most, deadline)

    monkeypatch.setattr(http1.Connection, "receive", note)
    with pytest.raises(TimeoutError):
        hanging()
    assert waited[0] <= 0.1  # not the five seconds once more
    client.close()


@pytest.mark.parametrize(
    ("elsewhere", "here", "left"), [(0.0, 300.0, 200.0), (6000.0, 0.0, 500.0), (6000.0, 300.0, 200.0)]
)
def test_a_second_try_has_what_the_first_has_left_of_the_timeout(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch, elsewhere: float, here: float, left: float
) -> None:
    """Seconds that are spent elsewhere before somebody comes for the answer are not the request's own."""
    client = client_of(server, timeout=500.0)
    client.post(b"first", {})
    passed = 0.0
    real, receive, connect = time.monotonic, http1.Connection.receive, http1.connect
    remaining: list[float] = []

    def slowly(connection: http1.Connection, most: int, deadline: float) -> http1.Answer:
        nonlocal passed
        passed += 0.0 if remaining else here
        return receive(connection, most, max(deadline, time.monotonic() + 30.0))

    def note(host: str, port: int, context: ssl.SSLContext | None, deadline: float) -> http1.Connection:
        remaining.append(deadline - time.monotonic())
        return connect(host, port, context, deadline)

    monkeypatch.setattr(time, "monotonic", lambda: real() + passed)
    monkeypatch.setattr(http1.Connection, "receive", slowly)
    monkeypatch.setattr(http1, "connect", note)
    server.behaviours = [misbehaving.hang_up]
    take = client.begin(b"second", {})
    passed += elsewhere
    assert take().status == 200
    assert [round(seconds, -2) for seconds in remaining] == [left]  # beside the little that the test itself takes
    client.close()


def test_kept_connections_that_the_server_has_ended_are_made_anew_when_their_turn_comes(server: Misbehaving) -> None:
    client = client_of(server)
    for take in [client.begin(b"first", {}) for _ in range(2)]:
        take()
    server.behaviours = [misbehaving.hang_up, misbehaving.hang_up]
    answers = [client.begin(b"second", {}) for _ in range(2)]
    wait_until(lambda: not server.behaviours)
    assert [take().status for take in answers] == [200, 200]
    assert server.connections == 4
    client.close()


def test_an_answer_that_is_there_can_be_read_after_the_client_was_closed(server: Misbehaving) -> None:
    client = client_of(server)
    is_answered = threading.Event()
    server.behaviours = [said(answer(200, b"taken"), is_answered), server.silent]
    take = client.begin(b"1", {})
    assert is_answered.wait(20)
    hanging = client.begin(b"2", {})
    wait_until(lambda: len(server.requests) == 2)
    client.close()
    with pytest.raises((ConnectionError, TransientExportError)):
        hanging()
    assert take().body == b"taken"


@pytest.mark.parametrize("durability", list(Durability))
def test_one_that_works_alone_has_as_many_sends_under_way_as_all_would(
    server: Misbehaving, tmp_path: Path, durability: Durability
) -> None:
    server.behaviours = [answer(200)] + [both_at_once(3)] * 3
    exporter = OtlpHttpExporter(OtlpHttpConfig(url=server.url, timeout=20.0))
    with FastQueue(tmp_path / "queue", FastQueueConfig(durability=durability)) as queue:
        for batch in numbered(50):
            queue.push(batch)
        sender = SendQueue(queue, exporter, quick(workers=3))
        leave_alone(sender)
        with sender:
            wait_until(lambda: not len(sender))
            assert sender.stats().exported_batches == 50
            wait_until(lambda: not sender.stats().sends_inflight)  # its place is given back when it is settled
    assert sorted(request.body for request in server.requests) == numbered(50)
    assert server.connections == 3


def test_one_that_must_keep_the_order_has_one_under_way(server: Misbehaving, tmp_path: Path) -> None:
    exporter = RemoteWriteExporter(RemoteWriteConfig(url=server.url, timeout=20.0))
    with FastQueue(tmp_path / "queue") as queue:
        for batch in numbered(50):
            queue.push(batch)
        sender = SendQueue(queue, exporter, quick(workers=3))
        leave_alone(sender)
        with sender:
            wait_until(lambda: not len(sender))
    assert [request.body for request in server.requests] == numbered(50)
    assert server.connections == 1


def test_what_was_answered_is_acked_although_another_one_hangs_until_the_end(
    server: Misbehaving, tmp_path: Path
) -> None:
    """Of three under way one hangs: at the end it is cut off, and only that one is left to be sent again."""
    server.behaviours = [answer(200), server.silent]
    exporter = OtlpHttpExporter(OtlpHttpConfig(url=server.url, timeout=20.0))
    with FastQueue(tmp_path / "queue") as queue:
        for batch in numbered(4):
            queue.push(batch)
        sender = SendQueue(queue, exporter, quick(workers=3))
        leave_alone(sender)
        sender.start()
        wait_until(lambda: len(server.requests) == 4)
        assert sender.close(timeout=1.0) == []
    with FastQueue(tmp_path / "queue") as queue:
        left = [lease.data for lease in queue.lease(10)]
    assert len(left) == 1
    assert left[0] in numbered(4)[1:]  # the three came on connections of their own, in whatever order


def leave_alone(sender: SendQueue) -> None:
    """Let its first worker send alone from the start, and nobody compare."""
    assert isinstance(sender._workers, Workers)
    crew = sender._workers._crew
    assert crew is not None
    crew.is_alone, crew._ends = True, math.inf
    crew._is_stalled_locked = lambda: False  # type: ignore[method-assign]
