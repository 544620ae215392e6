"""To RabbitMQ, with publisher confirms: a batch is sent when a queue has it, persistently (extra `[amqp]`)."""

import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pika
from pika import exceptions
from pika.adapters.blocking_connection import BlockingChannel
from pika.adapters.utils.connection_workflow import AMQPConnectorException, AMQPConnectorStackTimeout

from penstock.broker_url import check_broker_url, shown_broker_url, user_and_password, without_user
from penstock.errors import (
    ConfigError,
    ErrorClass,
    ExportError,
    PayloadTooLarge,
    TransientExportError,
)
from penstock.export.exporter import PartialSuccess, Prepared
from penstock.export.http_client import TlsConfig, check_destination_file

# pika reports one failed connect in a dozen lines with tracebacks; the send queue logs one line. An
# application that wants pika's lines sets a level for it, before or after.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)

HEARTBEAT = 30  # seconds; a dead broker is noticed after two
_IDLE = 5.0  # seconds after which a connection is asked for its state before it is used
_BLOCKED = 30.0  # seconds that a broker short of memory or disk may keep a send waiting
_TOO_LARGE = (311, 406)  # content too large; precondition failed, which RabbitMQ says to a message above its limit
_AUTH = 403  # access refused


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # the url may hold a password
class AmqpConfig:
    """Where messages go. Its text form holds no secret."""

    url: str
    exchange: str = ""
    routing_key: str = ""
    content_type: str = "application/x-protobuf"
    message_type: str | None = None
    """The message's `type`: consumers dispatch by it."""
    password_file: str | Path | None = None
    """Read at every connect, so that a new one is found."""
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        parts = check_broker_url(self.url)
        check_destination_file(self.password_file, "password_file")
        if self.tls is not None and parts.scheme != "amqps":
            raise ConfigError(f"is set, but the url says {parts.scheme}://", field="tls")
        if not self.exchange and not self.routing_key:
            raise ConfigError("must name a queue where no exchange is set", field="routing_key")

    def __repr__(self) -> str:
        return f"AmqpConfig({shown_broker_url(self.url)})"

    def parameters(self) -> pika.ConnectionParameters:
        parameters = pika.URLParameters(without_user(self.url))
        parameters.credentials = pika.PlainCredentials(*user_and_password(self.url, password_file=self.password_file))
        parameters.heartbeat = HEARTBEAT
        parameters.blocked_connection_timeout = _BLOCKED
        if self.tls is not None:
            parameters.ssl_options = pika.SSLOptions(self.tls.context(), parameters.host)
        return parameters


class _Link:
    """One thread's connection: a channel in confirm mode."""

    def __init__(self, parameters: pika.ConnectionParameters) -> None:
        self.connection = pika.BlockingConnection(parameters)
        self.channel: BlockingChannel = self.connection.channel()
        self.channel.confirm_delivery()
        self.used_at = time.monotonic()

    def is_usable(self) -> bool:
        """Whether it can be used; one that was idle is asked, since the broker may have ended it."""
        if time.monotonic() - self.used_at > _IDLE:
            self.connection.process_data_events(0)
        return bool(self.connection.is_open and self.channel.is_open)

    def cut_off(self) -> None:
        """End it from another thread, whatever its own is waiting for; pika has nothing for a broker that hangs."""
        transport = getattr(getattr(self.connection, "_impl", None), "_transport", None)
        sock = getattr(transport, "_sock", None)
        if sock is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of a TLS socket would break the reading thread
            except OSError:
                pass  # it was closed already


