"""A network between consumer and broker that a test can cut."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections to a port on loopback."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls  # to be what a broker with TLS is
        self._swallows = False
        self._is_open = threading.Event()
        self._is_open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def swallow(self) -> None:
        """Keep every connection, and let nothing through any more."""
        self._swallows = True

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let new connections wait until the end of the `with`."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    def cut(self) -> None:
        """Drop every connection, without a good-bye in either direction."""
        with self._lock:
            dropped, self._open = self._open, []
        for one in dropped:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._is_open.wait()
                if self._tls:
                    try:
                        near = self._tls.wrap_socket(near, server_side=True)
                    except OSError:  # the client does not trust us, or we not it
                        continue
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._swallows:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would leave the waiting accept to take one more
        self._listener.close()
        self.cut()
