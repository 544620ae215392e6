"""How to reach the broker: URL, TLS and credentials, read anew at each connect so that rotated secrets are found."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pika

from penstock.errors import ConfigError

HEARTBEAT = 30  # seconds; a dead peer is noticed after two


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for `amqps://`. Without files the system's authorities are trusted."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None  # if the certificate names another host than the URL

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker's address. Its text form holds no secret."""

    url: str
    username_file: str | None = None
    password_file: str | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
            raise ConfigError(f"url must look like amqp://host:port/vhost or amqps://..., got {self}")
        if self.tls is not None and parts.scheme != "amqps":
            raise ConfigError(f"tls is set, but the url says {parts.scheme}://")

    def __str__(self) -> str:
        try:
            parts = urlsplit(self.url)
            port = f":{parts.port}" if parts.port else ""
            return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"
        except ValueError:
            return "a url that cannot be read"

    def __repr__(self) -> str:
        return f"Broker({self})"

    def parameters(self) -> pika.ConnectionParameters:
        """What pika needs. Raises OSError where a file cannot be read, ConfigError where the URL makes no sense."""
        parts = urlsplit(self.url)
        try:
            parameters = pika.URLParameters(self.url)
        except Exception as error:  # noqa: BLE001 - pika raises many kinds, and some quote the URL
            raise ConfigError(f"url {self} cannot be used: {type(error).__name__}") from None
        username = _secret(self.username_file) or unquote(parts.username or "guest")
        password = _secret(self.password_file) or unquote(parts.password or "guest")
        parameters.credentials = pika.PlainCredentials(username, password)
        if "heartbeat" not in parse_qs(parts.query):
            parameters.heartbeat = HEARTBEAT
        if parts.scheme == "amqps" and (self.tls is not None or "ssl_options" not in parse_qs(parts.query)):
            tls = self.tls or Tls()
            parameters.ssl_options = pika.SSLOptions(tls.context(), tls.server_name or parts.hostname)
        return parameters


def _secret(path: str | None) -> str | None:
    return Path(path).read_text().strip() if path else None
