"""What users set about receivers: the section `receivers`, one class for each of them.

Sizes are bytes or strings like `16Mi`, durations seconds or strings like `30s`. Nothing here needs what a receiver
needs: the configuration can be read where its extra is not installed.
"""

import hashlib
import hmac
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from penstock.broker_url import check_broker_url
from penstock.errors import ConfigError
from penstock.units import check_count, format_address, parse_address, parse_bytes, parse_duration

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SHORTEST_TOKEN = 16  # characters: shorter ones can be guessed over the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`limits` of a receiver: what one client can make us do, whatever it sends."""

    max_body: int | str = "16Mi"
    """Bytes of a request as it comes over the network; more is refused (413)."""
    max_decompressed: int | str = "64Mi"
    """Bytes of a request once decompressed; decompressing stops there (413)."""
    max_connections: int = 1000
    """Connections at a time; further ones are closed at once."""
    idle_timeout: float | str = 75.0
    """Seconds that a connection may stay open with no request."""

    def __post_init__(self) -> None:
        for name in ("max_body", "max_decompressed"):
            _set(self, name, parse_bytes(getattr(self, name), f"limits.{name}", least=1024))
        _set(self, "idle_timeout", parse_duration(self.idle_timeout, "limits.idle_timeout", is_positive=True))
        check_count(self.max_connections, "limits.max_connections", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits(Limits):
    """`limits` of the HTTP receiver: what one client can make us do, whatever it sends."""

    max_json: int | str = "16Mi"
    """As `max_decompressed`, for JSON, which takes ten times as long to read while other requests wait."""
    read_timeout: float | str = 30.0
    """Seconds for a request to arrive, from its first byte to its last; a slower client is cut off."""

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        _set(self, "max_json", parse_bytes(self.max_json, "limits.max_json", least=1024))
        _set(self, "read_timeout", parse_duration(self.read_timeout, "limits.read_timeout", is_positive=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits(Limits):
    """`limits` of the gRPC receiver: what one client can make us do, whatever it sends."""

    max_connections: int = 1000
    """Calls at a time; further ones are refused at once."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "max_json": "gRPC carries no JSON; leave it out (receivers.http.limits has the key)",
        "read_timeout": "a call ends with its client's deadline; leave it out (receivers.http.limits has the key)",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTlsConfig:
    """`tls` of a receiver."""

    cert_file: str | Path
    """Our certificate with its chain, PEM."""
    key_file: str | Path
    """Its private key, PEM."""
    client_ca_file: str | Path | None = None
    """Authorities of client certificates; with it, a client without one is refused (mTLS)."""

    def context(self) -> ssl.SSLContext:
        """Returns the context of an HTTP server; ConfigError if a file cannot be read, or if they do not match."""
        for problem in self.problems():
            raise problem
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca_file)
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except ssl.SSLError as error:
            pair = f"{self.cert_file} and tls.key_file {self.key_file}"
            raise ConfigError(f"{pair}: {error}", field="tls.cert_file") from error
        return context

    def problems(self) -> Iterator[ConfigError]:
        """Yields files that cannot be read. They may be on another machine than the one where this is loaded."""
        return _unreadable(self, "cert_file", "key_file", "client_ca_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """`auth` of a receiver: bearer tokens, of which any one opens it. Read at start and at every reload."""

    token_file: str | Path | None = None
    """A file with one token a line."""
    token_env: str | None = None
    """The name of an environment variable that holds a token."""

    def __post_init__(self) -> None:
        if self.token_file is None and self.token_env is None:
            raise ConfigError("must have token_file or token_env", field="auth")

    def tokens(self) -> tuple[bytes, ...]:
        """Returns the tokens as they are now; ConfigError if there is none or one is too short."""
        found: list[bytes] = []
        if self.token_file is not None:
            try:
                found += Path(self.token_file).read_bytes().split()
            except OSError as error:
                raise ConfigError(f"{self.token_file}: {error.strerror}", field="auth.token_file") from error
        if self.token_env is not None:
            found += os.environ.get(self.token_env, "").encode().split()
        if not found:
            raise ConfigError(f"has no token in {self.token_file or '$' + str(self.token_env)}", field="auth")
        if any(len(token) < _SHORTEST_TOKEN for token in found):
            raise ConfigError(f"must have tokens of at least {_SHORTEST_TOKEN} characters", field="auth")
        return tuple(found)


def is_authorized(headers: Sequence[str], tokens: Sequence[bytes]) -> bool:
    """Says whether there is one `Authorization` header and it holds one of the tokens."""
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    given = token.strip().encode("utf-8", "replace")
    # Every token is compared, in constant time: how long it takes does not tell which one came close.
    matches = [hmac.compare_digest(given, known) for known in tokens]
    return scheme.lower() == "bearer" and any(matches)


def sender_token_name(header: str) -> str:
    """What a sender is called by the token of its `Authorization` header: a digest, since logs hold no secret."""
    return f"token {hashlib.sha256(header.partition(' ')[2].strip().encode()).hexdigest()[:8]}"


def problems_of_listener(tls: ServerTlsConfig | None, auth: AuthConfig | None) -> Iterator[ConfigError]:
    """Yields what would keep a listener from starting here, as files that cannot be read."""
    if tls is not None:
        yield from tls.problems()
    if auth is not None:
        try:
            auth.tokens()
        except ConfigError as error:
            yield error


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """A receiver that listens on a port."""

    enabled: bool = True
    """False: this receiver is not started."""
    listen: str = "127.0.0.1:0"
    """Address and port; port 0 takes a free one. Beyond loopback it needs `tls` and `auth`, or `insecure: true`."""
    reuse_port: bool = False
    """Share the port with other processes of ours (`--processes`)."""
    insecure: bool = False
    """Listen beyond loopback without TLS or without tokens: for a network that is trusted."""
    tls: ServerTlsConfig | None = None
    """Certificates; without them the connection is not encrypted."""
    auth: AuthConfig | None = None
    """Bearer tokens; without them every client that reaches the port may send."""
    host: str | None = field(default=None, metadata={"replaced_by": "listen"})
    """HOST:PORT in one."""
    port: int | None = field(default=None, metadata={"replaced_by": "listen"})
    """HOST:PORT in one."""

    def __post_init__(self) -> None:
        self._take_old_spelling()
        is_guarded = self.tls is not None and (self.auth is not None or self.tls.client_ca_file is not None)
        if self.address[0] not in LOOPBACK and not is_guarded and not self.insecure:
            raise ConfigError(
                f"{self.listen!r} is open to the network: set tls, and auth or tls.client_ca_file; or say "
                "insecure: true",
                field="listen",
            )

    def _take_old_spelling(self) -> None:
        """Let `host` and `port`, where they are set, stand in `listen`."""
        if self.port is not None and (isinstance(self.port, bool) or not 0 <= self.port <= 65535):
            raise ConfigError(f"must be within 0 and 65535, got {self.port!r}", field="port")
        host, port = self.address
        if self.host is not None or self.port is not None:
            host, port = host if self.host is None else self.host, port if self.port is None else self.port
            _set(self, "listen", format_address(host, port))
            _set(self, "host", None)
            _set(self, "port", None)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; no host: every address of the machine."""
        return parse_address(self.listen, "listen", may_be_all=True)

    def problems(self) -> Iterator[ConfigError]:
        """What would keep it from starting here, as files that cannot be read."""
        return problems_of_listener(self.tls, self.auth)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReceiverConfig(ListenerConfig):
    """OTLP (`/v1/metrics`), Prometheus remote write (`/api/v1/write`) and JSON events (`/v1/events`) over HTTP."""

    listen: str = "127.0.0.1:4318"
    """Address and port; port 0 takes a free one. Beyond loopback it needs `tls` and `auth`, or `insecure: true`."""
    otlp_path: str = "/v1/metrics"
    """Where OTLP metrics are taken, protobuf and JSON."""
    remote_write_path: str = "/api/v1/write"
    """Where Prometheus remote writes are taken."""
    events_path: str = "/v1/events"
    """Where JSON events are taken."""
    allowed_origins: tuple[str, ...] = ()
    """Sites whose web pages may send, as `https://shop.example`; `*`: all. Requests from other pages are refused."""
    limits: HttpLimits = field(default_factory=HttpLimits)
    """What one client can make us do."""

    def __post_init__(self) -> None:
        ListenerConfig.__post_init__(self)
        _set(self, "allowed_origins", tuple(self.allowed_origins))
        paths = [self.otlp_path, self.remote_write_path, self.events_path]
        for name, path in zip(("otlp_path", "remote_write_path", "events_path"), paths):
            if not path.startswith("/") or paths.count(path) > 1:
                raise ConfigError(f"must start with / and be unlike the other paths, got {path!r}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcReceiverConfig(ListenerConfig):
    """OTLP over gRPC."""

    listen: str = "127.0.0.1:4317"
    """Address and port; port 0 takes a free one. Beyond loopback it needs `tls` and `auth`, or `insecure: true`."""
    limits: GrpcLimits = field(default_factory=GrpcLimits)
    """What one client can make us do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTlsConfig:
    """Certificates for `amqps://`, read at every connect. Without files the system's authorities are trusted."""

    ca_file: str | Path | None = None
    """Authorities to trust instead of the system's."""
    cert_file: str | Path | None = None
    """Our own certificate, where the broker asks for one."""
    key_file: str | Path | None = None
    """Its key; left out: it is in `cert_file`."""

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError("is set, but tls.cert_file is not", field="tls.key_file")

    def problems(self) -> Iterator[ConfigError]:
        """Yields files that cannot be read. They may be on another machine than the one where this is loaded."""
        return _unreadable(self, "ca_file", "cert_file", "key_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitReceiverConfig:
    """Messages of RabbitMQ queues: OTLP, JSON events or remote writes, acknowledged when they are safe."""

    enabled: bool = False
    """True: consume."""
    url: str = "amqp://127.0.0.1:5672/"
    """The broker. For the password use `password_file`."""
    queue: tuple[str, ...] = ("penstock",)
    """The queues to consume, one or several. Each has workers and a prefetch of its own."""
    declare: bool = False
    """Declare the queues (durable, classic) that are not there; false: they must be there, as they are."""
    format: Literal["auto", "otlp", "otlp_json", "remote_write", "events"] = "auto"
    """What bodies are. `auto`: by content type, protobuf is OTLP and JSON is events."""
    dead_letter_exchange: str = ""
    """An exchange that is there, for messages that can never be taken; empty: the queue's own, if it has one."""
    password_file: str | Path | None = None
    """Read at every connect, so that a new one is found."""
    tls: BrokerTlsConfig | None = None
    workers: int = 0
    """Batches of a queue under way at a time; 0: four for each core."""
    prefetch_count: int = 0
    """Messages of a queue that the broker may send ahead, at most 1000; 0: a batch for every worker."""
    exclusive: bool = False
    """Be the only consumer of each queue."""
    batch_size: int = 100
    """Messages that are taken together: one sync of the disk for all of them."""
    batch_timeout: float | str = 0.05
    """How long a batch may wait to be full."""

    # What the consumer pool takes, and a receiver does not.
    REFUSED: ClassVar[Mapping[str, str]] = {
        "auto_ack": "messages are acknowledged when they are safe, else a crash would lose them",
        "execution": "messages are decoded by the intake, together with all other requests",
        "event_type": "every message of the queue is taken: format says what bodies are",
        "event_type_header": "every message of the queue is taken: format says what bodies are",
        "max_attempts": "a message is taken, tried again for as long as there is no room, or a dead letter at once",
        "retry": "a message is taken, tried again for as long as there is no room, or a dead letter at once",
    }

    def __post_init__(self) -> None:
        _set(self, "batch_timeout", parse_duration(self.batch_timeout, "batch_timeout", is_positive=True))
        check_broker_url(self.url)
        given: object = self.queue
        _set(self, "queue", (given,) if isinstance(given, str) else self.queue)
        if not all(self.queue) or not self.queue or len(set(self.queue)) < len(self.queue):
            shown = ", ".join(map(repr, self.queue)) or "none"
            raise ConfigError(f"must name the queues to consume, each once, got {shown}", field="queue")
        for name, least in (("workers", 0), ("batch_size", 1), ("prefetch_count", 0)):
            check_count(getattr(self, name), name, least)
        if self.prefetch_count > 1000:
            raise ConfigError(f"must be <= 1000, got {self.prefetch_count}", field="prefetch_count")
        if self.enabled and self.tls is not None and not self.url.startswith("amqps://"):
            raise ConfigError("must begin with amqps:// where tls is set, got amqp://", field="url")

    def problems(self) -> Iterator[ConfigError]:
        """Yields what would keep it from starting here, as files that cannot be read."""
        if self.tls is not None:
            yield from self.tls.problems()


ReceiverConfig = ListenerConfig | RabbitReceiverConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiversConfig:
    """What comes in, and where."""

    http: HttpReceiverConfig = field(default_factory=HttpReceiverConfig)
    grpc: GrpcReceiverConfig = field(default_factory=GrpcReceiverConfig)
    amqp: RabbitReceiverConfig = field(default_factory=RabbitReceiverConfig)

    def enabled(self) -> dict[str, ReceiverConfig]:
        """Returns those that are to be started, by name."""
        every: dict[str, ReceiverConfig] = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: config for name, config in every.items() if config.enabled}


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)


def _unreadable(config: object, *names: str) -> Iterator[ConfigError]:
    for name in names:
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            yield ConfigError(f"must be a file that we can read, got {str(path)!r}", field=f"tls.{name}")
