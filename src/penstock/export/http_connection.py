"""HTTP/1.1 over one connection of the standard library's client, held to a deadline.

The standard library bounds every read and write by itself. Here all of them together end at the deadline, also where
bytes trickle in. An error's text holds nothing of what the server sent: a server that echoes may send secrets back.
"""

import io
import select
import socket
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, IncompleteRead, RemoteDisconnected
from typing import Any, NamedTuple


class HttpResponse(NamedTuple):
    """An answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_reusable: bool
    """Whether the connection can be used again."""


def connect_to_destination(
    host: str, port: int, context: ssl.SSLContext | None, deadline: float
) -> "HttpClientConnection":
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
    return HttpClientConnection(sock)


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


class HttpClientConnection:
    """One connection to a server: `send` and `receive` in turns, while it `is_quiet` and the answers say so.

    Errors: those of the socket; TimeoutError at the deadline; RemoteDisconnected if the server ends the connection
        instead of answering, IncompleteRead if it does so within its answer; HTTPException if that is not HTTP.
    Threads: one at a time, but for `cut`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._timed = _DeadlineSocket(sock)
        self._client = HTTPConnection("")  # the host is a header of each request
        self._client.auto_open = 0
        self._client.sock = self._timed
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def is_quiet(self) -> bool:
        """Whether the server has neither ended the connection nor said anything unasked: that is no answer."""
        return not self._poll.poll(0)

    def send(self, path: str, headers: Mapping[str, str], body: bytes, deadline: float) -> None:
        """Send a POST."""
        self._timed.deadline = deadline
        self._client.request("POST", path, body, dict(headers))

    def receive(self, most: int, deadline: float) -> HttpResponse:
        """The answer; of one whose body is longer than `most` bytes so much, and the connection cannot go on."""
        self._timed.deadline = deadline
        try:
            with self._client.getresponse() as response:
                if self._timed.has_ended:  # within the headers, which the client takes for their end
                    raise IncompleteRead(b"")
                body = response.read(most)
                is_whole = response.isclosed()
                if response.length and len(body) < most:
                    raise IncompleteRead(b"", response.length)
        except (RemoteDisconnected, IncompleteRead):
            raise
        except HTTPException as error:
            raise HTTPException(f"the answer is not HTTP/1: {type(error).__name__}") from None
        if response.status < 200:
            raise HTTPException(f"the answer is not final: its status is {response.status}")
        headers = {name.lower(): value for name, value in response.getheaders()}
        return HttpResponse(response.status, headers, body, is_whole and not response.will_close)

    def cut(self) -> None:
        """End it from any thread. A thread that reads from it is woken and has what had come by then."""
        try:
            # Of the socket itself: that of TLS forgets its keys first, so what had come could not be read any more.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed already

    def close(self) -> None:
        self._sock.close()


class _DeadlineSocket(io.RawIOBase):
    """The socket as `http.client` sees it, every call bounded by what is left until `deadline`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline = 0.0
        self.has_ended = False

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._sock.settimeout(_time_left(self.deadline))
            try:
                rest = rest[self._sock.send(rest) :]
            except ssl.SSLEOFError as error:
                raise BrokenPipeError(str(error)) from None  # as it is called without TLS

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_time_left(self.deadline))
        count = self._sock.recv_into(buffer)
        self.has_ended = not count
        return count

    def close(self) -> None:
        """Nothing: `HttpClientConnection` closes the socket, since the client would do so before the answer is read."""


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request did not end in time")
    return left
