"""Which requests the admin port answers: by host name, token and certificate."""

import base64
import binascii
import ipaddress
import socket
import ssl
from email.message import Message
from http import HTTPStatus
from typing import NamedTuple

from penstock.config.address import parse_address
from penstock.config.tree import AdminConfig
from penstock.errors import ConfigError
from penstock.receive.config import is_authorized


class AdminRefusal(NamedTuple):
    """The answer to a request that the admin port does not take."""

    status: HTTPStatus
    message: str


class AdminGuard:
    """Checks requests before they are answered.

    A web page whose name an attacker points at this machine has that name in `Host`: only addresses and known names are
    answered. A token is needed where one is set.

    Threads: every method may be called from any thread.
    """

    def __init__(self, config: AdminConfig) -> None:
        self._config = config
        host, _ = parse_address(config.listen, "admin.listen")
        self._names = {name.lower() for name in ("localhost", socket.gethostname(), host, *config.allowed_hosts)}
        self._tokens, self.context = self.check_secrets()

    def check_secrets(self) -> tuple[tuple[bytes, ...], ssl.SSLContext | None]:
        """Returns the tokens and certificates as they are now; ConfigError if they cannot be read."""
        try:
            tokens = self._config.auth.tokens() if self._config.auth else ()
            return tokens, self._config.tls.context() if self._config.tls else None
        except ConfigError as error:
            raise error.within("admin") from error

    def reload(self) -> None:
        """Reads the tokens and certificates again; new connections use them."""
        self._tokens, self.context = self.check_secrets()

    def refusal(self, headers: Message) -> AdminRefusal | None:
        """Returns why a request is not answered, None if it is. Tokens aside."""
        if headers.get("Transfer-Encoding") or headers.get("Content-Length", "0").strip() != "0":
            return AdminRefusal(HTTPStatus.BAD_REQUEST, "a body is not taken here")
        hosts = headers.get_all("Host", [])  # a probe may have none; browsers have one
        host = ", ".join(hosts)
        if hosts and not self._is_known(host):
            return AdminRefusal(
                HTTPStatus.FORBIDDEN, f"host {host[:100]!r} is not known here; admin.allowed_hosts can name it"
            )
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return AdminRefusal(HTTPStatus.FORBIDDEN, f"the page of another site, {origin[:100]!r}, is not answered")
        return None

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.removeprefix("[").removesuffix("]").lower()
        if "*" in self._names or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def is_authorized(self, headers: Message) -> bool:
        """Says whether the request has a token: as a bearer's, or as the password that a browser asks for."""
        given = [_as_bearer(value) for value in headers.get_all("Authorization", [])]
        return not self._tokens or is_authorized(given, self._tokens)


def _as_bearer(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return header
    try:
        return "Bearer " + base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
