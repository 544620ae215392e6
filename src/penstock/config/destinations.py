"""Where requests are relayed to: `exporter` and `exporters.NAME` of the configuration, and the kinds of destination.

A new exporter gets an entry in `DESTINATIONS`, and a field of `ExporterSection` for each key that only it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from penstock.broker_url import check_broker_url
from penstock.errors import ConfigError
from penstock.export.config import SendQueueConfig
from penstock.export.exporter import Exporter
from penstock.export.exporters.console_exporter import ConsoleExporter
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter, Signal
from penstock.export.exporters.remote_write_exporter import RemoteWriteConfig, RemoteWriteExporter
from penstock.export.http_client import TlsConfig
from penstock.spool import Durability, DurabilitySetting, FullBehavior, FullBehaviorSetting
from penstock.units import parse_duration

ExporterType = Literal["none", "otlp_http", "remote_write", "amqp", "console"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayQueueSection(SendQueueConfig):
    """The queue before a destination. Answered requests survive `kill -9`; a full queue refuses new ones."""

    full_behavior: FullBehaviorSetting = FullBehavior.DROP_NEWEST
    durability: DurabilitySetting = Durability.DISK


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSection:
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
    queue: RelayQueueSection = field(default_factory=RelayQueueSection)

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", parse_duration(self.timeout, "timeout"))
        if self.kind is None:
            return
        if "url" in self.kind.options and not self.url:
            raise ConfigError(f"must say where the {self.type} destination is, got ''", field="url")
        self.kind.check(self)

    @property
    def kind(self) -> "DestinationKind | None":
        """None if there is no destination."""
        return DESTINATIONS.get(self.type)

    @property
    def formats(self) -> tuple[str, ...]:
        return self.kind.formats if self.kind else ()

    def keys_without_effect(self) -> list[str]:
        """Keys that are set, and that this kind of destination does not read."""
        default, read = ExporterSection(), {"type", "queue", *(self.kind.options if self.kind else ())}
        names = [one.name for one in fields(self) if one.name not in read]
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    @property
    def keeps_order(self) -> bool:
        """Whether the destination refuses what comes after something younger."""
        return self.in_order and self.kind is not None and "in_order" in self.kind.options


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationKind:
    """What `exporter.type` stands for."""

    formats: tuple[str, ...]
    """What it understands, of what receivers hand over as it came."""
    options: frozenset[str]
    """The keys of `exporter` that it reads, besides `type` and `queue`. `signal` is an option of `penstock relay`."""
    make: Callable[[ExporterSection, Signal], Exporter]
    """Its exporter, of what was checked."""
    check: Callable[[ExporterSection], object]
    """ConfigError if a key that it reads makes no sense."""
    extra: tuple[str, ...] = ()
    """The extra that it needs, and the modules that the extra brings."""


def _otlp_http(config: ExporterSection) -> OtlpHttpConfig:
    return OtlpHttpConfig(compression=config.compression, **_http(config))  # type: ignore[arg-type]


def _remote_write(config: ExporterSection) -> RemoteWriteConfig:
    return RemoteWriteConfig(in_order=config.in_order, **_http(config))  # type: ignore[arg-type]


def _http(config: ExporterSection) -> dict[str, object]:
    return {
        "url": config.url,
        "timeout": config.timeout,
        "headers": config.headers,
        "token_file": config.token_file,
        "tls": config.tls,
    }


def _check_amqp(config: ExporterSection) -> None:
    if check_broker_url(config.url).scheme != "amqps" and config.tls is not None:
        raise ConfigError("must begin with amqps:// where tls is set, got amqp://", field="url")
    if not config.exchange and not config.routing_key:
        raise ConfigError("must name a queue where no exchange is set, got ''", field="routing_key")


def _make_amqp(config: ExporterSection, _: Signal) -> Exporter:
    from penstock.export.exporters.amqp_exporter import AmqpConfig, AmqpExporter  # needs an extra

    return AmqpExporter(
        AmqpConfig(
            url=config.url,
            exchange=config.exchange,
            routing_key=config.routing_key,
            password_file=config.token_file,
            tls=config.tls,
        )
    )


_HTTP_OPTIONS = frozenset({"url", "timeout", "headers", "token_file", "tls"})
DESTINATIONS: Mapping[str, DestinationKind] = {
    "otlp_http": DestinationKind(
        formats=("otlp",),
        options=_HTTP_OPTIONS | {"compression", "signal"},
        check=_otlp_http,
        make=lambda config, signal: OtlpHttpExporter(replace(_otlp_http(config), signal=signal)),
    ),
    "remote_write": DestinationKind(
        formats=("remote_write",),
        options=_HTTP_OPTIONS | {"in_order"},
        check=_remote_write,
        make=lambda config, _: RemoteWriteExporter(_remote_write(config)),
    ),
    "amqp": DestinationKind(
        formats=("otlp", "remote_write"),
        options=frozenset({"url", "token_file", "tls", "exchange", "routing_key"}),
        check=_check_amqp,
        make=_make_amqp,
        extra=("amqp", "pika"),
    ),
    "console": DestinationKind(
        formats=("otlp", "remote_write"),
        options=frozenset(),
        check=lambda _: None,
        make=lambda *_: ConsoleExporter(),
    ),
}
