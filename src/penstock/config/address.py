"""`127.0.0.1:4318` and `[::1]:4318`: where something listens."""

from penstock.errors import ConfigError


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Host and port; port 0 is any that is free. `field` names it in the error."""
    host, found, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"must be HOST:PORT with a port of 0 to 65535, as 127.0.0.1:4318, got {text!r}", field=field)
    return host, int(port)
