"""Protobuf from the wire into columns, without an object for each message.

    scan        thousands of messages of one kind at a time: step k reads field k of all of them at once, so a step is
                some numpy calls however many messages there are, and a message of 6 fields takes 6 steps
    spans       texts and packed numbers stay where they are; a column of them is offsets into the request

What a valid request may contain but almost none does (an unpacked array, a repeated field in two places) is not read
here: `scan` calls such messages odd, and the request is normalised by protobuf itself and read again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.decode.plain import (
    FIXED32,
    FIXED64,
    LENGTH,
    MOST,
    VARINT,
    Layout,
    Scanned,
    TooMany,
    fields,
    messages_rest,
    scan_rest,
    varint,
)

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

PADDING = bytes(16)  # behind the last request, so that a length that lies never reads outside
_FIELD_1 = 0x0A  # its tag, where it is a message
_FEW_LANES = 48  # ranges for which a step of some numpy calls costs as much as a plain loop over them
_LONGEST = 1 << 31  # of one field: what Arrow's offsets hold
_BEYOND = 1 << 40  # a position that no request has
_MOST_STEPS = 50_000  # of some numpy calls each: a second or two
_FEW_STEPS = 256  # after which messages that are still not read are few, and long


def locate(
    data: bytes, at: int, end: int, base: int, starts: list[int], ends: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Append where the messages of field 1 are, `base` added; yield the other fields as `fields` does.

    The one loop that runs for every point: its calls are few on purpose.
    """
    add_start, add_end = starts.append, ends.append
    for _ in range(MOST):
        if at >= end:
            break
        if data[at] == _FIELD_1:
            length = data[at + 1]
            at += 2
            if length >= 128:
                more = data[at]
                at += 1
                length = length & 127 | more << 7
                if more >= 128:
                    length, at = varint(data, at - 2)
            add_start(base + at)
            at += length
            add_end(base + at)
        else:
            other = next(fields(data, at, end))
            yield other
            at = other[2]
    if at < end:
        raise TooMany(f"more than {MOST} points or series")
    if at != end:
        raise ValueError("a field that is longer than what it is part of")


@dataclass(frozen=True, slots=True)
class Chains:
    """The messages of field 1 in each of several ranges, in the order of the ranges, and the ranges' other fields."""

    owner: Ints
    starts: Ints
    ends: Ints
    others: list[tuple[int, int, int]]  # range, tag, value
    bad: set[int]  # ranges that are no messages


def chains(blob: bytes, data: Bytes, starts: Ints, ends: Ints) -> Chains:
    """What `locate` finds, for many ranges at once; `data` is `blob` as numbers. TooMany beyond `MOST` of them.

    Step k finds message k of all ranges. Where few ranges are left, a plain loop is faster.
    """
    others: list[tuple[int, int, int]] = []
    bad: set[int] = set()
    found: list[tuple[Ints, Ints, Ints]] = []
    tails: list[tuple[int, int, list[int], list[int]]] = []  # range, how many steps before it, starts, ends
    lanes = np.flatnonzero(starts < ends)
    at, end = starts[lanes], ends[lanes]
    steps = np.zeros(len(starts), np.int64)
    total = 0
    while len(lanes) >= _FEW_LANES:
        total += len(lanes)
        if total > MOST:
            raise TooMany(f"more than {MOST} points")
        tags = data[at]
        is_message = tags == _FIELD_1
        if is_message.all():
            length, content = _varints(data, at + 1)
            following = content + np.where(length < 0, _BEYOND, length)
            found.append((lanes, content, following))
            steps[lanes] += 1
        else:
            # Rare: one or two fields of each range. The message that stands here is found in the next step.
            following = at.copy()
            for place in np.flatnonzero(~is_message).tolist():
                lane = int(lanes[place])
                try:
                    tag, value, after = next(fields(blob, int(at[place]), int(end[place])))
                    others.append((lane, tag, value))
                    following[place] = after
                except (ValueError, IndexError):
                    bad.add(lane)
                    following[place] = end[place]
        alive = following < end
        if not alive.all():
            bad.update(lanes[following > end].tolist())
            kept = np.flatnonzero(alive)
            lanes, following, end = lanes[kept], following[kept], end[kept]
        at = following
    for lane, first, last in zip(lanes.tolist(), at.tolist(), end.tolist()):
        begun: list[int] = []
        ended: list[int] = []
        try:
            others += [(lane, tag, value) for tag, value, _ in locate(blob, first, last, 0, begun, ended)]
        except (ValueError, IndexError):
            bad.add(lane)
        tails.append((lane, int(steps[lane]), begun, ended))
        steps[lane] += len(begun)
        total += len(begun)
        if total > MOST:
            raise TooMany(f"more than {MOST} points")
    return _chained(found, tails, steps, others, bad)


