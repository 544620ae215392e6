"""An HTTP server that misbehaves on purpose, on real sockets."""

import gzip
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import cramjam

from penstock.testing import wait_until


@dataclass
class Request:
    """What came in, decompressed."""

    path: str
    headers: dict[str, str]
    body: bytes


Behaviour = Callable[[socket.socket], bool]  # answers a request; whether the connection goes on


def answer(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    """A well-formed answer."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    whole = "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def behave(connection: socket.socket) -> bool:
        connection.sendall(whole)
        return True

    return behave


def said(behave: Behaviour, has_said: threading.Event) -> Behaviour:
    """The same, and tells when it is done: by then an answer is on the client's side."""

    def behave_and_tell(connection: socket.socket) -> bool:
        keeps_alive = behave(connection)
        has_said.set()
        return keeps_alive

    return behave_and_tell


def half(connection: socket.socket) -> bool:
    """Promises more than it sends."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    return False


def half_of_its_headers(connection: socket.socket) -> bool:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Le")
    return False


def nonsense(connection: socket.socket) -> bool:
    connection.sendall(b"\x00\x01\x02 this is not HTTP\r\n\r\n")
    return False


def reset(connection: socket.socket) -> bool:
    """RST instead of an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def hang_up(connection: socket.socket) -> bool:
    """Ends the connection without a word, as a server does with idle ones."""
    return False


@dataclass
class Misbehaving:
    """Answers each request with the next behaviour, and as usually when there is none left."""

    behaviours: list[Behaviour] = field(default_factory=list)
    usually: Behaviour = field(default_factory=lambda: answer(200))
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    tls: ssl.SSLContext | None = None
    slow: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    keep: int | None = None  # bytes of each body that are kept
    is_hasty: bool = False  # it answers when it has the headers, and ends the connection with the body unread
    _open: set[socket.socket] = field(default_factory=set)

    def silent(self, connection: socket.socket) -> bool:
        """Takes the request and never answers, until the server ends."""
        self.slow.wait(30)
        return False

    def dripping(self, connection: socket.socket) -> bool:
        """Answers a byte at a time, each well within a timeout."""
        return self._drip(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    def dripping_headers(self, connection: socket.socket) -> bool:
        """The same before its body."""
        return self._drip(connection, b"HTTP/1.1 200 OK\r\nX: ")

    def _drip(self, connection: socket.socket, start: bytes) -> bool:
        connection.sendall(start)
        for _ in range(1000):
            connection.sendall(b"x")
            if self.slow.wait(0.02):
                break
        return False

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections that it has not ended."""
        return len(self._open)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Up; at the end down, with every connection cut. Entered again, it is up on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        accepting.start()
        try:
            yield self
        finally:
            self.slow.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(20)  # whom it has let in by now is cut off with the others
            listener.close()
            for connection in list(self._open):
                try:
                    connection.shutdown(socket.SHUT_RDWR)  # its own thread closes it
                except OSError:
                    pass  # it has done so
            wait_until(lambda: not self._open)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            connection = accepted
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an answer leaves before it hangs up
            if self.tls is not None:
                connection = self.tls.wrap_socket(accepted, server_side=True)
            with connection, connection.makefile("rb") as reader:
                while (request := _read(reader, with_body=not self.is_hasty)) is not None:
                    request.body = request.body[: self.keep]
                    self.requests.append(request)
                    behave = self.behaviours.pop(0) if self.behaviours else self.usually
                    if not behave(connection) or self.is_hasty:
                        return
        except (OSError, ValueError):
            pass  # it was cut off
        finally:
            self._open.discard(accepted)


def _read(reader: object, *, with_body: bool) -> Request | None:
    line = reader.readline()  # type: ignore[attr-defined]
    if not line:
        return None
    headers: dict[str, str] = {}
    while header := reader.readline().strip():  # type: ignore[attr-defined]
        name, _, value = header.decode().partition(":")
        headers[name.lower()] = value.strip()
    if not with_body:
        return Request(line.split()[1].decode(), headers, b"")
    length = int(headers.get("content-length", "0"))
    body = reader.read(length)  # type: ignore[attr-defined]
    if len(body) < length:
        return None  # the client was cut off
    encoding = headers.get("content-encoding")
    if encoding == "gzip":
        body = gzip.decompress(body)
    elif encoding == "zstd":
        body = bytes(cramjam.zstd.decompress(body))
    elif encoding == "snappy":
        body = bytes(cramjam.snappy.decompress_raw(body))
    return Request(line.split()[1].decode(), headers, body)
