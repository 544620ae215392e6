"""What `penstock relay` works with: the settings of its queue and its destination, from a file and from flags."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.export.config import SendQueueConfig
from penstock.export.flags import FLAGS, merged
from penstock.units import parse_duration

if TYPE_CHECKING:
    from penstock.config.destinations import ExporterConfig
    from penstock.config.load import Loaded
    from penstock.config.tree import ServiceConfig

DESTINATIONS = ("otlp-http", "remote-write", "amqp", "console")
_HTTP = ("otlp-http", "remote-write")
# Options that are for some destinations only: given for another they would do nothing.
_FOR = {
    "url": (*_HTTP, "amqp"),
    "token_file": (*_HTTP, "amqp"),
    "ca_file": (*_HTTP, "amqp"),
    "header": _HTTP,
    "send_timeout": _HTTP,
    "signal": ("otlp-http",),
    "compression": ("otlp-http",),
    "exchange": ("amqp",),
    "routing_key": ("amqp",),
}


def queue_config(file: Path | None, given: Mapping[str, str | None], **defaults: Any) -> SendQueueConfig:
    """`exporter.queue` of the file, if there is one, with the flags that were given on top, and defaults beneath."""
    flags = [(flag, text) for flag in FLAGS if (text := given.get(flag.name.replace("-", "_"))) is not None]
    section = _queue_of(_loaded(file)) if file is not None else {}
    return SendQueueConfig.from_mapping(merged({**defaults, **section}, flags))


def _loaded(file: Path) -> "Loaded[ServiceConfig]":
    """All of the file: a mistake is named with its line, as `penstock config check` does."""
    from penstock.config.load import load
    from penstock.config.tree import ServiceConfig

    return load(ServiceConfig, file)


def _queue_of(loaded: "Loaded[ServiceConfig]") -> Mapping[str, Any]:
    """What the file sets of `exporter.queue`, for `SendQueueConfig.from_mapping`."""
    section: dict[str, Any] = {}
    for path, one in loaded.given.items():
        match path:
            case ("exporter", "queue", "enabled" | "type"):
                pass  # there may be a folder from before it was switched off, and that is what relay is for
            case ("exporter", "queue", name):
                section[name] = one.value
            case ("exporter", "queue", inner, name):
                section.setdefault(inner, {})[name] = one.value
            case _:
                pass
    if ("data_dir",) in loaded.given:  # as `penstock run` takes them
        section["path"] = os.path.join(loaded.config.data_dir, section.get("path", SendQueueConfig().path))
    return section


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationFlags:
    """What the flags say of the destination; None, or nothing, where they do not."""

    to: str | None = None
    url: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    header: Sequence[str] = ()
    send_timeout: str | None = None
    signal: str | None = None
    compression: str | None = None
    exchange: str | None = None
    routing_key: str | None = None

    def destination(self, file: Path | None) -> "ExporterConfig":
        """That of the file, unless --to or --url names another one: a token for the one is no business of the other."""
        from penstock.config.destinations import ExporterConfig
        from penstock.export.http_client import TlsConfig

        base = ExporterConfig()
        if file is not None and self.to is None and self.url is None:
            base = _loaded(file).config.exporter
        to = self.to or base.type.replace("_", "-")
        if to == "none":
            where = f"{file} sets no exporter.type" if file is not None else "or a file that does, with -c"
            raise ConfigError(f"--to must say what the destination speaks: {', '.join(DESTINATIONS)}; {where}")
        for name, known in _FOR.items():
            if getattr(self, name) and to not in known:
                raise ConfigError(f"--{name.replace('_', '-')} is for {', '.join(known)}, not for {to}")
        if to != "console" and not (self.url or base.url):
            raise ConfigError(f"--url must say where {to} sends to")
        said: dict[str, Any] = {
            "type": to.replace("-", "_"),
            "url": self.url,
            "headers": {**base.headers, **_headers(self.header)},
            "token_file": self.token_file,
            "tls": replace(base.tls or TlsConfig(), ca_file=self.ca_file) if self.ca_file else None,
            "timeout": _seconds(self.send_timeout),
            "compression": self.compression,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
        }
        return replace(base, **{name: value for name, value in said.items() if value is not None})


def _seconds(send_timeout: str | None) -> float | None:
    if send_timeout is None:
        return None
    if not (seconds := parse_duration(send_timeout, "--send-timeout")):
        raise ConfigError(f"--send-timeout must be > 0, got {send_timeout!r}")
    return seconds


def _headers(lines: Sequence[str]) -> dict[str, str]:
    pairs = [line.partition(":") for line in lines]
    if not all(colon and name.strip() for name, colon, _ in pairs):
        raise ConfigError("--header must look like 'Name: value'")
    return {name.strip(): value.strip() for name, _, value in pairs}
