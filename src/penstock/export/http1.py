"""HTTP/1.1 over one connection, as a client speaks it: a request goes out in one piece, its answer is read whole.

    status line, headers, empty line   as long as they come with 1xx: an answer that is none yet
    body                               none with 204 and 304; else in chunks, or so many bytes, or until the end

It is read as RFC 9112 has it. What is not HTTP is an error whose text holds nothing of what came: a server that echoes
may send secrets back. A request of 50 KB takes 60 µs of processor time, where the standard library's client takes 115
and two bare calls on a socket 37 (docs/performance.md; why not something else, ADR 9).
"""

import re
import select
import socket
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from typing import NamedTuple

MAX_HEAD_BYTES = 64 * 1024  # bytes of status line and headers: eight times what proxies commonly let pass
_MAX_LINE_BYTES = 8 * 1024  # bytes of a chunk's length with its extensions, or of a trailer
_MAX_TRAILERS = 100
_RECV_BYTES = 16 * 1024  # bytes to receive: nearly every answer is a few hundred

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_STATUS_LINE = re.compile(r"HTTP/1\.([0-9]) +([1-9][0-9][0-9])(?![^ \r\n])")
_FOLD = re.compile(r"\r?\n[ \t]+")  # a header that goes on in the next line, which is obsolete
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]+)[ \t]*(?:;|$)")


class HttpResponse(NamedTuple):
    """What the server said. Names of headers are in lower case; several of one name are one, with commas between."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_reusable: bool
    """Whether the connection can be used again."""


def connect(host: str, port: int, context: ssl.SSLContext | None, deadline: float) -> "Connection":
    """A connection to the first address of `host` that takes it."""
    sock = _dial(host, port, deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock.settimeout(_time_left(deadline))
            sock = context.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


def _dial(host: str, port: int, deadline: float) -> socket.socket:
    """Try one address after the other: each gets its share of the time that is left, so the last gets a try as well."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    while True:
        family, kind, protocol, _, address = addresses.pop(0)
        try:
            sock = socket.socket(family, kind, protocol)  # which a system may not have: IPv6, for one
            try:
                sock.settimeout(_time_left(deadline) / (len(addresses) + 1))
                sock.connect(address)
            except BaseException:
                sock.close()
                raise
            return sock
        except OSError:
            if not addresses:
                raise


def encode_post_start(path: str, host: str, *headers: Mapping[str, str]) -> bytes:
    """A request up to the length of its body. Of headers of one name, in whatever case, the last one counts."""
    said: dict[str, tuple[str, str]] = {}
    for some in ({"Host": host, "Accept-Encoding": "identity"}, *headers):
        said.update((name.lower(), (name, value)) for name, value in some.items())
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.values())
    return f"POST {path} HTTP/1.1\r\n{lines}Content-Length: ".encode("ascii")


class Connection:
    """One connection to a server: `send`, `receive`, and so on while it `is_quiet` and can go on.

    Errors: what the socket says; TimeoutError at the deadline, whatever trickles in until then; RemoteDisconnected if
        the server ends the connection instead of answering, IncompleteRead if it does so within its answer.
    Threads: one at a time, but for `cut`.
    """

    __slots__ = ("_is_tls", "_poll", "_sock")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def is_quiet(self) -> bool:
        """Whether the server has neither ended the connection nor said anything unasked: that is no answer."""
        return not self._poll.poll(0)

    def send(self, start: bytes, body: bytes, deadline: float) -> None:
        """Send a request that begins with that, see `encode_post_start`."""
        head = b"%b%d\r\n\r\n" % (start, len(body))
        sent = 0
        if not self._is_tls:  # which knows no call for both
            self._sock.settimeout(_time_left(deadline))
            sent = self._sock.sendmsg((head, body))
            if sent == len(head) + len(body):
                return
        for part in (head, body):
            rest = memoryview(part)[sent:]
            sent = max(0, sent - len(part))
            while rest:
                self._sock.settimeout(_time_left(deadline))
                try:
                    rest = rest[self._sock.send(rest) :]
                except ssl.SSLEOFError as error:
                    raise BrokenPipeError(str(error)) from None  # as it is called without TLS

    def receive(self, most: int, deadline: float) -> HttpResponse:
        """The answer; of one whose body is longer than `most` bytes so much, and the connection cannot go on."""
        reader = _ResponseReader(self._sock, deadline)
        status = 100
        while 100 <= status < 200 and status != 101:  # 101: something else than HTTP would follow
            keeps_alive, status, headers = _parse_head(reader.read_head())
        body, is_whole = b"", status >= 200
        if status >= 200 and status not in (204, 304):
            length = headers.get("content-length")
            if headers.get("transfer-encoding", "").lower().endswith("chunked"):
                body, is_whole = reader.read_chunks(most)
            elif length is None:
                body, is_whole = reader.read_to_end(most), False
            elif not _LENGTH.fullmatch(length):
                raise HTTPException("the answer has a Content-Length that is none")
            else:
                body, is_whole = reader.read_exactly(min(int(length), most)), int(length) <= most
        return HttpResponse(status, headers, body, keeps_alive and is_whole and not reader.buffer)

    def cut(self) -> None:
        """End it from any thread. A thread that reads from it is woken and has what had come by then."""
        try:
            # Of the socket itself: that of TLS forgets its keys first, so what had come could not be read any more.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed already

    def close(self) -> None:
        self._sock.close()


