"""HTTP for exporters: kept-alive connections of each thread, deadlines, nothing that retries behind our back."""

import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from weakref import WeakSet

from penstock.errors import ConfigError, ErrorClass, TransientExportError
from penstock.export import classify, http1
from penstock.export.http1 import Answer
from penstock.protobuf import get_bytes
from penstock.units import parse_duration

MOST_ANSWER = 64 * 1024  # bytes of an answer that we read: enough for any message of an OTLP or Prometheus server
_TO_READ = 0.1  # seconds to read an answer that may have come while nobody waited for it
_MESSAGE = 500  # characters of it that go into an error
_SHORTEST_SECRET = 8  # characters: shorter ones would be found in ordinary words
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
    """Our own certificate, where the other side asks for one."""
    key_file: str | Path | None = None
    """Its key; left out: it is in `cert_file`."""

    def __post_init__(self) -> None:
        for name in ("ca_file", "cert_file", "key_file"):
            check_file(getattr(self, name), f"tls.{name}")
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError("tls.key_file is set, but tls.cert_file is not")

    def context(self) -> ssl.SSLContext:
        """ConfigError if a file holds no certificate or key, or the two do not belong together."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"tls.ca_file {self.ca_file} holds no certificates: {error}") from None
        if self.cert_file:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except ssl.SSLError as error:
                raise ConfigError(f"tls.cert_file {self.cert_file} and its key cannot be used: {error}") from None
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """How to reach an HTTP destination. Its text form holds no secret."""

    url: str
    timeout: float | str = 10.0
    """Seconds for one request, from connecting to the last byte of its answer."""
    headers: Mapping[str, str] | None = None
    token_file: str | Path | None = None
    """A file with a bearer token, read at every connect, and anew once it was refused, so that a new one is found."""
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        parts = split_url(self.url, ("http", "https"), "http://host:port/path")
        if not _is_header(parts.path + parts.query) or " " in parts.path + parts.query:
            raise ConfigError("url must be plain ASCII without spaces: write %20 for one")
        if parts.username or parts.password:
            raise ConfigError("url must not hold a password: use token_file or headers")
        if self.tls is not None and parts.scheme != "https":
            raise ConfigError(f"tls is set, but the url says {parts.scheme}://")
        object.__setattr__(self, "timeout", parse_duration(self.timeout, "timeout"))
        if not self.timeout:
            raise ConfigError("timeout must be > 0, got 0")
        check_file(self.token_file, "token_file")
        try:
            _host_header(parts)
        except UnicodeError:
            raise ConfigError(f"url names no host that can be looked up: {parts.hostname!r}") from None
        for name, value in (self.headers or {}).items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(f"headers must be named in letters, digits and hyphens, got {name!r}")
            if not _is_header(value):  # which may be secret
                raise ConfigError(f"headers must be one line of plain text each: that of {name!r} is not")
            if name.lower() in _FRAMING:
                raise ConfigError(f"headers must not hold {name}: every request has its own")

    def address(self) -> str:
        """Where it is, without what may be secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def __repr__(self) -> str:
        return f"HttpConfig({self.address()})"


def split_url(url: str, schemes: tuple[str, str], example: str) -> SplitResult:
    """The parts of a URL; ConfigError, without what may be secret in it, if it is none of these schemes."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        is_whole = parts.scheme in schemes and bool(parts.hostname)
        parts.port  # noqa: B018 - raises if it is none
    except ValueError as error:
        raise ConfigError(f"url cannot be read: {error}") from None
    if not is_whole:
        shown = url.rpartition("@")[2] if isinstance(url, str) else url
        raise ConfigError(f"url must look like {example} or {schemes[1]}://..., got {shown!r}")
    return parts


def check_file(path: str | Path | None, field: str) -> None:
    """ConfigError if there is a path and nothing to read there."""
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigError(f"{field} must name a file that can be read, got {str(path)!r}")


def _is_header(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and text.isascii()


def _host_header(parts: SplitResult) -> str:
    """The host as servers are told it. UnicodeError if it is none that can be looked up."""
    name = (parts.hostname or "").encode("idna").decode("ascii")
    if ":" in name:
        name = f"[{name.partition('%')[0]}]"  # an IPv6 address; the interface after the % is ours
    return name if parts.port in (None, _PORTS[parts.scheme]) else f"{name}:{parts.port}"


def _token(path: str | Path) -> str:
    """What the file holds; an error that does not show it, if that cannot be sent. It may be mended while we wait."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TransientExportError(f"token_file {path} cannot be read: {reason}", ErrorClass.AUTH) from None
    if not token or not _is_header(token):
        raise TransientExportError(f"token_file {path} must hold one line of plain text", ErrorClass.AUTH)
    return token


class _Line:
    """One kept-alive connection, and the headers of ours that were made with it."""

    __slots__ = ("__weakref__", "connection", "own_headers", "said", "start")

    def __init__(self, connection: http1.Connection, own_headers: Mapping[str, str]) -> None:
        self.connection = connection
        self.own_headers = own_headers
        # The headers that a request was last sent with, and what it began with: the next one is nearly always the same.
        self.said: Mapping[str, str] | None = None
        self.start = b""


