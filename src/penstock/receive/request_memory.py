"""What a process knows of requests that came before it began: from the table that is left, and from its segments."""

import logging
import os
import time
from pathlib import Path

from penstock.model.segment import requests_of_segment, sealed
from penstock.receive.recent_requests import DIGEST, RecentRequests

log = logging.getLogger(__name__)


def restore_recent_requests(recent: RecentRequests, folder: Path, writer: str, window: float) -> int:
    """Let requests be known that are in the segments of a writer, those of the last `window` seconds; how many."""
    if not folder.is_dir():
        return 0
    return sum(_restore(recent, folder / one.name, window) for one in sealed(folder) if one.writer == writer)


def _restore(recent: RecentRequests, path: Path, window: float) -> int:
    try:
        sealed_at = os.stat(path).st_mtime
        if abs(time.time() - sealed_at) > window:
            return 0
        packed = requests_of_segment(path)
    except (OSError, ValueError) as error:  # gone, or damaged: the job sets it aside
        log.warning("A segment cannot say which requests it has. segment=%s reason=%s", path.name, error)
        return 0
    digests = [packed[at : at + DIGEST] for at in range(0, len(packed), DIGEST)]
    recent.restore(digests, sealed_at)
    return len(digests)
