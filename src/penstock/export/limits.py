"""A limit of blocks that follows their mean size, so that the limit of bytes is the one that counts."""

SETTLED = 100  # blocks before their mean is worth anything
_MEMORY = 10_000  # blocks that the mean looks back on, roughly


class AdaptiveLimit:
    """How many blocks of the size seen so far fill `target` of `max_bytes`.

    Threads: written by pushers without a lock: a mean that misses one of a hundred blocks is as good.
    """

    __slots__ = ("_blocks", "_bytes", "_max_size", "_room")

    def __init__(self, max_size: int, max_bytes: int, target: float) -> None:
        self._max_size = max_size
        self._room = max_bytes * target
        self._blocks = 0
        self._bytes = 0

    def seen(self, length: int) -> None:
        self._blocks += 1
        self._bytes += length
        if self._blocks >= _MEMORY:
            self._blocks //= 2
            self._bytes //= 2

    @property
    def blocks(self) -> int:
        """The limit now: `max_size` until enough blocks have been seen."""
        if self._blocks < SETTLED or not self._bytes:
            return self._max_size
        return max(1, int(self._room * self._blocks / self._bytes))
