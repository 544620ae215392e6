"""What a process does to the queues that it has open: a normal end closes them, a fork leaves them to the parent."""

import atexit
import logging
import os
import weakref
from typing import Protocol

log = logging.getLogger(__name__)


class OpenSpool(Protocol):
    path: str

    def close(self) -> None: ...

    def leave_to_parent(self, parent: int) -> None: ...


_open: "weakref.WeakSet[OpenSpool]" = weakref.WeakSet()
_pid = os.getpid()


def register_open_spool(queue: OpenSpool) -> None:
    """Close the queue when the interpreter ends, unless it was closed before; take it from every forked child."""
    _open.add(queue)


def unregister_open_spool(queue: OpenSpool) -> None:
    _open.discard(queue)


def _in_child() -> None:
    """Two processes that write one log would destroy it, and a lock's holder may not exist in this one."""
    global _pid
    parent, _pid = _pid, os.getpid()
    for queue in list(_open):
        queue.leave_to_parent(parent)
    _open.clear()


def _at_exit() -> None:
    for queue in list(_open):
        try:
            queue.close()
        except Exception as error:  # noqa: BLE001 - the others still have to be closed
            log.warning("Queue could not be closed at exit. queue=%s error=%s", queue.path, error)


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
