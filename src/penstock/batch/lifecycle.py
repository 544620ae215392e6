"""What happens to live queues when the process forks or ends."""

import atexit
import os
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batch.queue import BatchQueue

LIVE_QUEUES: "weakref.WeakSet[BatchQueue]" = weakref.WeakSet()
"""Every queue that has not finished closing."""


def close_all_at_exit() -> None:
    """Have what is held consumed before the drain threads are frozen; all queues at once, each within its timeout."""
    queues = list(LIVE_QUEUES)
    for queue in queues:
        queue.stop_accepting()
    started = time.monotonic()
    for queue in queues:
        queue.close(max(0.0, started + queue.config.shutdown_timeout - time.monotonic()))


def _reset_in_child() -> None:
    for queue in list(LIVE_QUEUES):
        queue.reset_after_fork()


atexit.register(close_all_at_exit)
os.register_at_fork(after_in_child=_reset_in_child)
