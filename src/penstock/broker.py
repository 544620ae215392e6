"""How to reach the broker (URL, TLS and credentials, read anew at each connect so that rotated secrets are found), and
why it could not be reached."""

import logging
import os
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import pika
from pika.exceptions import (
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from penstock.broker_url import check_broker_url, shown_broker_url, user_and_password, without_user
from penstock.errors import ConfigError

# pika reports one lost connection in a dozen lines with tracebacks, at each try again; we say it once. A level
# set for its logger, before or after, is left alone.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)

HEARTBEAT = 30  # seconds; a dead peer is noticed after two


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for `amqps://`. Without files the system's authorities are trusted."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None  # if the certificate names another host than the URL

    def context(self) -> ssl.SSLContext:
        """OSError that names the files if one cannot be used."""
        reading = f"tls.ca_file {self.ca_file}"
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file:
                reading = f"tls.cert_file {self.cert_file}, tls.key_file {self.key_file}"
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # which does not say what it was about
            raise OSError(f"{reading}: {error}") from error
        return context


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker's address. Its text form holds no secret."""

    url: str
    username_file: str | None = None
    password_file: str | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        parts = check_broker_url(self.url)
        if self.tls is not None and parts.scheme != "amqps":
            raise ConfigError(f"tls is set, but the url says {parts.scheme}://")
        try:
            self._url_parameters()
        except Exception as error:  # noqa: BLE001 - pika raises many kinds, and some quote the option, which may be secret
            raise ConfigError(f"url {self}: an option after ? makes no sense ({type(error).__name__})") from None

    def __str__(self) -> str:
        return shown_broker_url(self.url)

    def __repr__(self) -> str:
        return f"Broker({self})"

    def _url_parameters(self) -> pika.URLParameters:
        return pika.URLParameters(without_user(self.url))

    def parameters(self, purpose: str = "consumers") -> pika.ConnectionParameters:
        """What pika needs. OSError or ConfigError where a file cannot be read or holds nothing."""
        parts = urlsplit(self.url)
        parameters = self._url_parameters()
        parameters.credentials = pika.PlainCredentials(
            *user_and_password(self.url, self.username_file, self.password_file)
        )
        # What the broker's own tools show beside the address, unless the URL says it.
        named: dict[str, object] = {"connection_name": f"penstock {purpose} {socket.gethostname()} {os.getpid()}"}
        parameters.client_properties = named | (parameters.client_properties or {})
        if "heartbeat" not in parse_qs(parts.query):
            parameters.heartbeat = HEARTBEAT
        if parts.scheme == "amqps" and (self.tls is not None or "ssl_options" not in parse_qs(parts.query)):
            tls = self.tls or Tls()
            parameters.ssl_options = pika.SSLOptions(tls.context(), tls.server_name or parts.hostname)
        return parameters


def reason_of(error: BaseException) -> str:
    """The root of a failure in words, without what a URL may contain."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        # pika wraps the cause as `exception`, as the last of `exceptions` or as its only argument.
        inner = getattr(error, "exception", None) or getattr(error, "exceptions", None) or error.args
        if isinstance(inner, list | tuple):
            inner = inner[-1] if inner else None
        if not isinstance(inner, BaseException):
            break
        error = inner
    if isinstance(error, ProbableAuthenticationError):
        return "the broker refuses the user or password"
    if isinstance(error, ProbableAccessDeniedError):
        return "the broker refuses access to the virtual host"
    if isinstance(error, ChannelClosedByBroker | ConnectionClosedByBroker):
        return f"{error.reply_code} {error.reply_text}"
    return f"{type(error).__name__}: {error}"


def abandon(connection: pika.SelectConnection | None) -> None:
    """Drop a connection whose loop is broken. pika closes a socket only from its loop, and unless it is closed the
    broker waits for our acks."""
    socket = getattr(getattr(connection, "_transport", None), "_sock", None)
    if socket is not None:
        socket.close()
