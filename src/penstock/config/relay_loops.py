"""A destination that is our own receiver: what is sent there comes in again, and one request becomes thousands."""

from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from penstock.config.destinations import ExporterConfig
from penstock.receive.config import HttpReceiverConfig
from penstock.receive.rabbitmq_config import RabbitReceiverConfig

_PORTS = {"http": 80, "https": 443, "amqp": 5672, "amqps": 5671}
_LOOPBACK = ("127.0.0.1", "::1")
_ALL = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, never listened on
_FOREVER = "what is sent there would come in again, for ever"


def into_http(exporter: ExporterConfig, receiver: HttpReceiverConfig) -> str | None:
    """What is wrong with `url`, if it is where `receivers.http` listens. A name of this machine is not looked up."""
    if exporter.type not in ("otlp_http", "remote_write") or not receiver.port:
        return None
    host, port = _address(exporter.url)
    if port != receiver.port or not _reaches(host, receiver.host):
        return None
    return (
        f"url must not be where receivers.http listens (receivers.http.host {receiver.host or 'all'}, "
        f"receivers.http.port {receiver.port}), got {host}:{port}: {_FOREVER}"
    )


def into_queue(exporter: ExporterConfig, receiver: RabbitReceiverConfig) -> str | None:
    """What is wrong with `routing_key`, if it is the queue of `receivers.amqp`. Where exchanges lead, nobody knows."""
    if exporter.type != "amqp" or exporter.exchange or exporter.routing_key != receiver.queue:
        return None
    (host, port), (other, other_port) = _address(exporter.url), _address(receiver.url)
    if port != other_port or not _reaches(host, other) or _vhost(exporter.url) != _vhost(receiver.url):
        return None
    return (
        f"routing_key must not be the queue that receivers.amqp.queue consumes on the same broker, "
        f"got {exporter.routing_key!r}: {_FOREVER}"
    )


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", _PORTS[parts.scheme] if parts.port is None else parts.port


def _vhost(url: str) -> str:
    return unquote(urlsplit(url).path.removeprefix("/")) or "/"  # the default one is called so


def _reaches(host: str, listening: str) -> bool:
    """Whether who connects to `host` may get to who listens on `listening`, both on one machine."""
    return bool(_places(host) & _places(listening)) or (listening in _ALL and host.startswith("127."))


def _places(host: str) -> set[str]:
    """The addresses that a host stands for, as far as they can be told without asking."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name in _ALL:
        return {*_LOOPBACK}  # where a connection to all addresses goes, too
    try:
        return {str(ip_address(name))}
    except ValueError:
        return {name}
