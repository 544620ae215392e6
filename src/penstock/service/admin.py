"""HTTP for operators: `/metrics`, `/healthz`, `/readyz`, `/status.json`, and a page at `/` that shows the flow live."""

import base64
import binascii
import ipaddress
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.config.tree import AdminSection
from penstock.errors import ConfigError
from penstock.receive.config import is_authorized
from penstock.units import parse_address

log = logging.getLogger(__name__)
_TIMEOUT = 5.0  # seconds for a request to arrive: an operator's tool is never slower
_MAX_CONNECTIONS = 32  # connections at a time


class AdminSource(Protocol):
    """The service as the admin server sees it."""

    def metrics(self) -> bytes: ...

    def unhealthy(self) -> list[str]:
        """Why starting the process again would help; empty if it would not."""
        ...

    def unready(self) -> list[str]:
        """Why requests should not be sent here now; empty if they should."""
        ...

    def notes(self) -> list[str]:
        """Problems that are no reason to send requests elsewhere."""
        ...

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        ...


class AdminRefusal(NamedTuple):
    """The answer to a request that the admin port does not take."""

    status: HTTPStatus
    message: str


class AdminGuard:
    """Checks requests before they are answered.

    A web page whose name an attacker points at this machine has that name in `Host`: only addresses and known names are
    answered. A token is needed where one is set.

    Threads: every method may be called from any thread.
    """

    def __init__(self, config: AdminSection) -> None:
        self._config = config
        host, _ = parse_address(config.listen, "admin.listen")
        self._names = {name.lower() for name in ("localhost", socket.gethostname(), host, *config.allowed_hosts)}
        self._tokens, self.context = self.check_secrets()

    def check_secrets(self) -> tuple[tuple[bytes, ...], ssl.SSLContext | None]:
        """Returns the tokens and certificates as they are now; ConfigError if they cannot be read."""
        try:
            tokens = self._config.auth.tokens() if self._config.auth else ()
            return tokens, self._config.tls.context() if self._config.tls else None
        except ConfigError as error:
            raise error.within("admin") from error

    def reload(self) -> None:
        """Reads the tokens and certificates again; new connections use them."""
        self._tokens, self.context = self.check_secrets()

    def refusal(self, headers: Message) -> AdminRefusal | None:
        """Returns why a request is not answered, None if it is. Tokens aside."""
        if headers.get("Transfer-Encoding") or headers.get("Content-Length", "0").strip() != "0":
            return AdminRefusal(HTTPStatus.BAD_REQUEST, "a body is not taken here")
        hosts = headers.get_all("Host", [])  # a probe may have none; browsers have one
        host = ", ".join(hosts)
        if hosts and not self._is_known(host):
            return AdminRefusal(
                HTTPStatus.FORBIDDEN, f"host {host[:100]!r} is not known here; admin.allowed_hosts can name it"
            )
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return AdminRefusal(HTTPStatus.FORBIDDEN, f"the page of another site, {origin[:100]!r}, is not answered")
        return None

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.removeprefix("[").removesuffix("]").lower()
        if "*" in self._names or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def is_authorized(self, headers: Message) -> bool:
        """Says whether the request has a token: as a bearer's, or as the password that a browser asks for."""
        given = [_as_bearer(value) for value in headers.get_all("Authorization", [])]
        return not self._tokens or is_authorized(given, self._tokens)


def _as_bearer(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return header
    try:
        return "Bearer " + base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


class AdminServer:
    """Answers on one address until it is closed.

    Threads: one of its own, and one for each request, of which there are at most 32 at a time.
    """

    def __init__(self, host: str, port: int, observed: AdminSource, guard: AdminGuard | None = None) -> None:
        guard = guard or AdminGuard(AdminSection(listen=f"[{host}]:{port}"))
        self._server = _AdminHttpServer((host, port), _handler(observed, guard), guard)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="penstock-admin", daemon=True
        )

    @property
    def port(self) -> int:
        port: int = self._server.server_address[1]
        return port

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _AdminHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 makes clients wait seconds for another try
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], guard: AdminGuard) -> None:
        self._guard = guard
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # by age
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        request, client_address = super().get_request()
        if self._guard.context is not None:  # the thread of the request shakes hands
            request = self._guard.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, client_address

    def finish_request(self, request: Any, client_address: Any) -> None:
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(_TIMEOUT)
            request.do_handshake()
        super().finish_request(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Beyond the limit the oldest connection is closed: slow clients must not keep a probe out."""
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= _MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("A request to the admin port broke off. client=%s", client_address)


def _handler(observed: AdminSource, guard: AdminGuard) -> type[BaseHTTPRequestHandler]:
    def verdict(found: list[str], word: str) -> tuple[HTTPStatus, str, bytes]:
        status = HTTPStatus.SERVICE_UNAVAILABLE if found else HTTPStatus.OK
        body = {word: not found, "reasons": found, "notes": observed.notes()}
        return status, "application/json", json.dumps(body).encode() + b"\n"

    routes: dict[str, Callable[[], tuple[HTTPStatus, str, bytes]]] = {
        "/metrics": lambda: (HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", observed.metrics()),
        "/healthz": lambda: verdict(observed.unhealthy(), "healthy"),
        "/readyz": lambda: verdict(observed.unready(), "ready"),
        "/status.json": lambda: (HTTPStatus.OK, "application/json", json.dumps(observed.status()).encode()),
        "/": lambda: (HTTPStatus.OK, "text/html; charset=utf-8", _page()),
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT
        protocol_version = "HTTP/1.1"
        server_version = "penstock"
        sys_version = ""

        def do_GET(self) -> None:
            refusal = guard.refusal(self.headers)
            if refusal is not None:
                self.close_connection = True  # what follows may be a body
                self._answer(refusal.status, "text/plain", f"{refusal.message}\n".encode())
                return
            if not guard.is_authorized(self.headers):
                self._answer_stranger()
                return
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                known = ", ".join(routes)
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"not here; there are {known}\n".encode())
                return
            try:
                answer = route()
            except Exception:
                log.exception("A request to the admin port failed. path=%s", self.path)
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"see the log\n"
            self._answer(*answer)  # a client that has hung up is `handle_error`'s, and no error of ours

        def _answer_stranger(self) -> None:
            """Answers a request without a token: probes hear how it is, and not why."""
            found = {"/healthz": observed.unhealthy, "/readyz": observed.unready}.get(self.path)
            if found is None:
                self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", b"a token of admin.auth is needed\n")
            elif found():
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"no\n")
            else:
                self._answer(HTTPStatus.OK, "text/plain", b"yes\n")

        do_HEAD = do_GET  # noqa: N815 - the base class's name

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", 'Basic realm="penstock", charset="UTF-8"')
            if self.close_connection:
                self.send_header("Connection", "close")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug("Admin request. request=%s", args[0] if args else "")

    return Handler


def _page() -> bytes:
    return Path(__file__).with_name("status.html").read_bytes()
