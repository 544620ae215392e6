"""The protobuf wire format, read and written without generated classes.

    message   its fields, one after the other; a repeated field just comes again
    field     a tag, the varint `number << 3 | wire type`, then by wire type
              0 a varint · 1 eight bytes · 2 a varint length and so many bytes · 5 four bytes

Generated classes parse every point into an object (about 400 µs for a thousand points). Here a message costs no more
than a look at the lengths of its outermost fields, and protobuf is no requirement of the exporters.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_UINT64 = (1 << 64) - 1


# -- reading -----------------------------------------------------------------------------------------------------------


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Returns the number at `at` and where it ends. IndexError if `data` ends first, ValueError beyond 64 bits."""
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def fields(data: bytes | memoryview, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yields tag, start and end of the content of every field; for a varint, its value in place of the start.

    ValueError as soon as it proves not to be a message: what was yielded until then means nothing.
    """
    end = len(data) if end is None else end
    try:
        while at < end:
            tag, at = read_varint(data, at)
            if tag < 8:
                raise ValueError("a field without a number")
            wire_type = tag & 7
            if wire_type == LENGTH:
                length, at = read_varint(data, at)
                yield tag, at, at + length
                at += length
            elif wire_type == VARINT:
                value, at = read_varint(data, at)
                yield tag, value, at
            elif wire_type == FIXED64:
                yield tag, at, at + 8
                at += 8
            elif wire_type == FIXED32:
                yield tag, at, at + 4
                at += 4
            else:
                raise ValueError(f"a field of unknown wire type {wire_type}")
    except IndexError:
        raise ValueError("the message ends within a number") from None
    if at != end:
        raise ValueError("a field that is longer than its message")


def get_bytes(message: bytes, number: int) -> bytes | None:
    """Returns the last field of that number; None if there is none."""
    found = None
    for tag, start, end in fields(message):
        if tag == number << 3 | LENGTH:
            found = message[start:end]
    return found


def get_varint(message: bytes, number: int) -> int:
    """Returns the last field of that number; 0 if there is none."""
    found = 0
    for tag, value, _ in fields(message):
        if tag == number << 3 | VARINT:
            found = value
    return found


# -- writing -----------------------------------------------------------------------------------------------------------


def encode_varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative number as 64 bits."""
    value &= _UINT64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(4096)
def bytes_head(number: int, length: int) -> bytes:
    """Returns what precedes the content of a field of bytes: its tag and its length."""
    return encode_varint(number << 3 | LENGTH) + encode_varint(length)


def field_bytes(number: int, value: bytes) -> bytes:
    return bytes_head(number, len(value)) + value


def field_varint(number: int, value: int) -> bytes:
    return encode_varint(number << 3 | VARINT) + encode_varint(value)


def field_double(number: int, value: float) -> bytes:
    return encode_varint(number << 3 | FIXED64) + struct.pack("<d", value)


def halve(message: bytes, path: Sequence[Iterable[int]]) -> tuple[bytes, bytes] | None:
    """Divides a message in two: each has half of its repeated fields, and all of its other ones.

    `path[0]` are the numbers of the fields that may be divided at this level. Where there is only one of them it is
    itself divided, by the rest of the path. None if there is nothing left to divide.
    """
    if not path:
        return None
    tags = {number << 3 | LENGTH for number in path[0]}
    at = 0
    parts: list[tuple[bool, int, int, int]] = []  # whether it may be divided, start, start of its content, end
    for tag, content, end in fields(message):
        parts.append((tag in tags, at, content, end))
        at = end
    divisible = [part for part in parts if part[0]]
    if len(divisible) > 1:
        middle = divisible[len(divisible) // 2][1]
        first, second = bytearray(), bytearray()
        for is_divisible, start, _, end in parts:
            if not is_divisible or start < middle:
                first += message[start:end]
            if not is_divisible or start >= middle:
                second += message[start:end]
        return bytes(first), bytes(second)
    if not divisible:
        return None
    ((_, start, content, end),) = divisible
    inner = halve(message[content:end], path[1:])
    if inner is None:
        return None
    number = read_varint(message, start)[0] >> 3
    before, after = message[:start], message[end:]
    return before + field_bytes(number, inner[0]) + after, before + field_bytes(number, inner[1]) + after