class _ResponseReader:
    """The bytes of an answer, as they come."""

    __slots__ = ("_deadline", "_sock", "buffer")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self.buffer = b""

    def read_head(self) -> str:
        """Status line and headers, without the empty line."""
        seen = 0
        if not self.buffer and not self._receive_more():
            raise RemoteDisconnected("the server ended the connection without an answer")
        while (end := _END_OF_HEAD.search(self.buffer, seen)) is None:
            if not b"HTTP/1.".startswith(self.buffer[:7]):
                raise HTTPException("the answer is not HTTP/1")  # at once: more may never come
            if len(self.buffer) > MAX_HEAD_BYTES:
                raise HTTPException(f"the answer has more than {MAX_HEAD_BYTES} bytes of headers")
            seen = max(0, len(self.buffer) - 2)  # the end may have come in part
            self._require_more(None)
        head = self.buffer[: end.start()].decode("latin-1")
        self.buffer = self.buffer[end.end() :]
        return head

    def read_exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self._require_more(size - len(self.buffer))
        part, self.buffer = self.buffer[:size], self.buffer[size:]
        return part

    def read_chunks(self, most: int) -> tuple[bytes, bool]:
        """The body, at most so much of it, and whether that is all."""
        parts: list[bytes] = []
        while size := self._read_chunk_size():
            part = self.read_exactly(min(size, most))
            parts.append(part)
            most -= len(part)
            if len(part) < size:
                return b"".join(parts), False
            if self._read_line():
                raise HTTPException("the answer has a chunk that is longer than it says")
        for _ in range(_MAX_TRAILERS):
            if not self._read_line():
                return b"".join(parts), True
        raise HTTPException(f"the answer has more than {_MAX_TRAILERS} trailers")

    def read_to_end(self, most: int) -> bytes:
        """What comes until the server ends the connection."""
        while len(self.buffer) < most and self._receive_more():
            pass
        return self.buffer[:most]

    def _read_chunk_size(self) -> int:
        found = _CHUNK.match(self._read_line())
        if found is None:
            raise HTTPException("the answer has a chunk without a length")
        return int(found[1], 16)

    def _read_line(self) -> bytes:
        while (end := self.buffer.find(b"\n", 0, _MAX_LINE_BYTES)) < 0:
            if len(self.buffer) >= _MAX_LINE_BYTES:
                raise HTTPException(f"the answer has a line of more than {_MAX_LINE_BYTES} bytes")
            self._require_more(None)
        line, self.buffer = self.buffer[:end], self.buffer[end + 1 :]
        return line.removesuffix(b"\r")

    def _require_more(self, missing: int | None) -> None:
        if not self._receive_more():
            raise IncompleteRead(b"", missing)

    def _receive_more(self) -> bool:
        """Wait for more; False if there is none, since the server has ended the connection."""
        self._sock.settimeout(_time_left(self._deadline))
        part = self._sock.recv(_RECV_BYTES)
        self.buffer += part
        return bool(part)


def _parse_head(head: str) -> tuple[bool, int, dict[str, str]]:
    """Whether the connection goes on, the status, and the headers."""
    found = _STATUS_LINE.match(head)
    if found is None:
        raise HTTPException("the answer is not HTTP/1")
    if "\n " in head or "\n\t" in head:
        head = _FOLD.sub(" ", head)
    headers: dict[str, str] = {}
    for line in head.split("\n")[1:]:
        name, colon, value = line.partition(":")
        name, value = name.rstrip(" \t").lower(), value.strip(" \t\r")
        if not name or not colon:
            raise HTTPException("the answer has a header without a name")
        if headers.get(name, value) != value:
            value = f"{headers[name]}, {value}"
        headers[name] = value
    connection = headers.get("connection", "").lower()
    keeps_alive = "keep-alive" in connection if found[1] == "0" else "close" not in connection
    return keeps_alive, int(found[2]), headers


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request did not end in time")
    return left
