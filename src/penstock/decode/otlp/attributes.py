"""OTLP attributes as labels: every kind of value as a text, as OpenTelemetry's own mapping says.

text          as it is                      bytes          base64
true, 5, 0.5  as JSON writes them           array, map     JSON
"""

import base64
import json
import struct
from typing import Any

from penstock.decode.outcome import PointRefusal, RefusedStreams
from penstock.protobuf import LENGTH, fields

_KEY, _VALUE = 0x0A, 0x12  # of a KeyValue
_ENTRIES = 0x0A  # of an array or a map


def otlp_attributes(data: bytes, max_nesting: int, *, tag: int | None = None) -> dict[str, str]:
    """Returns the labels of serialised `repeated KeyValue`; of a name that comes twice, the last. Raises Refused.

    `tag` is the field's, where the message has other fields, too.
    """
    found = {}
    try:
        for found_tag, start, end in fields(data, 0, len(data)):
            if found_tag == tag or (tag is None and found_tag & 7 == LENGTH):
                name, value = _key_value(data, start, end, max_nesting)
                found[name] = otlp_attribute_text(value)
    except (ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise RefusedStreams(PointRefusal.MALFORMED, f"attributes that cannot be read: {error}") from None
    return found


def _key_value(data: bytes, at: int, end: int, nesting: int) -> tuple[str, Any]:
    name, value = "", None
    for tag, start, stop in fields(data, at, end):
        if tag == _KEY:
            name = data[start:stop].decode()
        elif tag == _VALUE:
            value = _any_value(data, start, stop, nesting)
    return name, value


def _any_value(data: bytes, at: int, end: int, nesting: int) -> Any:
    if nesting < 1:
        raise ValueError("a value that is nested too deep")
    value: Any = None
    for tag, start, stop in fields(data, at, end):
        match tag:
            case 0x0A:
                value = data[start:stop].decode()
            case 0x10:
                value = bool(start)
            case 0x18:
                value = start - (1 << 64) if start >> 63 else start
            case 0x21:
                (value,) = struct.unpack_from("<d", data, start)
            case 0x2A:
                parts = [part for part in fields(data, start, stop) if part[0] == _ENTRIES]
                value = [_any_value(data, first, last, nesting - 1) for _, first, last in parts]
            case 0x32:
                parts = [part for part in fields(data, start, stop) if part[0] == _ENTRIES]
                value = dict(_key_value(data, first, last, nesting - 1) for _, first, last in parts)
            case 0x3A:
                value = data[start:stop]
    return value


def otlp_attribute_text(value: Any) -> str:
    """Returns the text that stands for an attribute's value."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=otlp_attribute_text)
