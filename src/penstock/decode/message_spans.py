"""Where the messages of a group of requests are, so that they can be scanned together.

locate_messages     the messages of field 1 of one range
child_messages      the same of several ranges
repeated_messages   the messages that stand side by side in ranges which `scan` has found
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.decode.column_scan import FEW_LANES, FEW_STEPS, MAX_MESSAGES, MAX_STEPS, Bytes, Ints, read_varints
from penstock.decode.outcome import TooMany
from penstock.protobuf import fields, read_varint

_FIELD_1 = 0x0A  # its tag, where it is a message


def locate_messages_in_body(
    data: bytes, at: int, end: int, base: int, starts: list[int], ends: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Appends where the messages of field 1 are, `base` added; yields the other fields as `fields` does.

    This loop runs for every point, so it makes few calls.
    """
    add_start, add_end = starts.append, ends.append
    for _ in range(MAX_MESSAGES):
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
                    length, at = read_varint(data, at - 2)
            add_start(base + at)
            at += length
            add_end(base + at)
        else:
            other = next(fields(data, at, end))
            yield other
            at = other[2]
    if at < end:
        raise TooMany(f"more than {MAX_MESSAGES} points or series")
    if at != end:
        raise ValueError("a field that is longer than its message")


@dataclass(frozen=True, slots=True)
class ChildMessages:
    """The messages of field 1 in each of several ranges, in the order of the ranges, and the ranges' other fields."""

    parent: Ints  # the index of the range that each message is in
    starts: Ints
    ends: Ints
    others: list[tuple[int, int, int]]  # range, tag, value
    malformed: set[int]  # ranges that are not messages


def child_messages_in_bodies(data: bytes, ranges: Iterable[tuple[int, int]]) -> ChildMessages:
    """Does for several ranges what `locate_messages_in_body` does for one. TooMany beyond `MAX_MESSAGES` in all."""
    starts: list[int] = []
    ends: list[int] = []
    counts: list[int] = []
    others: list[tuple[int, int, int]] = []
    malformed: set[int] = set()
    for number, (first, last) in enumerate(ranges):
        before = len(starts)
        try:
            others += [
                (number, tag, value) for tag, value, _ in locate_messages_in_body(data, first, last, 0, starts, ends)
            ]
        except (ValueError, IndexError):
            malformed.add(number)
        counts.append(len(starts) - before)
        if len(starts) + len(others) > MAX_MESSAGES:
            raise TooMany(f"more than {MAX_MESSAGES} points")
    parent = np.repeat(np.arange(len(counts)), counts)
    return ChildMessages(parent, np.array(starts, np.int64), np.array(ends, np.int64), others, malformed)


def repeated_messages_in_bodies(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the messages that stand side by side in ranges: the index of each one's range, and where it is.

    Only for ranges that `scan` found: nothing is checked again. TooMany beyond `MAX_MESSAGES`.
    """
    lanes = np.flatnonzero(starts < ends)
    at, end = starts[lanes], ends[lanes]
    found: list[tuple[Ints, Ints, Ints]] = []
    total = 0
    while len(lanes):
        if len(found) > FEW_STEPS and len(lanes) < FEW_LANES:
            found += _rest_one_by_one(data, lanes, at, end)
            break
        total += len(lanes)
        if total > MAX_MESSAGES or len(found) > MAX_STEPS:
            raise TooMany(f"more than {MAX_MESSAGES} samples")
        length, content = read_varints(data, at + 1)
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


def _rest_one_by_one(data: Bytes, lanes: Ints, starts: Ints, ends: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yields the messages of few long ranges: for those a plain loop is faster than a step of numpy."""
    for lane, at, end in zip(lanes.tolist(), starts.tolist(), ends.tolist()):
        spans = [(start, stop) for _, start, stop in islice(fields(data.data, at, end), MAX_MESSAGES)]
        if spans[-1][1] < end:
            raise TooMany(f"more than {MAX_MESSAGES} samples")
        places = np.array(spans, np.int64)
        yield np.full(len(places), lane), places[:, 0], places[:, 1]
