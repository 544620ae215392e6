"""What a process knows of requests that came before it began: from the table that is left, and from its segments."""

import logging
import os
from pathlib import Path

from penstock.clock import Clock
from penstock.model.segment import requests_of_segment, sealed
from penstock.receive.recent_requests import DIGEST, RecentRequests

log = logging.getLogger(__name__)
_NEWEST = 100  # segments that are asked whatever time they have: the clock may have been set since


def restore_recent_requests(recent: RecentRequests, folder: Path, writer: str, window: float, clock: Clock) -> int:
    """Let requests be known that are in the segments of a writer, those of the last `window` seconds; how many."""
    if not folder.is_dir():
        return 0
    paths = [folder / one.name for one in sealed(folder) if one.writer == writer]
    newest = set(paths[-_NEWEST:])
    return sum(_restore(recent, path, window, clock, is_newest=path in newest) for path in paths)


def _restore(recent: RecentRequests, path: Path, window: float, clock: Clock, *, is_newest: bool) -> int:
    try:
        age = clock.time() - os.stat(path).st_mtime
        if abs(age) > window and not is_newest:
            return 0
        age = age if 0.0 <= age <= window else 0.0
        packed = requests_of_segment(path)
    except (OSError, ValueError) as error:  # gone, or damaged: the job sets it aside
        log.warning("A segment cannot say which requests it has. segment=%s reason=%s", path.name, error)
        return 0
    digests = [packed[at : at + DIGEST] for at in range(0, len(packed), DIGEST)]
    recent.restore(digests, max(0.0, clock.monotonic() - age))
    return len(digests)