def _chained(
    found: list[tuple[Ints, Ints, Ints]],
    tails: list[tuple[int, int, list[int], list[int]]],
    counts: Ints,
    others: list[tuple[int, int, int]],
    bad: set[int],
) -> Chains:
    """Put message k of each range to its place."""
    offsets = np.cumsum(counts) - counts
    total = int(counts.sum())
    begins, stops = np.empty(total, np.int64), np.empty(total, np.int64)
    step = np.zeros(len(counts), np.int64)
    for lanes, content, following in found:
        places = offsets[lanes] + step[lanes]
        begins[places], stops[places] = content, following
        step[lanes] += 1
    for lane, before, begun, ended in tails:
        place = int(offsets[lane]) + before
        begins[place : place + len(begun)], stops[place : place + len(begun)] = begun, ended
    return Chains(np.repeat(np.arange(len(counts)), counts), begins, stops, others, bad)


def scan(data: Bytes, starts: Ints, ends: Ints, layout: Layout) -> Scanned:
    """Read the fields of all messages; `data` must be followed by `PADDING`. TooMany if there is no end to them."""
    rows = len(starts)
    names = [*layout.fixed.values(), *layout.varints.values(), *layout.spans.values(), *layout.repeated.values()]
    names += [f"{name}_end" for name in (*layout.spans.values(), *layout.repeated.values())]
    result = Scanned({name: np.zeros(rows, np.int64) for name in names}, np.zeros(rows, bool), np.zeros(rows, bool))
    lanes = np.flatnonzero(starts < ends)
    at, end = starts[lanes], ends[lanes]
    steps = 0
    while len(lanes):
        steps += 1
        if steps > _FEW_STEPS and (len(lanes) < _FEW_LANES or steps > _MOST_STEPS):
            scan_rest(data, lanes, at, end, layout, result)
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
            result.bad[lanes[following > end]] = True
            kept = np.flatnonzero(alive)
            lanes, following, end = lanes[kept], following[kept], end[kept]
        at = following
    return result


def _step(data: Bytes, tag: int, lanes: Ints, at: Ints, layout: Layout, result: Scanned) -> Ints:
    """Read one field, of the same tag in all of these messages; where the next one starts."""
    columns = result.columns
    if tag in layout.odd:
        result.odd[lanes] = True
    if tag in layout.fixed:
        columns[layout.fixed[tag]][lanes] = at + 1
        return at + 9
    content = at + 1
    if tag >= 128:  # a field beyond 15: none that we want
        _, content = _varints(data, at)
    kind = tag & 7
    if kind == FIXED64:
        return content + 8
    if kind == FIXED32:
        return content + 4
    if kind not in (VARINT, LENGTH) or tag < 8:
        result.bad[lanes] = True
        return np.full_like(at, _BEYOND)
    value, content = _varints(data, content)
    if kind == VARINT:
        if tag in layout.varints:
            columns[layout.varints[tag]][lanes] = value
        return content
    following: Ints = content + np.where((value < 0) | (value > _LONGEST), _BEYOND, value)
    if tag in layout.spans:
        name = layout.spans[tag]
        result.odd[lanes] |= columns[f"{name}_end"][lanes] != 0
        columns[name][lanes] = content
        columns[f"{name}_end"][lanes] = following
    elif tag in layout.repeated:
        name = layout.repeated[tag]
        before = columns[f"{name}_end"][lanes]
        first = before == 0
        result.odd[lanes] |= ~first & (before != at)
        columns[name][lanes] = np.where(first, at, columns[name][lanes])
        columns[f"{name}_end"][lanes] = following
    return following


