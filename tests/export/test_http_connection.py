"""One connection of the HTTP client: every kind of answer, whole and in pieces, and the deadline over all of it."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, RemoteDisconnected
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export import http_connection
from penstock.export.http_client import HttpClient, HttpClientConfig
from penstock.export.http_connection import HttpClientConnection, HttpResponse

MOST = 100  # bytes of an answer that the tests read
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


class Case(NamedTuple):
    sent: bytes
    status: int
    body: bytes
    is_reusable: bool


ANSWERS = {
    "a length": Case(OK + b"Content-Length: 4\r\n\r\nbody", 200, b"body", True),
    "nothing": Case(OK + b"content-length:0\r\n\r\n", 200, b"", True),
    "no content": Case(b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "continue": Case(b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nx", 200, b"x", True),
    "chunks": Case(CHUNKED + b"3\r\nabc\r\nA;a=b\r\n0123456789\r\n0\r\nX: y\r\n\r\n", 200, b"abc0123456789", True),
    "until the end": Case(b"HTTP/1.1 503 Sorry\r\n\r\nbody", 503, b"body", False),
    "the last": Case(OK + b"Connection: Close\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
    "1.0": Case(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
    "a byte more": Case(OK + b"Content-Length: 101\r\n\r\n" + b"x" * 101, 200, b"x" * 100, False),
    "a chunk more": Case(CHUNKED + b"64\r\n" + b"x" * 100 + b"\r\n1\r\nx\r\n0\r\n\r\n", 200, b"x" * 100, False),
    "too much until the end": Case(b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 300, 500, b"x" * 100, False),
}

BROKEN = {
    "half a header": OK + b"Content-Le",
    "headers without their end": OK + b"Content-Length: 0\r\n",
    "half a body": OK + b"Content-Length: 9\r\n\r\nhalf",
    "a chunk without its end": CHUNKED + b"5\r\nwhole\r\n",
    "another server": b"220 hidden ESMTP\r\n",
    "another version": b"HTTP/2 200 hidden\r\n\r\n",
    "not final": b"HTTP/1.1 101 hidden\r\n\r\n",
    "headers without end": OK + b"X: hidden\r\n" * 10_000,
    "a header without end": OK + b"X: hidden" + b"x" * 100_000,
    "chunks without a length": CHUNKED + b"hidden\r\n",
}


@contextmanager
def pair(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[HttpClientConnection, socket.socket]]:
    """A connection and its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        yield HttpClientConnection(ours), theirs


@contextmanager
def running(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def soon() -> float:
    return time.monotonic() + 30.0


def receive(*pieces: bytes) -> HttpResponse:
    """Returns what is made of an answer that comes in these pieces before the server ends the connection."""
    with pair() as (connection, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        connection.send("/", {"Host": "server"}, b"", soon())

        def serve() -> None:
            try:
                for piece in pieces:
                    theirs.sendall(piece)
                theirs.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the client has stopped reading

        with running(serve):
            try:
                return connection.receive(MOST, soon())
            finally:
                connection.cut()


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_read_wherever_it_is_cut(case: Case) -> None:
    received = receive(*(case.sent[at : at + 1] for at in range(len(case.sent))))
    assert (received.status, received.body, received.is_reusable) == case[1:]


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
def test_half_an_answer_or_none_of_http_is_an_error_that_shows_nothing_of_it(sent: bytes) -> None:
    with pytest.raises(HTTPException) as caught:
        receive(sent)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("sent", [[], [b"HTTP/1.1 100 Continue\r\n\r\n"]])
def test_no_answer_is_a_connection_that_was_ended(sent: list[bytes]) -> None:
    with pytest.raises(RemoteDisconnected):
        receive(*sent)


@given(st.binary(max_size=200), st.sampled_from([b"", *(case.sent for case in ANSWERS.values())]), st.integers(0, 200))
def test_whatever_comes_is_an_answer_or_an_error_of_http(noise: bytes, sent: bytes, at: int) -> None:
    try:
        received = receive(sent[:at] + noise + sent[at:])
    except (HTTPException, ConnectionError):
        return
    assert len(received.body) <= MOST


def test_headers_are_found_by_their_names_in_lower_case() -> None:
    received = receive(b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n")
    assert received.headers == {"retry-after": "7", "content-length": "0"}


def test_what_comes_unasked_or_the_end_of_the_connection_is_noticed() -> None:
    with pair() as (connection, theirs):
        assert connection.is_quiet()
        theirs.send(b"x")
        assert not connection.is_quiet()
    with pair() as (connection, theirs):
        theirs.close()
        assert not connection.is_quiet()


@pytest.mark.parametrize("left", [0.05, 0.0])
def test_a_server_that_does_not_read_is_held_to_the_deadline(left: float) -> None:
    with pair() as (connection, _), pytest.raises(TimeoutError):
        connection.send("/", {"Host": "server"}, bytes(10_000_000), time.monotonic() + left)


def test_addresses_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float | None] = []

    class Deaf(socket.socket):
        def connect(self, address: Any) -> None:
            timeouts.append(self.gettimeout())
            raise TimeoutError(address)

    address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 3)
    monkeypatch.setattr(socket, "socket", Deaf)
    monkeypatch.setattr(http_connection, "time", SimpleNamespace(monotonic=lambda: 100.0))
    with pytest.raises(TimeoutError):
        http_connection.connect_to_destination("nowhere", 1, None, 112.0)
    assert timeouts == [4.0, 6.0, 12.0]


def test_an_address_that_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no server listens there
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (bound, listener)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(addresses))
        http_connection.connect_to_destination("somewhere", 1, None, soon()).close()
        addresses.pop()
        with pytest.raises(ConnectionRefusedError):
            http_connection.connect_to_destination("somewhere", 1, None, soon())


def test_where_the_system_has_no_ipv6_the_other_addresses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    class OnlyV4(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int = -1, *rest: Any, **settings: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest, **settings)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = [
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 1, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname()),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(addresses))
        monkeypatch.setattr(socket, "socket", OnlyV4)
        http_connection.connect_to_destination("somewhere", 1, None, soon()).close()


@pytest.mark.parametrize(
    ("url", "path", "host"),
    [
        ("http://example.org", "/", "example.org"),
        ("http://Example.org:4318/v1/metrics", "/v1/metrics", "example.org:4318"),
        ("http://example.org:80/x?key=1&other=%20", "/x?key=1&other=%20", "example.org"),
        ("http://[::1]:4318/x", "/x", "[::1]:4318"),
        ("http://[fe80::1%25eth0]/x", "/x", "[fe80::1]"),
        ("http://bücher.example:4318/x", "/x", "xn--bcher-kva.example:4318"),
    ],
)
def test_a_request_names_path_host_and_the_last_of_headers_with_one_name(
    url: str, path: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(http_connection, "connect_to_destination", lambda *_: HttpClientConnection(ours))
    client = HttpClient(HttpClientConfig(url=url, headers={"X-Scope-OrgID": "tenant", "user-agent": "mine"}))
    with ours, theirs:
        theirs.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        client.post(b"body", {"Content-Type": "application/x-protobuf"})
        head, _, body = theirs.recv(1 << 16).partition(b"\r\n\r\n")
    line, *headers = head.decode().split("\r\n")
    assert line == f"POST {path} HTTP/1.1"
    assert sorted(headers) == [
        "Accept-Encoding: identity",
        "Content-Length: 4",
        "Content-Type: application/x-protobuf",
        f"Host: {host}",
        "X-Scope-OrgID: tenant",
        "user-agent: mine",
    ]
    assert body == b"body"
