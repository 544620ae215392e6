"""What users set about receivers. Sizes are bytes or strings like `16Mi`, durations seconds or strings like `30s`."""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import ConfigError
from penstock.units import parse_bytes, parse_duration

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SHORTEST_TOKEN = 16  # characters: shorter ones can be guessed over the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`limits` of a receiver: what one client can make us do, whatever it sends."""

    max_body: int | str = "16Mi"
    """Bytes of a request as it comes over the network; more is refused (413)."""
    max_decompressed: int | str = "64Mi"
    """Bytes of a request once decompressed; decompressing stops there (413)."""
    max_json: int | str = "16Mi"
    """The same for JSON, which takes ten times as long to read, and others wait meanwhile."""
    max_connections: int = 1000
    """Connections at a time; further ones are closed at once."""
    read_timeout: float | str = 30.0
    """Seconds for a request to arrive, from its first byte to its last; a slower client is cut off."""
    idle_timeout: float | str = 75.0
    """Seconds that a connection may stay open with no request."""

    def __post_init__(self) -> None:
        for name in ("max_body", "max_decompressed", "max_json"):
            _set_bytes(self, "limits", name)
        for name in ("read_timeout", "idle_timeout"):
            _set_duration(self, "limits", name)
        _check_count("limits.max_connections", self.max_connections)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """`tls` of a receiver."""

    cert_file: str | Path
    """Our certificate with its chain, PEM."""
    key_file: str | Path
    """Its private key, PEM."""
    client_ca_file: str | Path | None = None
    """Authorities of client certificates; with it, a client without one is refused (mTLS)."""

    def context(self) -> ssl.SSLContext:
        """For an HTTP server; ConfigError if a file cannot be read, or if they do not belong together."""
        for problem in self.problems():
            raise ConfigError(problem)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca_file)
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except ssl.SSLError as error:
            raise ConfigError(f"tls.cert_file {self.cert_file} and tls.key_file {self.key_file}: {error}") from error
        return context

    def problems(self) -> list[str]:
        """Files that are not there: not an error until they are needed, a configuration may be written elsewhere."""
        named = [(name, getattr(self, name)) for name in ("cert_file", "key_file", "client_ca_file")]
        return [
            f"tls.{name} must be a file that we can read, got {str(path)!r}"
            for name, path in named
            if path is not None and not os.access(path, os.R_OK)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """`auth` of a receiver: bearer tokens, of which any one opens it. Read at start and at every reload."""

    token_file: str | Path | None = None
    """A file with one token a line."""
    token_env: str | None = None
    """The name of an environment variable that holds a token."""

    def __post_init__(self) -> None:
        if self.token_file is None and self.token_env is None:
            raise ConfigError("auth must have token_file or token_env")

    def tokens(self) -> tuple[bytes, ...]:
        """The tokens as they are now; ConfigError if there is none or one is too short."""
        found: list[bytes] = []
        if self.token_file is not None:
            try:
                found += Path(self.token_file).read_bytes().split()
            except OSError as error:
                raise ConfigError(f"auth.token_file {self.token_file}: {error.strerror}") from error
        if self.token_env is not None:
            found += os.environ.get(self.token_env, "").encode().split()
        if not found:
            raise ConfigError(f"auth: no token in {self.token_file or '$' + str(self.token_env)}")
        if any(len(token) < _SHORTEST_TOKEN for token in found):
            raise ConfigError(f"auth: a token must have at least {_SHORTEST_TOKEN} characters")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listening:
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `tls` and `auth`, or `insecure: true`."""
    port: int = 0
    """Port; 0 takes a free one."""
    reuse_port: bool = False
    """Share the port with other processes of ours (`--processes`)."""
    insecure: bool = False
    """Listen beyond loopback without TLS or without tokens: for a network that is trusted."""
    tls: TlsConfig | None = None
    """Certificates; without them the connection is not encrypted."""
    auth: AuthConfig | None = None
    """Bearer tokens; without them everyone who reaches the port may send."""
    limits: Limits = field(default_factory=Limits)
    """What one client can make us do."""

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be within 0 and 65535, got {self.port!r}")
        is_guarded = self.tls is not None and (self.auth is not None or self.tls.client_ca_file is not None)
        if self.host not in LOOPBACK and not is_guarded and not self.insecure:
            raise ConfigError(
                f"host {self.host!r} is open to the network: set tls, and auth or tls.client_ca_file; "
                "or say insecure: true"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReceiverConfig(_Listening):
    """`receivers.http`: OTLP, remote write and JSON events over HTTP."""

    port: int = 4318
    """Port; 0 takes a free one."""
    otlp_path: str = "/v1/metrics"
    """Where OTLP metrics are taken, protobuf and JSON."""
    remote_write_path: str = "/api/v1/write"
    """Where Prometheus remote writes are taken."""
    events_path: str = "/v1/events"
    """Where JSON events are taken."""

    def __post_init__(self) -> None:
        _Listening.__post_init__(self)
        paths = [self.otlp_path, self.remote_write_path, self.events_path]
        for name, path in zip(("otlp_path", "remote_write_path", "events_path"), paths):
            if not path.startswith("/") or paths.count(path) > 1:
                raise ConfigError(f"{name} must start with / and be unlike the other paths, got {path!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcReceiverConfig(_Listening):
    """`receivers.grpc`: OTLP over gRPC."""

    port: int = 4317
    """Port; 0 takes a free one."""


def _set_bytes(config: object, section: str, name: str) -> None:
    value = parse_bytes(getattr(config, name), f"{section}.{name}")
    if value < 1024:
        raise ConfigError(f"{section}.{name} must be >= 1024 bytes, got {value}")
    object.__setattr__(config, name, value)


def _set_duration(config: object, section: str, name: str) -> None:
    seconds = parse_duration(getattr(config, name), f"{section}.{name}")
    if not seconds:
        raise ConfigError(f"{section}.{name} must be > 0, got {seconds:g}")
    object.__setattr__(config, name, seconds)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be >= 1, got {value!r}")
