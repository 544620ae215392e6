"""What the decoding of one group of requests reads and writes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.decode.column_scan import Ints
from penstock.decode.outcome import RequestOutcomes, Status
from penstock.decode.series import Namespace, Resolved, SeriesTable
from penstock.decode.stream_owners import HandoverParts


@dataclass(slots=True)
class DecodeContext:
    """The shared state of one group: the streams, how its requests fare, what other processes get of it."""

    table: SeriesTable
    outcomes: RequestOutcomes
    now: float  # seconds of the monotonic clock
    latest: int  # nanoseconds since the epoch: later points are refused
    parts: HandoverParts | None = None
    """Where several processes receive: the parts of the group that others keep."""
    undos: list[Callable[[], None]] = field(default_factory=list)
    """Each takes the increments of some cumulative streams back."""

    def resolve(
        self, namespaces: list[Namespace], space: Ints, keys: Any, requests: Ints, bounds: Ints | None = None
    ) -> Resolved:
        """Looks up the stream of each point as `SeriesTable.resolve` does, and records the refusals."""
        resolved = self.table.resolve(namespaces, space, keys, self.now, bounds)
        for rows, refused in resolved.refused:
            self.outcomes.reject(requests[rows], refused.reason, str(refused))
        return resolved

    def is_foreign(self, owner: int, request: int) -> bool:
        """Says whether another process gets that part of a request; the request fails if that process is away."""
        if self.parts is None or not self.parts.is_foreign(owner, request):
            return False
        if owner in self.parts.owners.unreachable:
            message = f"process {owner} keeps a stream of this and is not there: send it again"
            self.outcomes.fail(request, message, Status.BROKEN)
        return True
