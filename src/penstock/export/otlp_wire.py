"""As much of the protobuf wire format as the exporters need: a few fields of small messages, and cutting large ones.

A message is a row of fields: a varint `number << 3 | type`, then by type 0 a varint, 1 eight bytes, 2 a varint length
and so many bytes, 5 four bytes. Repeated fields just follow one another, so a batch is cut between two of them without
decoding what is inside, which costs no more than looking at its outermost lengths. Generated classes would parse every
point into objects first (about 400 µs for a thousand of them) and make protobuf a requirement of the exporters.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}


class Field(NamedTuple):
    """One field of a message: `message[start:end]` is all of it, `message[value:end]` what it holds."""

    number: int
    kind: int
    start: int
    value: int
    end: int


def varint(value: int) -> bytes:
    """`value` in groups of seven bits, the lowest first; negative ones as 64 bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends. ValueError if there is none."""
    value = shift = 0
    while shift < 70:
        if at >= len(message):
            raise ValueError("the message ends within a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number of more than ten bytes")


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message, in order. ValueError if it is not one."""
    at = 0
    while at < len(message):
        start = at
        tag, at = read_varint(message, at)
        kind, value = tag & 7, at
        if kind == VARINT:
            _, at = read_varint(message, at)
        elif kind == BYTES:
            length, value = read_varint(message, at)
            at = value + length
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"field {tag >> 3} has the unknown type {kind}")
        if at > len(message):
            raise ValueError(f"field {tag >> 3} is longer than its message")
        yield Field(tag >> 3, kind, start, value, at)


def field_bytes(number: int, value: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def field_varint(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def field_double(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def get_bytes(message: bytes, number: int) -> bytes | None:
    """The last field of that number; None if there is none."""
    found = None
    for one in fields(message):
        if one.number == number and one.kind == BYTES:
            found = message[one.value : one.end]
    return found


def get_varint(message: bytes, number: int) -> int:
    """The last field of that number; 0 if there is none."""
    found = 0
    for one in fields(message):
        if one.number == number and one.kind == VARINT:
            found, _ = read_varint(message, one.value)
    return found


def halve(message: bytes, path: Sequence[Iterable[int]]) -> tuple[bytes, bytes] | None:
    """Two messages that make up `message`: each has half of its repeated fields, and all of its other ones.

    `path[0]` are the numbers of the fields that may be divided at this level. Where there is only one of them it is
    itself divided, by the rest of the path. None if there is nothing left to divide.
    """
    if not path:
        return None
    numbers = set(path[0])
    all_fields = list(fields(message))
    divisible = [one for one in all_fields if one.number in numbers and one.kind == BYTES]
    if len(divisible) > 1:
        middle = divisible[len(divisible) // 2].start
        first, second = bytearray(), bytearray()
        for one in all_fields:
            is_common = one.number not in numbers or one.kind != BYTES
            if is_common or one.start < middle:
                first += message[one.start : one.end]
            if is_common or one.start >= middle:
                second += message[one.start : one.end]
        return bytes(first), bytes(second)
    if not divisible:
        return None
    (only,) = divisible
    inner = halve(message[only.value : only.end], path[1:])
    if inner is None:
        return None
    before, after = message[: only.start], message[only.end :]
    return (
        before + field_bytes(only.number, inner[0]) + after,
        before + field_bytes(only.number, inner[1]) + after,
    )
