"""Points that were found in a group of requests: where their fields are, and whose they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Bytes, Ints, texts
from penstock.decode.group import Group
from penstock.decode.otlp.walk import Family
from penstock.decode.series import Namespace

Learn = Callable[["Found", Ints], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Points of one layout: their fields as `scan` gives them, and whose they are."""

    data: Bytes
    fields: dict[str, Ints]
    requests: Ints
    metrics: Ints  # the number of each point's metric in its group, ascending
    streams: Ints  # below 0 where it is not known yet
    families: list[Family]
    namespaces: list[Namespace]
    which: Ints  # the family of each point whose stream is not known
    learn: Learn
    """Told the stream of every point, below 0 for those that were not taken."""

    def take(self, rows: Any) -> "Found":
        return replace(
            self,
            fields={name: column[rows] for name, column in self.fields.items()},
            requests=self.requests[rows],
            metrics=self.metrics[rows],
            streams=self.streams[rows],
            which=self.which[rows],
        )

    def keys(self) -> Any:
        """The serialised attributes of every point, as an Arrow array; empty where its stream is known."""
        return texts(self.data, self.fields["attributes"], self.fields["attributes_end"])


def streams_of(found: Found, fine: NDArray[np.bool_], group: Group) -> Ints:
    """The stream of each point, below 0 for those that are not fine or are refused."""
    return streams_by_key(found, fine, group, None)


def streams_by_key(found: Found, fine: NDArray[np.bool_], group: Group, keys: Any) -> Ints:
    """The same, of points whose keys are others than their attributes."""
    streams = np.where(fine, found.streams, -1)
    group.table.seen[streams[streams >= 0]] = group.now
    asked = np.flatnonzero(fine & (found.streams < 0))
    if not len(asked):
        return streams
    if keys is not None:
        keys = keys if len(asked) == len(fine) else keys.take(asked)
    else:
        keys = (found if len(asked) == len(fine) else found.take(asked)).keys()
    metrics, which = found.metrics[asked], found.which[asked]
    is_next = (metrics[1:] != metrics[:-1]) | (which[1:] != which[:-1])
    bounds = np.concatenate([[0], np.flatnonzero(is_next) + 1, [len(asked)]])
    streams[asked] = group.streams_of(found.namespaces, which, keys, found.requests[asked], bounds)
    found.learn(found, streams)
    return streams
