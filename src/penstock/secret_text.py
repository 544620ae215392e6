"""Masks what is secret in text that is shown: passwords in addresses, values whose name says that they are secret."""

import re

HIDDEN = "***"
# What Spark hides by default, and more. `spark.redaction.regex` says it to Spark.
SECRET_NAME = r"(?i)secret|passw|token|access[._-]?key|account[._-]?key|credential|passphrase|private[._-]?key"  # noqa: S105

_NAMES_SECRET = re.compile(SECRET_NAME)
_ADDRESS = re.compile(r"(\w://[^\s:/@]*):\S*@")  # up to the last @: a password may hold one
_PAIR = re.compile(rf"(?P<name>[\w.-]*(?:{SECRET_NAME.removeprefix('(?i)')})[\w.-]*)=(?P<value>[^\s\"'&;,)]+)", re.I)
_PLACE = ("file", "path", "class", "provider", "folder")  # names that end so hold a place, not the secret


def is_secret_name(name: str) -> bool:
    """Whether a setting of that name holds a secret."""
    return bool(_NAMES_SECRET.search(name)) and not name.lower().endswith(_PLACE)


def redacted(text: str) -> str:
    """The text with every password of an address, and the value of every `name=value` that is secret, masked."""
    if "://" in text:
        text = _ADDRESS.sub(rf"\1:{HIDDEN}@", text)
    return _PAIR.sub(_hide_pair, text) if "=" in text else text


def _hide_pair(found: re.Match[str]) -> str:
    return f"{found['name']}={HIDDEN if is_secret_name(found['name']) else found['value']}"
