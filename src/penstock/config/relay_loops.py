"""Refuses a destination that is one of our own receivers: each request would come in again, for ever."""

from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from penstock.config.destinations import ExporterSection
from penstock.errors import ConfigError
from penstock.receive.config import HttpReceiverConfig, RabbitReceiverConfig, ReceiversConfig

_PORTS = {"http": 80, "https": 443, "amqp": 5672, "amqps": 5671}
_LOOPBACK = ("127.0.0.1", "::1")
_ALL = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, never listened on
_FOREVER = "what is sent there would come in again, for ever"


def refuse_configured_loop(exporter: ExporterSection, receivers: ReceiversConfig) -> None:
    """ConfigError if what is sent to that destination would come in again."""
    scheme = urlsplit(exporter.url).scheme
    if exporter.kind is None or "url" not in exporter.kind.options:
        return
    if receivers.http.enabled and scheme in ("http", "https"):
        _refuse_own_port(exporter, receivers.http)
    if receivers.amqp.enabled and scheme in ("amqp", "amqps"):
        _refuse_own_queue(exporter, receivers.amqp)


def _refuse_own_port(exporter: ExporterSection, receiver: HttpReceiverConfig) -> None:
    """Refuse a `url` where `receivers.http` listens. A name of this machine is not looked up."""
    host, port = _address(exporter.url)
    listening, own_port = receiver.address
    if not own_port or port != own_port or not _reaches(host, listening):
        return
    raise ConfigError(
        f"must not be where receivers.http listens (receivers.http.listen {receiver.listen}), "
        f"got {host}:{port}: {_FOREVER}",
        field="url",
    )


def _refuse_own_queue(exporter: ExporterSection, receiver: RabbitReceiverConfig) -> None:
    """Refuse a `routing_key` that is the queue of `receivers.amqp`. Where an exchange leads is not known here."""
    if exporter.exchange or exporter.routing_key not in receiver.queue:
        return
    (host, port), (other, other_port) = _address(exporter.url), _address(receiver.url)
    if port != other_port or not _reaches(host, other) or _vhost(exporter.url) != _vhost(receiver.url):
        return
    raise ConfigError(
        "must not be the queue that receivers.amqp.queue consumes on the same broker, "
        f"got {exporter.routing_key!r}: {_FOREVER}",
        field="routing_key",
    )


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", _PORTS[parts.scheme] if parts.port is None else parts.port


def _vhost(url: str) -> str:
    return unquote(urlsplit(url).path.removeprefix("/")) or "/"  # the default one is called so


def _reaches(host: str, listening: str) -> bool:
    """Whether a connection to `host` may reach a server on `listening`, both on one machine."""
    return bool(_addresses_of(host) & _addresses_of(listening)) or (listening in _ALL and host.startswith("127."))


def _addresses_of(host: str) -> set[str]:
    """The addresses that a host stands for, without a lookup."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name in _ALL:
        return {*_LOOPBACK}  # where a connection to all addresses goes, too
    try:
        return {str(ip_address(name))}
    except ValueError:
        return {name}
