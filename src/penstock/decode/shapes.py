"""Shapes: metrics that come again and again with the same series in the same order, as a sender's mostly do.

    bytes of a metric   0a 03 cpu 2a 4f 0a 23 19 ········ 21 ········ 3a 0e …     · times, values, counts: free
    its mask            ff ff fff ff ff ff ff ff 00000000 ff 00000000 ff ff

A metric whose bytes are the same under the mask has its fields in the same places and points of the same streams. So a
request that only brings new numbers is compared, not parsed: every byte that says what they mean is looked at, all at
once. Whatever differs is read field by field and becomes a shape of its own.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints
from penstock.decode.otlp.walk import Owner, Place

Streams = NDArray[np.int32]

_ABSENT = -(1 << 30)  # a place that no request has, whatever is added to it
_TRIES = 8  # shapes of one metric that may prove useless before no more are made
_MOST = 256  # shapes of one metric, which may have to be compared one by one
_PROBE = 512  # bytes at most by which a shape is told from others before it is compared
_PATIENCE, _LITTLE_PATIENCE = 10, 2  # sweeps, of a minute each, without a use: with room to spare, and without
_OVERHEAD = 1000  # bytes of the objects of a shape


class Shape:
    """One metric's bytes with holes, where the fields of its points are, and whose they are."""

    __slots__ = (
        "fixed",
        "hits",
        "hits_before",
        "idle",
        "layout",
        "length",
        "mask",
        "owner",
        "places",
        "points",
        "probe",
        "probe_at",
        "streams",
        "successor",
        "values",
    )

    def __init__(
        self, owner: Owner, layout: int, data: Bytes, free: Ints, places: Ints, values: Ints, streams: Streams
    ):
        self.owner = owner
        self.layout = layout
        self.length = len(data)
        self.mask = np.full(len(data), 255, np.uint8)
        self.mask[free] = 0
        self.fixed = (data & self.mask).tobytes()
        # Attributes differ most, and stand between what is free: the longest stretch without a hole, the last of such.
        holes = np.flatnonzero(np.append(self.mask, 0) == 0)
        gaps = np.diff(holes, prepend=-1)
        widest = len(gaps) - 1 - int(np.argmax(gaps[::-1]))
        self.probe_at = int(holes[widest] - min(_PROBE, gaps[widest] - 1))
        self.probe = self.fixed[self.probe_at : int(holes[widest])]
        self.places = np.where(places > 0, places, _ABSENT).astype(np.int32)
        self.values = values
        self.streams = streams
        self.points = len(streams)
        self.hits = self.hits_before = 0
        self.idle = 0  # sweeps
        self.successor: Shape | None = None

    @property
    def nbytes(self) -> int:
        owner = sum(map(len, self.owner))  # which it may share with others, or not
        return owner + 2 * self.length + self.places.nbytes + self.values.nbytes + self.streams.nbytes + _OVERHEAD

    def rested(self) -> int:
        """For how many sweeps nobody needed it."""
        self.idle = 0 if self.hits > self.hits_before else self.idle + 1
        self.hits_before = self.hits
        return self.idle

    def fits(self, data: Bytes, start: int) -> bool:
        """Whether what starts there, and is as long, is the same but for the numbers."""
        if (data[start : start + self.length] & self.mask).tobytes() != self.fixed:
            return False
        self.hits += 1
        return True


class Shapes:
    """The shapes that are known, at most `max_bytes` of them.

    Threads: one at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: dict[Owner, list[Shape]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, list(self._known.values())))

    def find(self, place: Place, body: bytes, data: Bytes, last: Shape | None) -> Shape | None:
        """The shape of the metric at that place; `last` is that of the metric before it in the request."""
        resource, scope, start, end = place
        if last is not None and (shape := last.successor) is not None:  # as it was the last time
            owner = shape.owner
            if shape.length == end - start and owner[0] == resource and owner[1] == scope and shape.fits(data, start):
                return shape
        for shape in self._known.get(place.owner(body), ()):
            if (
                shape.length == end - start
                and body.startswith(shape.probe, start + shape.probe_at)
                and shape.fits(data, start)
            ):
                if last is not None:
                    last.successor = shape
                return shape
        return None

    def wants(self, owner: Owner) -> bool:
        """Whether it is worth while to make one more shape of that owner's metric."""
        known = self._known.get(owner, ())
        if self.nbytes >= self._max_bytes or len(known) >= _MOST:
            return False
        return sum(not shape.hits for shape in known) < _TRIES

    def add(self, shape: Shape) -> None:
        self._known.setdefault(shape.owner, []).append(shape)
        self.nbytes += shape.nbytes

    def sweep(self, gone: NDArray[np.bool_]) -> None:
        """Forget shapes that nobody needs, sooner where there is little room, and those with a stream that is gone."""
        patience = _PATIENCE if self.nbytes < self._max_bytes // 2 else _LITTLE_PATIENCE
        for owner, shapes in list(self._known.items()):
            kept = [shape for shape in shapes if shape.rested() < patience and not gone[shape.streams].any()]
            self.nbytes -= sum(shape.nbytes for shape in shapes) - sum(shape.nbytes for shape in kept)
            for shape in kept:
                shape.successor = None  # which may be one of those that are forgotten
            if kept:
                self._known[owner] = kept
            else:
                del self._known[owner]
