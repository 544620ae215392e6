"""Which deliveries of one channel are settled, and how to tell the broker with the fewest frames.

Workers finish out of order. Everything below the oldest unsettled delivery can be acknowledged with one
`ack(tag, multiple=True)`; what is settled beyond it waits until the gap closes or is acknowledged singly, because a
delivery that is not acknowledged takes a place in the prefetch window.
"""


class AckTracker:
    """The settled deliveries of one channel. Does no I/O; one thread only."""

    __slots__ = ("_last", "_next", "_settled", "held")

    def __init__(self) -> None:
        self._next = 1  # the oldest tag that is not settled; a channel counts its deliveries from 1
        self._last = 0  # the newest tag that was delivered
        self._settled: dict[int, bool] = {}  # settled beyond _next: True if it still has to be acknowledged
        self.held = 0  # how many of _settled have to be acknowledged

    @property
    def outstanding(self) -> int:
        """How many deliveries are not settled yet."""
        return self._last - self._next + 1 - len(self._settled)

    def is_outstanding(self, tag: int) -> bool:
        return self._next <= tag <= self._last and tag not in self._settled

    def delivered(self, tag: int) -> None:
        """The broker sent `tag`. Tags that the client library swallowed in between count as settled by it."""
        if tag != self._last + 1:
            if tag <= self._last:
                raise ValueError(f"delivery tag {tag} came after {self._last}")
            for swallowed in range(self._last + 1, tag):
                self._settled[swallowed] = False
        self._last = tag

    def settle(self, tag: int, acknowledge: bool) -> None:
        """`tag` is done with: `acknowledge` it, or the caller has rejected it already.

        ValueError if it was never delivered or settled before: the broker closes the channel on such an ack.
        """
        if not self._next <= tag <= self._last or tag in self._settled:  # is_outstanding, without the call
            raise ValueError(f"delivery tag {tag} is not outstanding")
        self._settled[tag] = acknowledge
        if acknowledge:
            self.held += 1

    def take_prefix(self) -> int | None:
        """The tag to acknowledge with `multiple=True`, if any; its acknowledgement is then the caller's duty.

        It is itself a tag that has to be acknowledged: the broker knows no rejected tag any more, and refuses it.
        """
        newest = None
        oldest, settled = self._next, self._settled
        while (acknowledge := settled.pop(oldest, None)) is not None:
            if acknowledge:
                newest = oldest
                self.held -= 1
            oldest += 1
        self._next = oldest
        return newest

    def take_rest(self) -> list[int]:
        """The tags beyond the prefix that have to be acknowledged one by one; the caller does so now."""
        if not self.held:
            return []
        rest = sorted(tag for tag, acknowledge in self._settled.items() if acknowledge)
        for tag in rest:
            self._settled[tag] = False
        self.held = 0
        return rest
