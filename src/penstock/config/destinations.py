"""Where requests are relayed to: `exporter` and `exporters.NAME` in the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.broker_url import check_broker_url
from penstock.errors import ConfigError
from penstock.export.config import SendQueueConfig
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig
from penstock.export.exporters.remote_write_exporter import RemoteWriteConfig
from penstock.export.http_client import TlsConfig
from penstock.spool import Durability, FullBehavior
from penstock.units import parse_duration

ExporterType = Literal["none", "otlp_http", "remote_write", "amqp", "console"]
# What each destination understands, of what receivers hand over as it came.
FORMATS: dict[str, tuple[str, ...]] = {
    "none": (),
    "otlp_http": ("otlp",),
    "remote_write": ("remote_write",),
    "amqp": ("otlp", "remote_write"),
    "console": ("otlp", "remote_write"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayQueueConfig(SendQueueConfig):
    """The queue before a destination. What was answered for survives `kill -9`; when it is full, senders are told."""

    full_behavior: FullBehavior = FullBehavior.DROP_NEWEST
    durability: Durability = Durability.DISK


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterConfig:
    """A destination that requests are relayed to as they came, and the queue before it."""

    type: ExporterType = "none"
    """What it speaks. `otlp_http` is sent OTLP requests, `remote_write` Prometheus requests, the others both."""
    url: str = ""
    """Where it is: `http://host:4318` (`/v1/metrics` is added), `http://host:9090/api/v1/write`, `amqp://host/vhost`."""
    timeout: float | str = 10.0
    """For one request, from connecting to the last byte of its answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request. For a secret use `token_file`."""
    token_file: str | Path | None = None
    """A file with a bearer token (amqp: the password), read at every connect, so that a new one is found."""
    tls: TlsConfig | None = None
    compression: Literal["none", "gzip", "zstd"] = "gzip"
    """otlp_http: how requests are compressed."""
    in_order: bool = True
    """remote_write: send the samples of a series in order, with one worker. False for backends that do not mind."""
    exchange: str = ""
    """amqp: the exchange; empty: the default one, where `routing_key` names a queue."""
    routing_key: str = ""
    """amqp: the routing key."""
    queue: RelayQueueConfig = field(default_factory=RelayQueueConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", parse_duration(self.timeout, "timeout"))
        if self.type in ("none", "console"):
            return
        if not self.url:
            raise ConfigError(f"must say where the {self.type} destination is, got ''", field="url")
        if self.type == "otlp_http":
            self.otlp()
        elif self.type == "remote_write":
            self.remote_write()
        elif check_broker_url(self.url).scheme != "amqps" and self.tls is not None:
            raise ConfigError("must begin with amqps:// where tls is set, got amqp://", field="url")
        elif not self.exchange and not self.routing_key:
            raise ConfigError("must name a queue where no exchange is set, got ''", field="routing_key")

    @property
    def formats(self) -> tuple[str, ...]:
        return FORMATS[self.type]

    def otlp(self) -> OtlpHttpConfig:
        return OtlpHttpConfig(compression=self.compression, **self._http())  # type: ignore[arg-type]

    def remote_write(self) -> RemoteWriteConfig:
        return RemoteWriteConfig(in_order=self.in_order, **self._http())  # type: ignore[arg-type]

    def _http(self) -> dict[str, object]:
        return {
            "url": self.url,
            "timeout": self.timeout,
            "headers": self.headers,
            "token_file": self.token_file,
            "tls": self.tls,
        }
