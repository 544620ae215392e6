"""What users set about consuming from RabbitMQ. Apart from the receiver, which needs the broker client to be there."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.broker_url import check_broker_url
from penstock.errors import ConfigError
from penstock.units import parse_duration


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
            raise ConfigError("tls.key_file is set, but tls.cert_file is not")

    def problems(self) -> list[str]:
        """Files that are not there: not an error until they are needed, a configuration may be written elsewhere."""
        return [
            f"tls.{name} must be a file that we can read, got {str(path)!r}"
            for name in ("ca_file", "cert_file", "key_file")
            if (path := getattr(self, name)) is not None and not os.access(path, os.R_OK)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitReceiverConfig:
    """`receivers.amqp`: messages of one RabbitMQ queue, each the body of a request."""

    url: str = "amqp://127.0.0.1:5672/"
    """The broker. For the password use `password_file`."""
    queue: str = "penstock"
    """The queue to consume."""
    declare: bool = False
    """Declare the queue (durable, classic) if it is not there; false: it must be there, as it is."""
    format: Literal["auto", "otlp", "otlp_json", "remote_write", "events"] = "auto"
    """What bodies are. `auto`: by content type, protobuf is OTLP and JSON is events."""
    dead_letter_exchange: str = ""
    """An exchange that is there, for messages that can never be taken; empty: the queue's own, if it has one."""
    password_file: str | Path | None = None
    """Read at every connect, so that a new one is found."""
    tls: BrokerTlsConfig | None = None
    workers: int = 2
    """Batches under way at a time."""
    batch_size: int = 100
    """Messages that are taken together: one sync of the disk for all of them."""
    batch_timeout: float | str = 0.05
    """How long a batch may wait to be full."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_timeout", parse_duration(self.batch_timeout, "batch_timeout"))
        check_broker_url(self.url)
        if not self.queue:
            raise ConfigError("queue must name the queue to consume, got ''")
        for name in ("workers", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.batch_timeout:
            raise ConfigError("batch_timeout must be > 0, got 0")
