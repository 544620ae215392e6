"""`512Mi` and `30s`: sizes and durations as text, parsed at the edge and nowhere else."""

import math
import re

from penstock.errors import ConfigError

_SIZES = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30, "ti": 2**40, "tib": 2**40,
}  # fmt: skip
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Zµ]*)\s*")
_BARE = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|µs|ms|s|m|h|d)")


def parse_bytes(value: int | str, field: str, *, least: int = 0) -> int:
    """Bytes from an int or a string like `512Mi`, `256Ki`, `1Gi`, `10MB`. `field` names it in the error."""
    size = _bytes(value, field)
    if size < least:
        raise ConfigError(f"must be >= {least} bytes, got {value}", field=field)
    return size


def _bytes(value: int | str, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"must be a size like 1048576 or '512Mi', got {value!r}", field=field)
    if isinstance(value, int):
        return value
    match = _NUMBER.fullmatch(value)
    factor = _SIZES.get(match[2].lower()) if match else None
    if match is None or factor is None or (factor == 1 and "." in match[1]):
        raise ConfigError(f"must be a size like 1048576 or '512Mi' (Ki, Mi, Gi, Ti), got {value!r}", field=field)
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_duration(value: float | str, field: str, *, is_positive: bool = False) -> float:
    """Seconds from a number or a string like `30s`, `5m`, `1m30s`, `250ms`, `0.5`. `field` names it in the error.

    `is_positive`: 0 is refused, too.
    """
    seconds = _seconds(value, field)
    if is_positive and not seconds:
        raise ConfigError(f"must be > 0, got {value!r}", field=field)
    return seconds


def _seconds(value: float | str, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"must be a duration like 30 (seconds) or '30s', got {value!r}", field=field)
    if isinstance(value, str):
        text = value.strip()
        if _BARE.fullmatch(text):  # as without the quotes
            return float(text)
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ConfigError(f"must be a duration like 30 (seconds), '30s' or '1m30s', got {value!r}", field=field)
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"must be a finite number of seconds >= 0, got {value}", field=field)
    return float(value)


def check_count(value: object, field: str, least: int = 0) -> None:
    """ConfigError unless `value` is a whole number and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"must be a whole number >= {least}, got {value!r}", field=field)


def check_number(value: object, field: str, least: float, most: float = math.inf) -> None:
    """ConfigError unless `value` is a finite number between `least` and `most`, both included."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        bound = f">= {least:g}" if most == math.inf else f"within {least:g} and {most:g}"
        raise ConfigError(f"must be a number {bound}, got {value!r}", field=field)


def check_flag(value: object, field: str) -> None:
    """ConfigError unless `value` is yes or no: the text `no` would count as yes."""
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false, got {value!r}", field=field)


def format_bytes(count: float) -> str:
    """`1.5 GiB`: rounded, for display."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def exact_bytes(count: int) -> str:
    """`512Mi`: the shortest text that `parse_bytes` reads back as the same number."""
    units = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10), ("GB", 10**9), ("MB", 10**6))
    texts = [f"{count // factor}{unit}" for unit, factor in units if count and count % factor == 0]
    if texts:
        return min(texts, key=len)
    return str(count)


def exact_duration(seconds: float) -> str:
    """`5m`: a short text that `parse_duration` reads back as the same number."""
    for unit, factor in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds and seconds % factor == 0:
            return f"{int(seconds // factor)}{unit}"
    milliseconds = seconds * 1000
    if milliseconds.is_integer() and seconds:
        return f"{int(milliseconds)}ms"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def parse_address(text: str, field: str, *, may_be_all: bool = False) -> tuple[str, int]:
    """Host and port of `127.0.0.1:4318` or `[::1]:4318`; port 0 is any that is free. `field` names it in the error.

    `may_be_all`: without a host, as `:4318`, it is every address of the machine.
    """
    host, found, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not (host or may_be_all) or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"must be HOST:PORT with a port of 0 to 65535, as 127.0.0.1:4318, got {text!r}", field=field)
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """As `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
