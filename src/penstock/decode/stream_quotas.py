"""Which sender and which label take the places of streams: for quotas, and for messages that name a culprit."""

import json
from collections.abc import Iterable
from itertools import islice

import numpy as np

from penstock.decode.column_scan import Ints
from penstock.decode.text_dictionary import SeriesTextDictionary

_SAMPLED = 1000  # series that are looked at for the label with the most values


class StreamSenders:
    """The sender of each stream. A sender without a name has no quota.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._names = SeriesTextDictionary()
        self._sender = np.zeros(1024, np.int32)

    def streams_of(self, sender: str) -> int:
        return self._names.uses(sender)

    def add(self, stream: int, sender: str) -> None:
        if stream >= len(self._sender):
            self._sender = np.append(self._sender, np.zeros(len(self._sender), np.int32))
        self._sender[stream] = self._names.add(sender)

    def forget(self, streams: Ints) -> None:
        for number in self._sender[streams].tolist():
            self._names.release(number)

    def greatest(self) -> str:
        """The sender of most streams."""
        return self._names.most_used()


def widest_label(entities: Iterable[str]) -> str:
    """The label with the most values among the first of these series; empty if they have none."""
    values: dict[str, set[str]] = {}
    for entity in islice(entities, _SAMPLED):
        for name, value in json.loads(entity).items():
            values.setdefault(name, set()).add(value)
    return max(values, key=lambda name: len(values[name]), default="")
