"""A limit of blocks that follows their mean size, so that the limit of bytes is the one that counts."""

_EVERY = 100  # blocks between two updates of the limit: a mean of fewer says nothing
_MEMORY = 10_000  # blocks that the mean covers, roughly


class AdaptiveLimit:
    """Computes how many blocks of the mean size fill `target` of `max_bytes`.

    Threads: written by pushers without a lock: a mean that misses one of a hundred blocks is as good.
    """

    __slots__ = ("_blocks", "_bytes", "_room")

    def __init__(self, max_bytes: int, target: float) -> None:
        self._room = max_bytes * target
        self._blocks = 0
        self._bytes = 0

    def record(self, length: int) -> int | None:
        """Count a block. Returns the new limit with every hundredth block, else None."""
        self._blocks += 1
        self._bytes += length
        if self._blocks % _EVERY or not self._bytes:
            return None
        limit = max(1, int(self._room * self._blocks / self._bytes))
        if self._blocks >= _MEMORY:
            self._blocks //= 2
            self._bytes //= 2
        return limit
