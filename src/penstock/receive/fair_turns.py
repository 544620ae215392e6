"""The order in which requests are decoded: fair turns between senders.

Each sender's share is what the senders have had decoded on average, in bytes. A request's turn is where its sender
stands when the request comes; the lowest turn is next. A sender that has had more than its share waits until the others
have caught up, and one that has been silent saves nothing.
"""

import heapq
from collections.abc import Hashable, Sequence

from penstock.receive.request_group import ReceivedRequest


class FairRequestTurns:
    """Requests that wait to be decoded. Those of one sender keep their order, as do those of other processes.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, ReceivedRequest]] = []  # a heap
        self._added = 0
        self._share = 0.0  # decoded bytes of a sender that had neither more nor less than its share
        self._had: dict[Hashable, float] = {}  # of those that had more

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: ReceivedRequest) -> None:
        turn = self._share
        if not request.is_from_peer:
            turn = max(turn, self._had.get(request.turns_of, 0.0))
            self._had[request.turns_of] = turn + len(request.body)
        self._added += 1
        request.turn = (turn, self._added)
        self.put_back(request)

    def put_back(self, request: ReceivedRequest) -> None:
        """Lets a request wait again that has had its turn."""
        heapq.heappush(self._waiting, (*request.turn, request))

    def next(self) -> ReceivedRequest:
        """Returns the request whose turn it is, which stays."""
        return self._waiting[0][2]

    def pop(self) -> ReceivedRequest:
        turn, _, request = heapq.heappop(self._waiting)
        self._share = max(self._share, turn)
        return request

    def charge(self, decoded: Sequence[tuple[ReceivedRequest, int]]) -> None:
        """Counts the bytes that requests had once they were decompressed."""
        of_senders = [(request, size) for request, size in decoded if not request.is_from_peer]
        for request, size in of_senders:
            self._had[request.turns_of] = self._had.get(request.turns_of, self._share) + size - len(request.body)
        self._share += sum(size for _, size in of_senders) / max(1, len(self._had))
        self._had = {sender: had for sender, had in self._had.items() if had > self._share}