class AmqpExporter:
    """Publishes each batch as one persistent message and waits for the broker's confirm.

    Loss: none. A message that no queue takes is returned by the broker and counts as failed.
    Threads: every method may be called from any thread; each has its own connection, so that as many confirms are
        awaited at a time as there are senders.
    """

    in_order = False

    def __init__(self, config: AmqpConfig) -> None:
        self._config = config
        self.destination = shown_broker_url(config.url)
        self._properties = pika.BasicProperties(
            content_type=config.content_type, type=config.message_type, delivery_mode=pika.DeliveryMode.Persistent
        )
        self._local = threading.local()
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._links: WeakSet[_Link] = WeakSet()  # weak: the link of a worker that has ended goes with it
        self._closed = False

    def prepare(self, batch: bytes) -> Prepared:
        return Prepared(batch)

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        link: _Link | None = getattr(self._local, "link", None)
        if link is not None:
            try:
                if link.is_usable():
                    self._publish(link, prepared.body)
                    return None
            except (exceptions.ConnectionClosed, exceptions.StreamLostError, exceptions.ConnectionWrongStateError):
                pass  # it was lost while idle or under way: on a fresh one it is a failure
            except Exception as error:
                self._forget(link)
                raise _export_error(error) from error
            self._forget(link)
        try:
            link = self._connect()
            self._publish(link, prepared.body)
        except Exception as error:
            if link is not None:
                self._forget(link)
            raise _export_error(error) from error
        return None

    def split(self, batch: bytes) -> list[bytes] | None:
        """A message is whole or nothing."""
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._links)
        for link in links:
            link.cut_off()

    def _publish(self, link: _Link, body: bytes) -> None:
        link.channel.basic_publish(
            self._config.exchange, self._config.routing_key, body, self._properties, mandatory=True
        )
        link.used_at = time.monotonic()

    def _connect(self) -> _Link:
        self._check_open()
        link = _Link(self._config.parameters())
        with self._lock:
            if self._closed:
                link.cut_off()
            self._check_open()
            self._links.add(link)
        self._local.link = link
        return link

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the exporter is closed")

    def _forget(self, link: _Link) -> None:
        self._local.link = None
        with self._lock:
            self._links.discard(link)
        try:
            link.connection.close()
        except exceptions.AMQPError:
            pass  # it was lost already


def _export_error(error: BaseException) -> ExportError | BaseException:
    """What pika raised, as an ExportError; other errors stay what they are and are classified by their type."""
    if isinstance(error, exceptions.UnroutableError):
        return TransientExportError("no queue takes the message", ErrorClass.CLIENT_ERROR)
    if isinstance(error, exceptions.NackError):
        return TransientExportError("the broker could not keep the message", ErrorClass.SERVER_ERROR)
    if isinstance(error, (exceptions.ProbableAuthenticationError, exceptions.ProbableAccessDeniedError)):
        return TransientExportError(f"the broker refused the connection: {type(error).__name__}", ErrorClass.AUTH)
    if isinstance(error, exceptions.ChannelClosedByBroker):
        return _closed_channel(error)
    if isinstance(error, exceptions.ConnectionBlockedTimeout):
        return TransientExportError("the broker is short of memory or disk", ErrorClass.SERVER_ERROR)
    if isinstance(error, exceptions.AMQPConnectionError):
        return TransientExportError(_text(error), _class_of_connection(error))
    if isinstance(error, AMQPConnectorStackTimeout):
        return TransientExportError("the broker did not answer to the connect", ErrorClass.TIMEOUT)
    if isinstance(error, AMQPConnectorException):
        return TransientExportError(_text(error), ErrorClass.NETWORK)
    if isinstance(error, exceptions.AMQPError):
        return TransientExportError(_text(error))
    return error


def _closed_channel(error: Any) -> ExportError:
    text = f"{error.reply_code} {error.reply_text}"
    if error.reply_code in _TOO_LARGE:
        return PayloadTooLarge(text)
    return TransientExportError(text, ErrorClass.AUTH if error.reply_code == _AUTH else ErrorClass.CLIENT_ERROR)


def _class_of_connection(error: exceptions.AMQPConnectionError) -> ErrorClass:
    causes = [getattr(argument, "exception", argument) for argument in error.args]
    if any(isinstance(cause, (TimeoutError, exceptions.AMQPHeartbeatTimeout)) for cause in causes):
        return ErrorClass.TIMEOUT
    return ErrorClass.NETWORK


def _text(error: BaseException) -> str:
    inner = next((getattr(argument, "exception", None) for argument in error.args), None)
    shown = inner if isinstance(inner, (OSError, ssl.SSLError)) else error
    return f"{type(error).__name__}: {shown}" if str(shown) else type(error).__name__