class HttpClient:
    """Posts to one URL.

    Errors: an answer that is no success is raised as what `classify` says it means; so is everything the socket says.
    Threads: `post` and `begin` may be called from any thread; each has its own connections, as many as it has requests
        under way at a time. `close` ends all of them, also those with a request under way.
    """

    def __init__(self, config: HttpConfig, path: str = "", *, may_pass: Container[int] = range(500, 600)) -> None:
        parts = urlsplit(config.url)
        self._config = config
        self._may_pass = may_pass
        self._host, self._port = parts.hostname or "", _PORTS[parts.scheme] if parts.port is None else parts.port
        self._host_header = _host_header(parts)
        self._path = (parts.path.rstrip("/") + path or "/") + (f"?{parts.query}" if parts.query else "")
        self.address = config.address().rstrip("/") + path
        self._timeout = float(config.timeout)
        self._to_read = min(_TO_READ, self._timeout)
        self._context = (config.tls or TlsConfig()).context() if parts.scheme == "https" else None
        self._local = threading.local()
        # _lock guards everything below.
        self._lock = threading.Lock()
        # Weak: the connections of a worker that has ended go with it.
        self._lines: WeakSet[_Line] = WeakSet()
        self._closed = False

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """The answer, if it is a success; else an ExportError."""
        return self.begin(body, headers)()

    def begin(self, body: bytes, headers: Mapping[str, str]) -> Callable[[], Answer]:
        """Send the request, and return what waits for its answer; to be called once, as `post` would have been.

        Who comes for it after the timeout, having waited for something else, still gets what is there by then.
        """
        deadline = time.monotonic() + self._timeout
        kept = self._kept()
        line = kept or self._connect(deadline)
        broken = self._ask(line, body, headers, deadline)
        asked_at = time.monotonic()

        def answer() -> Answer:
            came_at = time.monotonic()
            try:
                return self._take(line, broken, max(deadline, came_at + self._to_read))
            except ConnectionError:
                # A server may end an idle connection at any time: that is no failure of the destination, a second
                # one on a fresh connection is.
                if kept is None:
                    raise
            until = deadline + came_at - asked_at  # what was waited for in between was not this request
            fresh = self._connect(until)
            return self._take(fresh, self._ask(fresh, body, headers, until), until)

        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lines = list(self._lines)
        for line in lines:
            line.connection.cut()

    def _idle(self) -> list[_Line]:
        """Connections of this thread that have no request under way."""
        try:
            idle: list[_Line] = self._local.idle
        except AttributeError:
            idle = self._local.idle = []
        return idle

    def _kept(self) -> _Line | None:
        """One of them that the server has not ended meanwhile, as far as we know."""
        idle = self._idle()
        while idle:
            line = idle.pop()
            if line.connection.is_quiet():
                return line
            self._forget(line)
        return None

    def _connect(self, deadline: float) -> _Line:
        self._check_open()
        headers = self._own_headers()
        line = _Line(http1.connect(self._host, self._port, self._context, deadline), headers)
        with self._lock:
            self._lines.add(line)
        try:
            self._check_open()  # again: it may have been closed while we connected
        except ConnectionAbortedError:
            self._forget(line)
            raise
        return line

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the exporter is closed")

    def _own_headers(self) -> dict[str, str]:
        headers = {"User-Agent": _AGENT, **(self._config.headers or {})}
        if self._config.token_file:
            headers["Authorization"] = f"Bearer {_token(self._config.token_file)}"
        return headers

    def _ask(self, line: _Line, body: bytes, headers: Mapping[str, str], deadline: float) -> ConnectionError | None:
        """Send the request. An error that the server has ended the connection meanwhile: it may have said why."""
        if headers != line.said:
            line.said = dict(headers)
            line.start = http1.start_of_post(self._path, self._host_header, line.own_headers, headers)
        try:
            line.connection.send(line.start, body, deadline)
        except ConnectionError as error:
            return error
        except BaseException:
            self._forget(line)
            raise
        return None

    def _take(self, line: _Line, broken: ConnectionError | None, deadline: float) -> Answer:
        """The answer to what was asked."""
        keep = False
        try:
            answer = _receive(line.connection, broken, deadline)
            keep = answer.can_go_on and broken is None
            if 200 <= answer.status < 300:
                return answer
            after = classify.retry_after(answer.headers.get("retry-after"), time.time())
            message = message_of(answer, line.own_headers)
            error = classify.of_status(answer.status, message, after, may_pass=self._may_pass)
            if error.error_class is ErrorClass.AUTH:
                keep = False  # the next one is made with what the token file holds by then
            raise error
        finally:
            if keep:
                self._idle().append(line)
            else:
                self._forget(line)

    def _forget(self, line: _Line) -> None:
        line.connection.close()
        with self._lock:
            self._lines.discard(line)


def _receive(connection: http1.Connection, broken: ConnectionError | None, deadline: float) -> Answer:
    """What the server says; of one that would not have the whole request, why, if it said so before it hung up."""
    if broken is None:
        return connection.receive(MOST_ANSWER, deadline)
    try:
        answer = connection.receive(MOST_ANSWER, deadline)
    except (HTTPException, OSError):
        raise broken from None
    if answer.status < 300:
        raise broken  # it cannot have taken what it has not read
    return answer


def message_of(answer: Answer, said: Mapping[str, str]) -> str:
    """What an error answer says, for people: plain text, or the message of a `google.rpc.Status`.

    Without what the headers of ours in `said` hold, where a server says that again: it may be secret.
    """
    body = answer.body
    if "protobuf" in answer.headers.get("content-type", ""):
        try:
            body = get_bytes(body, 2) or b""
        except ValueError:
            body = b""
    text = " ".join(body.decode("utf-8", "replace").split())
    for name, value in said.items():
        for secret in (value, value.rpartition(" ")[2]):  # of "Bearer x" also the x alone
            if name != "User-Agent" and len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "***")
    return text[:_MESSAGE]
