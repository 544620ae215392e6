"""The latest time that any cumulative stream has sent, by the senders' own clocks, kept over a `kill -9`.

streams.seen, streams.seen.1 …     one for each process: nanoseconds since 1970, 20 digits, written over in place

A sender's clock may be ahead of ours. Its streams then seem to have begun after our start, though an earlier run has
counted them. One that began later than everything that earlier runs have seen is new by any clock.
"""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)
_MARGIN = 10**9  # nanoseconds: what is kept is up to a second ahead of what was seen, and so is written once a second
_DIGITS = 20


class SeenTimes:
    """Keeps an upper bound of the times seen. What `note` has returned from survives the process.

    Threads: one at a time.
    """

    def __init__(self, path: Path) -> None:
        others = path.parent.glob(f"{path.name.split('.')[0]}.seen*") if path.parent.is_dir() else ()
        self.earlier = max((_read(one) for one in others), default=0)  # of all processes of the runs before
        self._path = path
        self._bound = 0
        self._is_failing = False

    def note(self, latest: int) -> None:
        """Record that a point of that time is about to be counted."""
        if latest <= self._bound:
            return
        bound = latest + _MARGIN
        try:
            self._write(max(bound, self.earlier))
        except OSError as error:
            if not self._is_failing:
                log.warning("Times of cumulative streams cannot be kept over a kill. reason=%s", error)
            self._is_failing = True
            return
        self._bound, self._is_failing = bound, False

    def _write(self, time: int) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, b"%0*d" % (_DIGITS, time), 0)  # at once: a kill leaves the old number or the new one
        finally:
            os.close(file)


def _read(path: Path) -> int:
    try:
        return int(path.read_bytes() or b"0")
    except (OSError, ValueError):
        return 0
