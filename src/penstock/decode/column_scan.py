"""Protobuf from the wire into columns, without an object for each message.

    scan        thousands of messages of one type at a time: step k reads field k of all of them at once, so a step is
                some numpy calls however many messages there are, and a message of 6 fields takes 6 steps
    spans       texts and packed numbers stay where they are; a column of them is offsets into the request

A valid request may contain encodings that almost none does: an unpacked array, a repeated field in two places.
`scan_body_columns` does not read those. It marks such messages as non-canonical; protobuf itself then rewrites the
request, and that is scanned again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.decode.outcome import TooMany
from penstock.protobuf import FIXED32, FIXED64, LENGTH, VARINT, fields

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

PADDING = bytes(16)  # behind the last request, so that a wrong length never reads outside of the buffer
MAX_MESSAGES = 1_000_000  # points of a group, or fields of one message: real ones have a hundredth; each costs memory
_MAX_FIELDS = 8_000_000  # of all points of a group: as many as fit into the largest request of real points
_MAX_COUNTS = 2_000_000  # bytes of all packed arrays of a group: a bucket of a histogram takes one or more
FEW_LANES = 48  # messages for which a step of some numpy calls costs as much as a plain loop over them
FEW_STEPS = 256  # after which messages that are still not read are few, and long
MAX_STEPS = 50_000  # of some numpy calls each: a second or two
BEYOND = 1 << 40  # a position that no request has
_LONGEST = 1 << 31  # of one field: what Arrow's offsets hold


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLayout:
    """The fields of a message that are wanted, by tag (number × 8 + wire type)."""

    fixed: Mapping[int, str] = field(default_factory=dict)
    """8 bytes each; the column holds their positions."""
    varints: Mapping[int, str] = field(default_factory=dict)
    spans: Mapping[int, str] = field(default_factory=dict)
    """Once at most: the columns `<name>` and `<name>_end` say where its content is."""
    repeated: Mapping[int, str] = field(default_factory=dict)
    """Side by side: from the first one's tag to the last one's end."""
    noncanonical: frozenset[int] = frozenset()
    """Valid encodings of a field that `scan_body_columns` does not read."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """Columns by name, a row for each message. Position 0 means that the field is absent."""

    columns: dict[str, Ints]
    is_malformed: NDArray[np.bool_]
    is_noncanonical: NDArray[np.bool_]


def scan_body_columns(data: Bytes, starts: Ints, ends: Ints, layout: MessageLayout) -> Scanned:
    """Reads the fields of all messages; `data` must end with `PADDING`. TooMany beyond a bound."""
    rows = len(starts)
    names = [*layout.fixed.values(), *layout.varints.values(), *layout.spans.values(), *layout.repeated.values()]
    names += [f"{name}_end" for name in (*layout.spans.values(), *layout.repeated.values())]
    result = Scanned({name: np.zeros(rows, np.int64) for name in names}, np.zeros(rows, bool), np.zeros(rows, bool))
    lanes = np.flatnonzero(starts < ends)
    at, end = starts[lanes], ends[lanes]
    steps = total = 0
    while len(lanes):
        steps += 1
        total += len(lanes)
        if total > _MAX_FIELDS:
            raise TooMany(f"more than {_MAX_FIELDS} fields of points")
        if steps > FEW_STEPS and (len(lanes) < FEW_LANES or steps > MAX_STEPS):
            _scan_one_by_one(data, lanes, at, end, layout, result)
            break
        tags = data[at]
        counts = np.bincount(tags)
        if counts.max() == len(lanes):  # writers keep the order of fields, so most steps see one tag only
            following = _step(data, int(tags[0]), lanes, at, layout, result)
        else:
            following = np.empty_like(at)
            for tag in np.flatnonzero(counts):
                some = np.flatnonzero(tags == tag)
                following[some] = _step(data, int(tag), lanes[some], at[some], layout, result)
        alive = following < end
        if not alive.all():
            result.is_malformed[lanes[following > end]] = True
            kept = np.flatnonzero(alive)
            lanes, following, end = lanes[kept], following[kept], end[kept]
        at = following
    return result


def _step(data: Bytes, tag: int, lanes: Ints, at: Ints, layout: MessageLayout, result: Scanned) -> Ints:
    """Reads one field, of the same tag in all of these messages; returns where the next one starts."""
    columns = result.columns
    if tag in layout.noncanonical:
        result.is_noncanonical[lanes] = True
    if tag in layout.fixed:
        columns[layout.fixed[tag]][lanes] = at + 1
        return at + 9
    content = at + 1
    if tag >= 128:  # a field beyond 15: no layout has one
        _, content = read_varints(data, at)
    kind = tag & 7
    if kind == FIXED64:
        return content + 8
    if kind == FIXED32:
        return content + 4
    if kind not in (VARINT, LENGTH) or tag < 8:
        result.is_malformed[lanes] = True
        return np.full_like(at, BEYOND)
    value, content = read_varints(data, content)
    if kind == VARINT:
        if tag in layout.varints:
            columns[layout.varints[tag]][lanes] = value
        return content
    following: Ints = content + np.where((value < 0) | (value > _LONGEST), BEYOND, value)
    if tag in layout.spans:
        name = layout.spans[tag]
        result.is_noncanonical[lanes] |= columns[f"{name}_end"][lanes] != 0
        columns[name][lanes] = content
        columns[f"{name}_end"][lanes] = following
    elif tag in layout.repeated:
        name = layout.repeated[tag]
        before = columns[f"{name}_end"][lanes]
        first = before == 0
        result.is_noncanonical[lanes] |= ~first & (before != at)
        columns[name][lanes] = np.where(first, at, columns[name][lanes])
        columns[f"{name}_end"][lanes] = following
    return following


def _scan_one_by_one(
    data: Bytes, lanes: Ints, starts: Ints, ends: Ints, layout: MessageLayout, result: Scanned
) -> None:
    """Reads the rest of few long messages: for those a plain loop is faster than a step of numpy."""
    budget = MAX_MESSAGES
    view = data.data
    for lane, at, end in zip(lanes.tolist(), starts.tolist(), ends.tolist()):
        row = {name: int(column[lane]) for name, column in result.columns.items()}
        is_noncanonical = False
        try:
            for tag, start, stop in fields(view, at, end):
                budget -= 1
                if not budget:
                    raise TooMany(f"more than {MAX_MESSAGES} fields")
                if stop > end:
                    raise ValueError("a field that is longer than its message")
                is_noncanonical |= tag in layout.noncanonical
                if tag != view[at]:  # a tag of several bytes is a field beyond 15, and no layout has one
                    pass
                elif tag in layout.repeated:
                    name = layout.repeated[tag]
                    before = row[f"{name}_end"]
                    row[name] = row[name] if before else at
                    row[f"{name}_end"] = stop
                    is_noncanonical |= before not in (0, at)
                elif tag in layout.spans:
                    name = layout.spans[tag]
                    is_noncanonical |= row[f"{name}_end"] != 0
                    row[name], row[f"{name}_end"] = start, stop
                elif tag in layout.fixed:
                    row[layout.fixed[tag]] = start
                elif tag in layout.varints:
                    start &= (1 << 64) - 1
                    row[layout.varints[tag]] = start - (1 << 64) if start >> 63 else start
                at = stop
        except ValueError:
            result.is_malformed[lane] = True
            continue
        result.is_noncanonical[lane] |= is_noncanonical
        for name, value in row.items():
            result.columns[name][lane] = value


def read_varints(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Returns the number at each position and where it ends; BEYOND if it does not end."""
    byte = data[at]
    if byte.max(initial=0) < 128:
        return byte.astype(np.int64), at + 1
    value = (byte & 127).astype(np.uint64)
    following = at + 1
    more = np.flatnonzero(byte >= 128)
    shift = 7
    while len(more) and shift < 64:
        byte = data[np.minimum(following[more], len(data) - 1)]
        value[more] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        following[more] += 1
        more = more[byte >= 128]
        shift += 7
    following[more] = BEYOND
    return value.view(np.int64), following


