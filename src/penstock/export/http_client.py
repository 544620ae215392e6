"""HTTP for exporters: one kept-alive connection for each thread, deadlines, and no retries of its own."""

import os
import re
import ssl
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from weakref import WeakSet

from penstock.errors import ConfigError, ErrorClass, TransientExportError
from penstock.export import classify, http_connection
from penstock.export.http_connection import HttpResponse
from penstock.protobuf import get_bytes
from penstock.units import parse_duration

MAX_ANSWER_BYTES = 64 * 1024  # bytes of an answer that are read: enough for any message of an OTLP or Prometheus server
_MAX_MESSAGE_CHARS = 500  # characters of it that go into an error
_MIN_SECRET_CHARS = 8  # characters: shorter ones would be found in ordinary words
_FRAMING = ("content-length", "transfer-encoding")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PORTS = {"http": 80, "https": 443}
_AGENT = f"penstock/{version('penstock')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Certificates for `https://`. Without files the system's authorities are trusted."""

    ca_file: str | Path | None = None
    """Authorities to trust instead of the system's."""
    cert_file: str | Path | None = None
    """The client's certificate, where the server asks for one."""
    key_file: str | Path | None = None
    """Its key; left out: it is in `cert_file`."""

    def __post_init__(self) -> None:
        for name in ("ca_file", "cert_file", "key_file"):
            check_destination_file(getattr(self, name), f"tls.{name}")
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError("is set, but tls.cert_file is not", field="tls.key_file")

    def context(self) -> ssl.SSLContext:
        """ConfigError if a file holds no certificate or key, or the two do not belong together."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"{self.ca_file} holds no certificates: {error}", field="tls.ca_file") from None
        if self.cert_file:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{self.cert_file} and its key cannot be used: {error}", field="tls.cert_file"
                ) from None
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpClientConfig:
    """How to reach an HTTP destination. Its text form holds no secret."""

    url: str
    timeout: float | str = 10.0
    """Seconds for one request, from connecting to the last byte of its answer."""
    headers: Mapping[str, str] | None = None
    token_file: str | Path | None = None
    """A file with a bearer token, read at every connect, and anew once it was refused, so that a new one is found."""
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        parts = split_destination_url(self.url, ("http", "https"), "http://host:port/path")
        if not _is_header(parts.path + parts.query) or " " in parts.path + parts.query:
            raise ConfigError("must be plain ASCII without spaces: write %20 for one", field="url")
        if parts.username or parts.password:
            raise ConfigError("must not hold a password: use token_file or headers", field="url")
        if self.tls is not None and parts.scheme != "https":
            raise ConfigError(f"is set, but the url says {parts.scheme}://", field="tls")
        object.__setattr__(self, "timeout", parse_duration(self.timeout, "timeout"))
        if not self.timeout:
            raise ConfigError("must be > 0, got 0", field="timeout")
        check_destination_file(self.token_file, "token_file")
        try:
            _host_header(parts)
        except UnicodeError:
            raise ConfigError(f"names no host that can be looked up: {parts.hostname!r}", field="url") from None
        for name, value in (self.headers or {}).items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(f"must be named in letters, digits and hyphens, got {name!r}", field="headers")
            if not _is_header(value):  # which may be secret
                raise ConfigError(f"must be one line of plain text each: that of {name!r} is not", field="headers")
            if name.lower() in _FRAMING:
                raise ConfigError(f"must not hold {name}: every request has its own", field="headers")

    def address(self) -> str:
        """Where it is, without what may be secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def __repr__(self) -> str:
        return f"HttpClientConfig({self.address()})"


def split_destination_url(url: str, schemes: tuple[str, str], example: str) -> SplitResult:
    """The parts of a URL; ConfigError, without what may be secret in it, if it is none of these schemes."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        is_whole = parts.scheme in schemes and bool(parts.hostname)
        parts.port  # noqa: B018 - raises if it is none
    except ValueError as error:
        raise ConfigError(f"cannot be read: {error}", field="url") from None
    if not is_whole:
        shown = url.rpartition("@")[2] if isinstance(url, str) else url
        raise ConfigError(f"must look like {example} or {schemes[1]}://..., got {shown!r}", field="url")
    return parts


def check_destination_file(path: str | Path | None, field: str) -> None:
    """ConfigError if there is a path and nothing to read there."""
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigError(f"must name a file that can be read, got {str(path)!r}", field=field)


def _is_header(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and text.isascii()


def _host_header(parts: SplitResult) -> str:
    """The `Host` header. UnicodeError if the host cannot be looked up."""
    name = (parts.hostname or "").encode("idna").decode("ascii")
    if ":" in name:
        name = f"[{name.partition('%')[0]}]"  # an IPv6 address; the interface after the % is local
    return name if parts.port in (None, _PORTS[parts.scheme]) else f"{name}:{parts.port}"


def _read_token(path: str | Path) -> str:
    """The token in the file. The error does not show it, and is transient: the file may be repaired."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TransientExportError(f"token_file {path} cannot be read: {reason}", ErrorClass.AUTH) from None
    if not token or not _is_header(token):
        raise TransientExportError(f"token_file {path} must hold one line of plain text", ErrorClass.AUTH)
    return token


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)  # its text form shows no header
class _KeptConnection:
    """A thread's kept-alive connection, and the client's headers as they were when it was made."""

    connection: http_connection.HttpClientConnection
    own_headers: Mapping[str, str]


