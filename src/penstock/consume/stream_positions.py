"""Where a consumer is in a stream, so that it goes on there after a reconnect.

A stream keeps what was read; an ack is only credit for more. Within one process we resume after the last
acknowledged message; a new process begins where its arguments say (`x-stream-offset`).
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

OFFSET = "x-stream-offset"


class StreamPosition:
    """The offset to go on from. I/O thread only."""

    def __init__(self) -> None:
        self._resume: int | None = None
        self._delivered: deque[tuple[int, int]] = deque()  # tags and offsets not yet acknowledged

    def delivered(self, tag: int, headers: Mapping[str, Any]) -> None:
        offset = headers.get(OFFSET)
        if isinstance(offset, int):
            self._delivered.append((tag, offset))

    def acknowledged(self, tag: int) -> None:
        """Everything up to `tag` is done with."""
        while self._delivered and self._delivered[0][0] <= tag:
            self._resume = self._delivered.popleft()[1] + 1

    def lose(self) -> None:
        self._delivered.clear()

    def arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        return args if self._resume is None else {**args, OFFSET: self._resume}
