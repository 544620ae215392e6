"""Group commit: pushers that come while a sync is running share the next one."""

import threading
from collections.abc import Callable


class Round:
    """The pushers whose frames one sync brings to the disk."""

    __slots__ = ("error", "finished")

    def __init__(self) -> None:
        self.finished = False
        self.error: OSError | None = None


class GroupCommit:
    """Lets one of the waiting pushers sync for all of them.

    `begin` is called when a sync starts; it returns the round that this sync is for and what does the syncing.
    """

    def __init__(self, begin: Callable[[], tuple[Round, Callable[[], None]]]) -> None:
        self._begin = begin
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)
        self._syncing = False

    def wait(self, mine: Round) -> None:
        """Return when `mine` is on the disk; raise the OSError that prevented it."""
        with self._lock:
            while self._syncing and not mine.finished:
                self._finished.wait()
            if mine.finished:
                if mine.error is not None:
                    raise mine.error
                return
            self._syncing = True
        current, sync = self._begin()
        try:
            sync()
        except OSError as error:
            current.error = error
        finally:
            with self._lock:
                self._syncing = False
                current.finished = True
                self._finished.notify_all()
        if mine.error is not None:
            raise mine.error