def _varints(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """The number at each position and where it ends; beyond everything if it does not end."""
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
    following[more] = _BEYOND
    return value.view(np.int64), following


def messages(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """The messages side by side in each range: which range each is of, and where. In the order of the ranges.

    Only for ranges that `scan` found: nothing is checked again. TooMany if there is no end to them.
    """
    lanes = np.flatnonzero(starts < ends)
    at, end = starts[lanes], ends[lanes]
    found: list[tuple[Ints, Ints, Ints]] = []
    total = 0
    while len(lanes):
        if len(found) > _FEW_STEPS and len(lanes) < _FEW_LANES:
            found += messages_rest(data, lanes, at, end)
            break
        total += len(lanes)
        if total > MOST or len(found) > _MOST_STEPS:
            raise TooMany(f"more than {MOST} samples")
        length, content = _varints(data, at + 1)
        following = content + length
        found.append((lanes, content, following))
        alive = np.flatnonzero(following < end)
        lanes, at, end = lanes[alive], following[alive], end[alive]
    if len(found) == 1:
        return found[0]
    if not found:
        return lanes, lanes, lanes
    owner, begin, stop = (np.concatenate(column) for column in zip(*found))
    order = np.argsort(begin, kind="stable")
    return owner[order], begin[order], stop[order]


def uint64_at(data: Bytes, at: Ints) -> NDArray[np.uint64]:
    """The 8 bytes at each position."""
    words: NDArray[np.uint64] = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data.data, strides=(1,))
    return words[at]


def float64_at(data: Bytes, at: Ints) -> NDArray[np.float64]:
    return uint64_at(data, at).view(np.float64)


def within(starts: Ints, lengths: Ints) -> Ints:
    """Every index of the ranges that start there and are so long, one range after the other."""
    ends = np.cumsum(lengths)
    indices: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return indices


def packed_varints(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Arrays of varints: all numbers, and how many each array has; -1 for one that is none."""
    bad = (ends > starts) & (data[np.maximum(ends - 1, 0)] >= 128)
    lengths = np.where(bad, 0, ends - starts)
    stream = data[within(starts, lengths)]
    last = stream < 128
    # One more, so that an empty array at the end has something to start at.
    counts = np.add.reduceat(np.append(last, False).astype(np.int64), np.cumsum(lengths) - lengths)
    stops = np.flatnonzero(last)
    begins = np.zeros(len(stops), np.int64)
    begins[1:] = stops[:-1] + 1
    place = np.arange(len(stream)) - np.repeat(begins, stops - begins + 1)
    pieces = (stream & 127).astype(np.uint64) << (7 * np.minimum(place, 9)).astype(np.uint64)
    values = np.add.reduceat(pieces, begins) if len(begins) else np.zeros(0, np.uint64)
    return values.view(np.int64), np.where(bad, -1, np.where(lengths > 0, counts, 0))


def texts(data: Bytes, starts: Ints, ends: Ints) -> Any:
    """The bytes of each span as an Arrow array, empty where it is absent. The spans must be in order and apart."""
    offsets = np.empty(2 * len(starts), np.int64)
    offsets[0::2] = starts
    offsets[1::2] = ends
    offsets = np.maximum.accumulate(offsets).astype(np.int32)
    # Every other value of this array is a gap between two spans: dropping them is one copy, in C++.
    length = max(0, len(offsets) - 1)
    with_gaps = pa.Array.from_buffers(pa.binary(), length, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return with_gaps.take(pa.array(np.arange(0, length, 2)))
