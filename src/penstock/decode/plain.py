"""Protobuf field by field, in plain loops: for messages that enclose many others, and for the few that are long."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MOST = 1_000_000  # points of a group, or fields of one message: real ones have a hundredth, and each costs memory


class TooMany(Exception):
    """More in a request than any sender puts into one: it is made to keep us busy, or to fill our memory."""


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; ValueError or IndexError if there is none."""
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


def fields(data: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Tag, start and end of every field of a message; of a varint, its value in place of the start.

    ValueError or IndexError once it proves not to be a message: what was yielded until then means nothing.
    """
    while at < end:
        tag, at = varint(data, at)
        if tag < 8:
            raise ValueError("a field without a number")
        kind = tag & 7
        if kind == LENGTH:
            length, at = varint(data, at)
            yield tag, at, at + length
            at += length
        elif kind == VARINT:
            value, at = varint(data, at)
            yield tag, value, at
        elif kind == FIXED64:
            yield tag, at, at + 8
            at += 8
        elif kind == FIXED32:
            yield tag, at, at + 4
            at += 4
        else:
            raise ValueError(f"a field of unknown kind {kind}")
    if at != end:
        raise ValueError("a field that is longer than what it is part of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The fields of a message that are wanted, by tag (number × 8 + kind)."""

    fixed: Mapping[int, str] = field(default_factory=dict)
    """8 bytes each; the column says where."""
    varints: Mapping[int, str] = field(default_factory=dict)
    spans: Mapping[int, str] = field(default_factory=dict)
    """Once at most: the columns `<name>` and `<name>_end` say where its content is."""
    repeated: Mapping[int, str] = field(default_factory=dict)
    """Side by side: from the first one's tag to the last one's end."""
    odd: frozenset[int] = frozenset()
    """Valid ways to write a field that `scan` does not read."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """Columns by name, a row for each message. 0 is the position of what is absent."""

    columns: dict[str, _Ints]
    bad: NDArray[np.bool_]
    odd: NDArray[np.bool_]


def scan_rest(data: _Bytes, lanes: _Ints, starts: _Ints, ends: _Ints, layout: Layout, result: Scanned) -> None:
    """Read few long messages to their end: a plain loop, since a step of numpy is for many."""
    budget = MOST
    view = data.data
    for lane, at, end in zip(lanes.tolist(), starts.tolist(), ends.tolist()):
        found = {name: int(column[lane]) for name, column in result.columns.items()}
        is_odd = False
        try:
            for tag, start, stop in fields(view, at, end):
                budget -= 1
                if not budget:
                    raise TooMany(f"more than {MOST} fields")
                if stop > end:
                    raise ValueError("a field that is longer than what it is part of")
                is_odd |= tag in layout.odd
                if tag != view[at]:  # in more bytes than one: a field beyond 15, none that we want
                    pass
                elif tag in layout.repeated:
                    name = layout.repeated[tag]
                    before = found[f"{name}_end"]
                    found[name] = found[name] if before else at
                    found[f"{name}_end"] = stop
                    is_odd |= before not in (0, at)
                elif tag in layout.spans:
                    name = layout.spans[tag]
                    is_odd |= found[f"{name}_end"] != 0
                    found[name], found[f"{name}_end"] = start, stop
                elif tag in layout.fixed:
                    found[layout.fixed[tag]] = start
                elif tag in layout.varints:
                    start &= (1 << 64) - 1
                    found[layout.varints[tag]] = start - (1 << 64) if start >> 63 else start
                at = stop
        except (ValueError, IndexError):
            result.bad[lane] = True
            continue
        result.odd[lane] |= is_odd
        for name, value in found.items():
            result.columns[name][lane] = value


def messages_rest(data: _Bytes, lanes: _Ints, starts: _Ints, ends: _Ints) -> Iterator[tuple[_Ints, _Ints, _Ints]]:
    """The rest of few long ranges, in a plain loop."""
    for lane, at, end in zip(lanes.tolist(), starts.tolist(), ends.tolist()):
        spans = [(start, stop) for _, start, stop in islice(fields(data.data, at, end), MOST)]
        if spans[-1][1] < end:
            raise TooMany(f"more than {MOST} samples")
        places = np.array(spans, np.int64)
        yield np.full(len(places), lane), places[:, 0], places[:, 1]
