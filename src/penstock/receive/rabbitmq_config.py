"""What users set about consuming from RabbitMQ. Apart from the receiver, which needs the broker client to be there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError
from penstock.units import parse_duration


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
    workers: int = 2
    """Batches under way at a time."""
    batch_size: int = 100
    """Messages that are taken together: one sync of the disk for all of them."""
    batch_timeout: float | str = 0.05
    """How long a batch may wait to be full."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_timeout", parse_duration(self.batch_timeout, "batch_timeout"))
        if not self.url.startswith(("amqp://", "amqps://")):
            raise ConfigError("url must look like amqp://host:port/vhost or amqps://...")
        if not self.queue:
            raise ConfigError("queue must name the queue to consume, got ''")
        for name in ("workers", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.batch_timeout:
            raise ConfigError("batch_timeout must be > 0, got 0")