def uint64_at(data: Bytes, at: Ints) -> NDArray[np.uint64]:
    """Returns the 8 bytes at each position."""
    words: NDArray[np.uint64] = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data.data, strides=(1,))
    return words[at]


def float64_at(data: Bytes, at: Ints) -> NDArray[np.float64]:
    return uint64_at(data, at).view(np.float64)


def within(starts: Ints, lengths: Ints) -> Ints:
    """Returns every index of the ranges that start there and are so long, one range after the other."""
    ends = np.cumsum(lengths)
    indices: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return indices


def packed_varints(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Reads arrays of varints: returns all numbers, how many each array has, and which arrays are malformed.

    TooMany beyond a bound.
    """
    is_malformed = (ends > starts) & (data[np.maximum(ends - 1, 0)] >= 128)
    lengths = np.where(is_malformed, 0, ends - starts)
    if lengths.sum() > _MAX_COUNTS:
        raise TooMany(f"more than {_MAX_COUNTS} bytes of buckets")
    stream = data[within(starts, lengths)]
    last = stream < 128
    # One element more, so that an empty array at the end has something to start at.
    counts = np.add.reduceat(np.append(last, False).astype(np.int64), np.cumsum(lengths) - lengths)
    stops = np.flatnonzero(last)
    begins = np.zeros(len(stops), np.int64)
    begins[1:] = stops[:-1] + 1
    place = np.arange(len(stream)) - np.repeat(begins, stops - begins + 1)
    pieces = (stream & 127).astype(np.uint64) << (7 * np.minimum(place, 9)).astype(np.uint64)
    values = np.add.reduceat(pieces, begins) if len(begins) else np.zeros(0, np.uint64)
    return values.view(np.int64), np.where(lengths > 0, counts, 0), is_malformed


def decode_texts(data: Bytes, starts: Ints, ends: Ints) -> Any:
    """Returns the bytes of each span as an Arrow array, empty where it is absent. Spans are in order and disjoint."""
    offsets = np.empty(2 * len(starts), np.int64)
    offsets[0::2] = starts
    offsets[1::2] = ends
    offsets = np.maximum.accumulate(offsets).astype(np.int32)
    # Every other value of this array is a gap between two spans: `take` drops them in one copy, in C++.
    length = max(0, len(offsets) - 1)
    with_gaps = pa.Array.from_buffers(pa.binary(), length, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return with_gaps.take(pa.array(np.arange(0, length, 2)))
