"""The address of a message broker, read by consumers and publishers alike. What is secret stays inside."""

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from penstock.errors import ConfigError

_GUEST = "guest"


def check_broker_url(url: str) -> SplitResult:
    """The parts of an AMQP URL. ConfigError if it is none, without quoting it: any part of it may be the password."""
    try:
        parts = urlsplit(url)
        readable = parts.scheme in ("amqp", "amqps") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        readable = False
    if not readable:
        raise ConfigError("must look like amqp://user:password@host:port/vhost or amqps://...", field="url")
    if "#" in url or "@" in parts.path + parts.query:
        raise ConfigError("must have / ? # and @ in user or password written as %2F %3F %23 and %40", field="url")
    return parts


def shown_broker_url(url: str) -> str:
    """The URL without user, password and options, which may be secret."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"


def without_user(url: str) -> str:
    """The URL without user and password: clients take none or both, and one of them may come from a file."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def user_and_password(
    url: str, username_file: str | Path | None = None, password_file: str | Path | None = None
) -> tuple[str, str]:
    """From the files, else from the URL, else the broker's own default. OSError or ConfigError if a file has none."""
    parts = urlsplit(url)
    username = _secret(username_file) or unquote(parts.username or _GUEST)
    return username, _secret(password_file) or unquote(parts.password or _GUEST)


def _secret(path: str | Path | None) -> str | None:
    if path is None:
        return None
    secret = Path(path).read_text().strip()
    if not secret:  # half-written, perhaps; certainly not meant to be the default user
        raise ConfigError(f"{path} is empty")
    return secret
