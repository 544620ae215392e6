"""To the terminal: one line per batch, to see what flows."""

import sys
import threading
from typing import IO, Literal

from penstock.errors import ConfigError
from penstock.export.exporter import PartialSuccess, Prepared

_SHOWN = 64  # bytes of a batch that a line shows


class ConsoleExporter:
    """Writes a line per batch to `stream` (standard output): its number, its size, how it begins.

    `style="text"` writes the batch itself as a line instead, for batches that are text.
    Threads: every method may be called from any thread; lines are whole.
    """

    in_order = False

    def __init__(self, stream: IO[str] | None = None, *, style: Literal["summary", "text"] = "summary") -> None:
        if style not in ("summary", "text"):
            raise ConfigError(f"style must be one of summary, text, got {style!r}")
        self._stream = stream
        self._style = style
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._count = 0
        self.is_broken = False
        """Whether the reader of the stream has gone away: it will not come back."""

    def prepare(self, batch: bytes) -> Prepared:
        return Prepared(batch)

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        body = prepared.body
        stream = self._stream or sys.stdout
        with self._lock:
            self._count += 1
            if self._style == "text":
                line = body.decode("utf-8", "replace")
            else:
                more = "…" if len(body) > _SHOWN else ""
                line = f"batch {self._count}: {len(body)} bytes {ascii(body[:_SHOWN])[1:]}{more}"
            try:
                stream.write(line + "\n")
                stream.flush()
            except BrokenPipeError:
                self.is_broken = True
                raise
        return None

    def split(self, batch: bytes) -> list[bytes] | None:
        return None

    def close(self) -> None: ...
