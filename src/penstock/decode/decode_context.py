"""What the decoding of one group of requests reads and writes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.decode.column_scan import Ints
from penstock.decode.outcome import MAX_REASONS, TAKEN, DecodeAnswer, DecodeStatus, PointRefusal
from penstock.decode.series import KnownSeries, ResolvedStreams, SeriesNamespace
from penstock.decode.stream_owners import StreamHandoverParts


class DecodeOutcomes:
    """What became of the requests of one group, by their numbers in it."""

    def __init__(self, requests: int) -> None:
        self.errors: dict[int, DecodeAnswer] = {}  # of requests of which nothing can be taken
        self.reasons: Counter[PointRefusal] = Counter()
        self.examples: dict[PointRefusal, tuple[int, str]] = {}  # a request and what was wrong, for each reason
        self.rejected = np.zeros(requests, np.int64)
        self.messages: dict[int, list[str]] = {}
        self.untimed: set[int] = set()  # requests with events that have no time of their own
        self.overflowed: tuple[int, int, str] | None = None  # a request, how many points, and of which metric
        self._taken: list[Ints] = []

    def fail(self, request: int, message: str, status: DecodeStatus = DecodeStatus.BAD) -> None:
        """Records that the request as a whole cannot be read, or cannot be taken now."""
        self.errors.setdefault(request, DecodeAnswer(status, message))

    def reject(self, requests: Ints, reason: PointRefusal, message: str) -> None:
        """Records a refused point of each of these requests; an answer names the first few reasons."""
        if not len(requests):
            return
        self.reasons[reason] += len(requests)
        self.examples.setdefault(reason, (int(requests[0]), message))
        np.add.at(self.rejected, requests, 1)
        for request in np.unique(requests).tolist():
            self._add_message(request, message)

    def warn(self, requests: Ints, message: str) -> None:
        """Records that points of these requests are taken, but not as they were sent; an answer says so."""
        self.overflowed = (int(requests[0]), len(requests), message)
        for request in np.unique(requests).tolist():
            self._add_message(request, message)

    def reject_one(self, request: int, reason: PointRefusal, message: str) -> None:
        """Records one refused point, without arrays."""
        self.reasons[reason] += 1
        self.examples.setdefault(reason, (request, message))
        self.rejected[request] += 1
        self._add_message(request, message)

    def _add_message(self, request: int, message: str) -> None:
        messages = self.messages.setdefault(request, [])
        if len(messages) < MAX_REASONS and message not in messages:
            messages.append(message)

    def take(self, requests: Ints) -> None:
        """Records that points of these requests are taken, also if they add nothing to what is known."""
        self._taken.append(requests)

    @cached_property
    def taken(self) -> set[int]:
        """The requests of which points are taken. Valid once all of them are decoded."""
        return set(np.unique(np.concatenate([*self._taken, np.zeros(0, np.int64)])).tolist())

    def answer(self, request: int) -> DecodeAnswer:
        """Returns the answer to a request once the rest of it is safe."""
        if request in self.errors:
            return self.errors[request]
        if self.rejected[request] or request in self.messages:
            messages, rejected = self.messages[request], int(self.rejected[request])
            is_useless = rejected > 0 and request not in self.taken
            return DecodeAnswer(DecodeStatus.TAKEN, "; ".join(messages), rejected, tuple(messages), is_useless)
        return TAKEN


@dataclass(slots=True)
class DecodeContext:
    """The shared state of one group: the streams, the outcomes of its requests, the parts that other processes own."""

    table: KnownSeries
    outcomes: DecodeOutcomes
    now: float  # seconds of the monotonic clock
    latest: int  # nanoseconds since the epoch: later points are refused
    parts: StreamHandoverParts | None = None
    """Where several processes receive: the parts of the group that others own."""
    senders: Sequence[str] = ()
    """The sender of each request; none where they are not known."""
    undos: list[Callable[[], None]] = field(default_factory=list)
    """Each takes the increments of some cumulative streams back."""

    def resolve(self, namespaces: list[SeriesNamespace], space: Ints, keys: Any, requests: Ints) -> ResolvedStreams:
        """Looks up the stream of each point as `KnownSeries.resolve` does, and records the refusals."""
        resolved = self.table.resolve(namespaces, space, keys, self.now, requests, self.senders)
        for rows, refused in resolved.refused:
            self.outcomes.reject(requests[rows], refused.reason, str(refused))
        if resolved.overflowed is not None:
            rows, message = resolved.overflowed
            self.outcomes.warn(requests[rows], message)
        return resolved

    def is_foreign(self, owner: int, request: int) -> bool:
        """Says whether another process gets that part of a request; the request fails if that process is away."""
        if self.parts is None or not self.parts.is_foreign(owner, request):
            return False
        if owner in self.parts.owners.unreachable:
            message = f"process {owner} keeps a stream of this and is not there: send it again"
            self.outcomes.fail(request, message, DecodeStatus.BROKEN)
        return True
