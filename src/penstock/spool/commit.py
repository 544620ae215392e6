"""Group commit: pushers that come while a sync is running share the next one."""

import errno
import threading
from collections.abc import Callable


class Round:
    """The pushers whose frames one sync brings to the disk, and the round that gathers while it runs."""

    __slots__ = ("_waiting", "error", "finished", "following")

    def __init__(self) -> None:
        self.finished = False
        self.error: OSError | None = None
        self.following: Round | None = None
        self._waiting: list[threading.Lock] = []

    def join(self) -> threading.Lock:
        """A lock that is released when the round is over, or when its holder has to lead it."""
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        return gate

    def heir(self) -> "threading.Lock | None":
        return self._waiting.pop() if self._waiting else None

    def release(self) -> None:
        for gate in self._waiting:
            gate.release()


class GroupCommit:
    """Lets one of the waiting pushers sync for all of them.

    `begin` is called when a sync starts: it closes the gathering round, opens the `following` one, and returns the
    closed one with what does the syncing. Every pusher waits on a lock of its own: a condition would wake those of
    the next round as well, and waking a thread is what costs here.
    """

    def __init__(self, begin: Callable[[], tuple[Round, Callable[[], None]]]) -> None:
        self._begin = begin
        # _lock guards everything below, and the rounds.
        self._lock = threading.Lock()
        self._syncing = False

    def wait(self, mine: Round) -> None:
        """Return when `mine` is on the disk; raise the OSError that prevented it."""
        with self._lock:
            gate = mine.join() if self._syncing and not mine.finished else None
            if gate is None and not mine.finished:
                self._syncing = True
        if gate is not None:
            gate.acquire()
        if not mine.finished:
            self._lead()
        if mine.error is not None:
            raise mine.error

    def _lead(self) -> None:
        current, sync = self._begin()
        try:
            sync()
        except OSError as error:
            current.error = error
        except BaseException:
            # Control-C in the leader: it leaves, but nobody else may believe that the sync was done.
            current.error = OSError(errno.EINTR, "the sync was interrupted")
            raise
        finally:
            with self._lock:
                current.finished = True
                heir = current.following.heir() if current.following else None
                self._syncing = heir is not None
            if heir is not None:
                heir.release()  # first: its sync can run while the others wake
            current.release()
