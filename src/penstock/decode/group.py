"""A group of requests on its way through: what was taken of each, what was not, and why."""

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.decode.column_scan import Ints
from penstock.decode.outcome import TAKEN, Answer, Refusal, Status
from penstock.decode.series import Namespace, SeriesTable
from penstock.decode.stream_homes import Elsewhere, Homes

_MOST_MESSAGES = 10


class Account:
    """How the requests of one group fared."""

    def __init__(self, requests: int) -> None:
        self.errors: dict[int, Answer] = {}
        self.rejected = np.zeros(requests, np.int64)
        self.messages: dict[int, list[str]] = {}
        self.reasons: Counter[Refusal] = Counter()
        self.points = 0
        self._kept: list[Ints] = []

    def fail(self, request: int, message: str, status: Status = Status.BAD) -> None:
        """The request as a whole cannot be read, or not be taken now."""
        self.errors.setdefault(request, Answer(status, message))

    def reject(self, requests: Ints, reason: Refusal, message: str) -> None:
        """So many points of these requests are not taken; a request is told the first reasons."""
        if not len(requests):
            return
        self.reasons[reason] += len(requests)
        np.add.at(self.rejected, requests, 1)
        for request in np.unique(requests).tolist():
            told = self.messages.setdefault(request, [])
            if len(told) < _MOST_MESSAGES and message not in told:
                told.append(message)

    def reject_one(self, request: int, reason: Refusal, message: str) -> None:
        """One point of this request is not taken: the same, without arrays."""
        self.reasons[reason] += 1
        self.rejected[request] += 1
        told = self.messages.setdefault(request, [])
        if len(told) < _MOST_MESSAGES:
            told.append(message)

    def keep(self, requests: Ints) -> None:
        """Points of these requests are taken, also if they add nothing to what is known."""
        self._kept.append(requests)

    @cached_property
    def taken(self) -> set[int]:
        """The requests of which points are taken. To be asked when all of them are decoded."""
        return set(np.unique(np.concatenate([*self._kept, np.zeros(0, np.int64)])).tolist())

    def answer(self, request: int) -> Answer:
        """What its sender is told once the rest is safe."""
        if request in self.errors:
            return self.errors[request]
        if self.rejected[request]:
            told, rejected = self.messages[request], int(self.rejected[request])
            return Answer(Status.TAKEN, "; ".join(told), rejected, tuple(told), request not in self.taken)
        return TAKEN


@dataclass(slots=True)
class Rows:
    """Points as columns: whose they are, when, how much; and of a distribution how many and what of them."""

    requests: Ints
    streams: Ints
    times: Ints  # nanoseconds since the epoch
    values: NDArray[np.float64]
    states: dict[str, NDArray[Any]] = field(default_factory=dict)

    def take(self, rows: Any) -> "Rows":
        states = {name: column[rows] for name, column in self.states.items()}
        return Rows(self.requests[rows], self.streams[rows], self.times[rows], self.values[rows], states)


@dataclass(slots=True)
class Group:
    """Requests that are decoded together."""

    table: SeriesTable
    account: Account
    now: float  # seconds of the monotonic clock
    latest: int  # nanoseconds since the epoch: what is later is refused
    undos: list[Callable[[], None]] = field(default_factory=list)
    """What takes the increments of cumulative streams back."""
    settled: Container[int] = ()
    """Requests that came from another process, which found that we keep all of their streams."""
    elsewhere: Elsewhere = field(default_factory=Elsewhere)

    def streams_of(
        self, namespaces: list[Namespace], which: Ints, keys: Any, requests: Ints, bounds: Ints | None = None
    ) -> Ints:
        """The stream of each point, below 0 for those that were rejected; `bounds` as `SeriesTable.resolve`."""
        streams, refusals = self.table.resolve(namespaces, which, keys, self.now, bounds)
        for number, refused in enumerate(refusals, 1):
            self.account.reject(requests[streams == -number], refused.reason, str(refused))
        return streams

    def goes_to(self, home: int, request: int, homes: Homes) -> bool:
        """Whether something of that request is for another process; the request fails if that one is not there."""
        if home == homes.own or request in self.settled:
            return False
        if home in homes.down:
            message = f"process {home} keeps a stream of this and is not there: send it again"
            self.account.fail(request, message, Status.BROKEN)
        return True
