"""HTTP/1.1 byte by byte: every kind of answer, whole and in pieces; requests as the standard library writes them."""

import errno
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export import http1
from penstock.export.http1 import MAX_HEAD_BYTES, Connection, HttpResponse
from penstock.export.http_client import HttpClient, HttpClientConfig

MOST = 100  # bytes of an answer that the tests read
AT_ONCE = 10_000  # bytes of a packet: less than what is received at once, which would cut it off


class Case(NamedTuple):
    sent: bytes
    status: int
    body: bytes
    is_reusable: bool
    ends_with_the_connection: bool = False


ANSWERS = {
    "a length": Case(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", 200, b"body", True),
    "nothing": Case(b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", 200, b"", True),
    "no reason": Case(b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
    "no content": Case(b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "not modified": Case(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\n", 304, b"", True),
    "continue": Case(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
    "hints": Case(
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nConnection: close\r\n\r\n" * 2 + b"HTTP/1.1 204 Gone\r\n\r\n",
        204, b"", True,
    ),
    "another protocol": Case(b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 101, b"", False),
    "chunks": Case(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n",
        200, b"abc0123456789", True,
    ),
    "chunks with all that may be in them": Case(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nContent-Length: 2\r\n\r\n"
        b"0003;a=b\r\nabc\r\n1 ;c\r\nd\r\n00;e\r\nDigest: x\r\nExpires: 0\r\n\r\n",
        200, b"abcd", True,
    ),
    "chunks of nothing": Case(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200, b"", True),
    "until the end": Case(b"HTTP/1.1 200 OK\r\n\r\nbody", 200, b"body", False, True),
    "until the end at once": Case(b"HTTP/1.1 503 Sorry\r\n\r\n", 503, b"", False, True),
    "the last": Case(b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
    "the last of several": Case(
        b"HTTP/1.1 200 OK\r\nConnection: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False
    ),
    "1.0": Case(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
    "1.0 and on": Case(b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
    "lines of old": Case(
        b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\nX: y\n\n1\na\n0\nX: y\n\n", 200, b"a", True
    ),
    "folded": Case(b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\tc\r\nContent-Length:\r\n 1\r\n\r\nx", 200, b"x", True),
    "twice the same": Case(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX: a\r\nX: b\r\ncontent-length: 1\r\n\r\nx", 200, b"x", True
    ),
    "odd headers": Case(
        b"HTTP/1.1  200 OK\r\nContent-Length : 1\r\nEmpty:\r\nX: a:b\xff\x00\r\nX \t:\tc \r\n\r\nx", 200, b"x", True
    ),
    "identity": Case(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True
    ),
    "as much as is read": Case(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100, 200, b"x" * 100, True),
    "a byte more": Case(b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, 200, b"x" * 100, False),
    "chunks as many as are read": Case(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"32\r\n" + b"x" * 50 + b"\r\n32\r\n" + b"x" * 50
        + b"\r\n0\r\n\r\n",
        200, b"x" * 100, True,
    ),
    "a chunk more": Case(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b"x" * 100 + b"\r\n1\r\nx\r\n0\r\n\r\n",
        200, b"x" * 100, False,
    ),
    "a chunk too long": Case(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + b"x" * 200,
        200, b"x" * 100, False,
    ),
    "too much until the end": Case(b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 300, 500, b"x" * 100, False),
}  # fmt: skip

HALVES = {
    "half a status line": b"HTTP/1.",
    "a status line": b"HTTP/1.1 200 OK\r\n",
    "half a header": b"HTTP/1.1 200 OK\r\nContent-Le",
    "headers without their end": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
    "no body": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n",
    "no chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "half a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1",
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal",
    "a chunk without its end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n",
    "half the trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\nX: y\r\n",
}

NONSENSE = {
    "another server": b"220 hidden ESMTP\r\n",
    "bytes": b"\x00hidden",
    "an empty line": b"\r\nHTTP/1.1 200 hidden\r\n\r\n",
    "another version": b"HTTP/2 200 hidden\r\n\r\n",
    "a version without an end": b"HTTP/1.12 200 hidden\r\n\r\n",
    "no status": b"HTTP/1.1 hidden\r\n\r\n",
    "a short status": b"HTTP/1.1 20 hidden\r\n\r\n",
    "a long status": b"HTTP/1.1 2000 hidden\r\n\r\n",
    "no status there is": b"HTTP/1.1 099 hidden\r\n\r\n",
    "no name": b"HTTP/1.1 200 OK\r\n: hidden\r\n\r\n",
    "no header": b"HTTP/1.1 200 OK\r\nhidden\r\n\r\n",
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"X: hidden\r\n" * (MAX_HEAD_BYTES // 8),
    "a header without end": b"HTTP/1.1 200 OK\r\nX: hidden" + b"x" * (MAX_HEAD_BYTES + AT_ONCE),
    "no length": b"HTTP/1.1 200 OK\r\nContent-Length: hidden\r\n\r\n",
    "an empty length": b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
    "less than nothing": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a length without end": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "other digits": b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
    "chunks without a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhidden\r\n",
    "chunks of less than nothing": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nhidden",
    "chunks in Python's digits": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1_0\r\nhidden",
    "a chunk longer than it says": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhidden\r\n",
    "an extension without end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;" + b"hidden" * AT_ONCE,
    "trailers without end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: hidden\r\n" * 1000,
}


@contextmanager
def pair(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection and its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        yield Connection(ours), theirs


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def soon() -> float:
    return time.monotonic() + 30.0


def receive(*pieces: bytes, is_over: bool = True) -> HttpResponse:
    """What is made of an answer that comes in these pieces, none of them together with the next; then the server ends
    the connection, if it `is_over`."""
    with pair(socket.SOCK_SEQPACKET) as (connection, theirs):

        def serve() -> None:
            try:
                for piece in pieces:
                    for at in range(0, len(piece), AT_ONCE):
                        theirs.send(piece[at : at + AT_ONCE])
                if is_over:
                    theirs.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the client has stopped reading

        with beside(serve):
            try:
                return connection.receive(MOST, soon())
            finally:
                connection.cut()


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("is_over", [True, False])
def test_an_answer_is_read_wherever_it_is_cut(case: Case, is_over: bool) -> None:
    cuts = [[case.sent], [case.sent[at : at + 1] for at in range(len(case.sent))]]
    cuts += [[case.sent[:at], case.sent[at:]] for at in range(1, len(case.sent))]
    for pieces in cuts:
        received = receive(*pieces, is_over=is_over or case.ends_with_the_connection)
        assert (received.status, received.body, received.is_reusable) == case[1:4]


@given(st.sampled_from(list(ANSWERS.values())), st.lists(st.integers(0, 300)))
def test_an_answer_is_read_in_any_pieces(case: Case, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(case.sent)]
    pieces = [case.sent[start:end] for start, end in itertools.pairwise(bounds)]
    received = receive(*(piece for piece in pieces if piece))
    assert (received.status, received.body, received.is_reusable) == case[1:4]


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_half_an_answer_is_an_error(sent: bytes) -> None:
    for at in range(len(sent)):
        with pytest.raises(IncompleteRead):
            receive(*[sent[:at]] * bool(at), sent[at:])


@pytest.mark.parametrize("sent", [[], [b"HTTP/1.1 100 Continue\r\n\r\n"]])
def test_no_answer_is_a_connection_that_was_ended(sent: list[bytes]) -> None:
    with pytest.raises(RemoteDisconnected):
        receive(*sent)


@pytest.mark.parametrize("sent", NONSENSE.values(), ids=NONSENSE)
def test_what_is_not_http_is_an_error_at_once_that_shows_nothing_of_it(sent: bytes) -> None:
    for pieces in ([sent], [sent[:1], sent[1:]]):
        with pytest.raises(HTTPException) as caught:
            receive(*pieces, is_over=False)
        assert type(caught.value) is HTTPException
        assert "hidden" not in str(caught.value)


@given(st.binary(max_size=200), st.sampled_from([b"", *(case.sent for case in ANSWERS.values())]), st.integers(0, 200))
def test_whatever_comes_is_an_answer_or_an_error_of_http(noise: bytes, sent: bytes, at: int) -> None:
    try:
        received = receive(sent[:at] + noise + sent[at:])
    except (HTTPException, ConnectionError):
        return
    assert len(received.body) <= MOST


def test_headers_are_found_by_their_names_in_lower_case_and_joined() -> None:
    received = receive(b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nX: a\r\n  b\r\nx : c\r\nContent-Length: 0\r\n\r\n")
    assert received.headers == {"retry-after": "7", "x": "a b, c", "content-length": "0"}


@pytest.mark.parametrize("surplus", [b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
@pytest.mark.parametrize("name", ["a length", "no content", "chunks"])
def test_after_an_answer_with_something_behind_it_the_connection_cannot_go_on(name: str, surplus: bytes) -> None:
    case = ANSWERS[name]
    received = receive(case.sent + surplus)
    assert (received.status, received.body, received.is_reusable) == (case.status, case.body, False)


def test_what_comes_unasked_or_the_end_of_the_connection_is_noticed() -> None:
    with pair() as (connection, theirs):
        assert connection.is_quiet()
        theirs.send(b"x")
        assert not connection.is_quiet()
    with pair() as (connection, theirs):
        theirs.close()
        assert not connection.is_quiet()


def test_the_deadline_holds_for_all_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(http1, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    pieces = [bytes([byte]) for byte in b"HTTP/1.1 200"]
    with pair(socket.SOCK_SEQPACKET) as (connection, theirs):
        for piece in pieces[:6]:
            theirs.send(piece)
        with pytest.raises(TimeoutError):
            connection.receive(MOST, 5.0)
        assert next(clock) == 6


def test_an_answer_that_had_come_can_be_read_after_the_connection_was_cut() -> None:
    with pair() as (connection, theirs):
        theirs.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        connection.cut()
        assert connection.receive(MOST, soon()).status == 204
        with pytest.raises(RemoteDisconnected):
            connection.receive(MOST, soon())
        connection.close()
        connection.cut()


@pytest.mark.parametrize(("start", "body"), [(b"x" * 10, b"y" * 5_000_000), (b"x" * 3_000_000, b"y" * 3_000_000)])
def test_a_request_that_does_not_fit_at_once_is_sent_whole(start: bytes, body: bytes) -> None:
    expected = start + str(len(body)).encode() + b"\r\n\r\n" + body
    came = bytearray()
    with pair() as (connection, theirs):

        def read() -> None:
            while len(came) < len(expected) and (part := theirs.recv(1 << 20)):
                came.extend(part)

        with beside(read):
            connection.send(start, body, soon())
    assert came == expected


def test_a_server_that_does_not_read_is_held_to_the_deadline() -> None:
    with pair() as (connection, _), pytest.raises(TimeoutError):
        connection.send(b"x", bytes(10_000_000), time.monotonic() + 0.05)


def test_addresses_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float | None] = []

    class Deaf(socket.socket):
        def connect(self, address: Any) -> None:
            timeouts.append(self.gettimeout())
            raise TimeoutError(address)

    address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 3)
    monkeypatch.setattr(socket, "socket", Deaf)
    monkeypatch.setattr(http1, "time", SimpleNamespace(monotonic=lambda: 100.0))
    with pytest.raises(TimeoutError):
        http1.connect("nowhere", 1, None, 112.0)
    assert timeouts == [4.0, 6.0, 12.0]


def test_an_address_that_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no server listens there
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (bound, listener)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(addresses))
        http1.connect("somewhere", 1, None, soon()).close()
        addresses.pop()
        with pytest.raises(ConnectionRefusedError):
            http1.connect("somewhere", 1, None, soon())


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
        http1.connect("somewhere", 1, None, soon()).close()


# -- requests ----------------------------------------------------------------------------------------------------------


def parts(request: bytes) -> tuple[bytes, list[bytes], bytes]:
    """The request line, the headers in any order, the body."""
    head, _, body = request.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    return line, sorted(headers), body


def by_the_standard_library(url: str, host: str, port: int | None, headers: dict[str, str], body: bytes) -> bytes:
    kind = http.client.HTTPSConnection if url.startswith("https") else http.client.HTTPConnection
    connection = kind(host, port)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection.sock = ours
        path = "/" + url.split("/", 3)[3] if url.count("/") > 2 else "/"
        connection.request("POST", path, body, headers)
        return theirs.recv(1 << 16)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://example.org", "example.org", None),
        ("http://Example.org:4318/v1/metrics", "example.org", 4318),
        ("http://example.org:80/x?key=1&other=%20", "example.org", 80),
        ("https://example.org/x", "example.org", None),
        ("https://example.org:80/x", "example.org", 80),
        ("http://127.0.0.1:9090/api/v1/write", "127.0.0.1", 9090),
        ("http://[::1]:4318/x", "::1", 4318),
        ("http://[::1]/x", "::1", 80),
        ("http://[fe80::1%25eth0]:4318/x", "fe80::1%25eth0", 4318),
        ("http://bücher.example:4318/x", "bücher.example", 4318),
    ],
)
@pytest.mark.parametrize("body", [b"", b"body"])
@pytest.mark.parametrize("own", [{}, {"Host": "other", "accept-encoding": "gzip", "X-Scope-OrgID": "tenant"}])
def test_a_request_is_what_the_standard_library_would_send(
    url: str, host: str, port: int | None, body: bytes, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    connected: list[tuple[str, int]] = []

    def connect(host: str, port: int, *_: object) -> Connection:
        connected.append((host, port))
        return Connection(ours)

    monkeypatch.setattr(http1, "connect", connect)
    monkeypatch.setattr(Connection, "is_quiet", lambda connection: True)  # the answer is there before the request
    client = HttpClient(HttpClientConfig(url=url, headers=own))
    headers = {"Content-Type": "application/x-protobuf"}
    with ours, theirs:
        theirs.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        client.post(body, headers)
        first = theirs.recv(1 << 16)
    expected = parts(by_the_standard_library(url, host, port, {**own, **headers}, body))
    agent = next(line for line in parts(first)[1] if line.startswith(b"User-Agent: penstock/"))
    assert parts(first) == (expected[0], sorted([*expected[1], agent]), expected[2])
    assert connected == [(host, port or (443 if url.startswith("https") else 80))]


def test_the_last_of_headers_with_one_name_counts_in_whatever_case() -> None:
    start = http1.encode_post_start(
        "/", "host", {"User-Agent": "a", "X": "1"}, {"user-agent": "b"}, {"USER-AGENT": "c"}
    )
    assert start == (
        b"POST / HTTP/1.1\r\nHost: host\r\nAccept-Encoding: identity\r\nUSER-AGENT: c\r\nX: 1\r\nContent-Length: "
    )


def test_headers_that_change_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(http1, "connect", lambda *_: Connection(ours))
    monkeypatch.setattr(Connection, "is_quiet", lambda connection: True)  # the answer is there before the request
    client = HttpClient(HttpClientConfig(url="http://host"))
    headers = {"X": "1"}
    came = []
    with ours, theirs:
        for number in range(4):
            headers["X"] = str(number // 2)
            theirs.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            client.post(b"", headers)
            came.append(parts(theirs.recv(1 << 16))[1][-1])
    assert came == [b"X: 0", b"X: 0", b"X: 1", b"X: 1"]