class HttpClient:
    """Posts to one URL.

    Errors: an answer that is no success is raised as the error that `classify` makes of it; socket errors pass through.
    Threads: `post` may be called from any thread; each thread has a connection of its own. `close` ends all of them,
        also those with a request under way.
    """

    def __init__(self, config: HttpClientConfig, path: str = "", *, may_pass: Container[int] = range(500, 600)) -> None:
        parts = urlsplit(config.url)
        self._config = config
        self._may_pass = may_pass
        self._host, self._port = parts.hostname or "", _PORTS[parts.scheme] if parts.port is None else parts.port
        self._host_header = _host_header(parts)
        self._path = (parts.path.rstrip("/") + path or "/") + (f"?{parts.query}" if parts.query else "")
        self.address = config.address().rstrip("/") + path
        self._timeout = float(config.timeout)
        self._context = (config.tls or TlsConfig()).context() if parts.scheme == "https" else None
        self._local = threading.local()
        # _lock guards everything below.
        self._lock = threading.Lock()
        # Weak: the connection of a thread that has ended goes with it.
        self._connections: WeakSet[_KeptConnection] = WeakSet()
        self._closed = False

    def post(self, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
        """The answer, if it is a success; else an ExportError."""
        deadline = time.monotonic() + self._timeout
        kept = self._reusable_connection()
        if kept is not None:
            try:
                return self._request(kept, body, headers, deadline)
            except ConnectionError:
                pass  # a server may end an idle connection at any time: only on a fresh one that is a failure
        return self._request(self._connect(deadline), body, headers, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for kept in connections:
            kept.connection.cut()

    def _reusable_connection(self) -> _KeptConnection | None:
        """This thread's connection, None if there is none or the server is known to have ended it."""
        kept: _KeptConnection | None = getattr(self._local, "kept", None)
        if kept is None or kept.connection.is_quiet():
            return kept
        self._forget(kept)
        return None

    def _connect(self, deadline: float) -> _KeptConnection:
        self._check_open()
        headers = self._own_headers()
        kept = _KeptConnection(
            http_connection.connect_to_destination(self._host, self._port, self._context, deadline), headers
        )
        with self._lock:
            self._connections.add(kept)
        self._local.kept = kept
        try:
            self._check_open()  # again: it may have been closed during the connect
        except ConnectionAbortedError:
            self._forget(kept)
            raise
        return kept

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the exporter is closed")

    def _own_headers(self) -> dict[str, str]:
        headers = {"User-Agent": _AGENT, **(self._config.headers or {})}
        if self._config.token_file:
            headers["Authorization"] = f"Bearer {_read_token(self._config.token_file)}"
        return headers

    def _request(self, kept: _KeptConnection, body: bytes, headers: Mapping[str, str], deadline: float) -> HttpResponse:
        """Send the request and read its answer. The connection is kept only where both ended well."""
        can_be_kept = False
        try:
            response, was_sent_whole = self._exchange(kept, body, headers, deadline)
            can_be_kept = response.is_reusable and was_sent_whole
            if 200 <= response.status < 300:
                return response
            after = classify.parse_export_retry_after(response.headers.get("retry-after"), time.time())
            message = destination_error_message(response, kept.own_headers)
            error = classify.of_status(response.status, message, after, may_pass=self._may_pass)
            if error.error_class is ErrorClass.AUTH:
                can_be_kept = False  # the next connection reads the token file again
            raise error
        finally:
            if not can_be_kept:
                self._forget(kept)

    def _exchange(
        self, kept: _KeptConnection, body: bytes, headers: Mapping[str, str], deadline: float
    ) -> tuple[HttpResponse, bool]:
        """The answer, and whether the whole request was sent before it.

        A server that ends the connection before it has the whole request may have said why. A success is none then.
        """
        try:
            kept.connection.send(
                self._path, _joined({"Host": self._host_header}, kept.own_headers, headers), body, deadline
            )
        except ConnectionError as broken:
            try:
                response = kept.connection.receive(MAX_ANSWER_BYTES, deadline)
            except (HTTPException, OSError):
                raise broken from None
            if response.status < 300:
                raise
            return response, False
        return kept.connection.receive(MAX_ANSWER_BYTES, deadline), True

    def _forget(self, kept: _KeptConnection) -> None:
        kept.connection.close()
        self._local.kept = None
        with self._lock:
            self._connections.discard(kept)


def _joined(*headers: Mapping[str, str]) -> dict[str, str]:
    """All of these headers. Of those with one name, in whatever case, the last counts."""
    return dict({name.lower(): (name, value) for some in headers for name, value in some.items()}.values())


def destination_error_message(response: HttpResponse, own_headers: Mapping[str, str]) -> str:
    """The message of an error answer: plain text, or the text of a `google.rpc.Status`.

    Values of `own_headers` that the server repeats are masked: they may be secret.
    """
    body = response.body
    if "protobuf" in response.headers.get("content-type", ""):
        try:
            body = get_bytes(body, 2) or b""
        except ValueError:
            body = b""
    text = " ".join(body.decode("utf-8", "replace").split())
    for name, value in own_headers.items():
        for secret in (value, value.rpartition(" ")[2]):  # of "Bearer x" also the x alone
            if name != "User-Agent" and len(secret) >= _MIN_SECRET_CHARS:
                text = text.replace(secret, "***")
    return text[:_MAX_MESSAGE_CHARS]
