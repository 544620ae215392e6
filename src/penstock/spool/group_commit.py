"""Group commit: pushers that come while a sync is running share the next one, and the write before it."""

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial


class Staged:
    """Blocks that have their sequences and are written together, at the latest when their round's sync begins."""

    __slots__ = ("at", "blocks", "bytes", "error", "first")

    def __init__(self, first: int, at: float) -> None:
        self.first = first
        self.at = at
        self.blocks: list[bytes] = []
        self.bytes = 0
        self.error: OSError | None = None  # they were not written, none of them


class Round:
    """The pushers whose frames one sync brings to the disk, and the round that gathers while it runs."""

    __slots__ = ("_waiting", "error", "finished", "following", "in_loops")

    def __init__(self) -> None:
        self.finished = False
        self.error: OSError | None = None
        self.following: Round | None = None
        self._waiting: list[threading.Lock] = []
        self.in_loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}  # each is its loop's alone

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

    `sync` closes the round that it is given, which is the gathering one: it sets its `following` first, then brings
    to the disk what was pushed until then. Every pusher waits on a lock of its own: a condition would wake those of
    the next round as well, and waking a thread is what costs here.
    """

    def __init__(self, sync: Callable[[Round], None]) -> None:
        self._sync = sync
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
            self._lead(mine)
        if mine.error is not None:
            raise mine.error

    def wait_in(self, executor: Executor, mine: Round) -> "asyncio.Future[None]":
        """`wait` for a coroutine: a future that is its own to await or to cancel. Its loop needs one thread a round."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if (waiting := mine.in_loops.get(loop)) is None:
            waiting = mine.in_loops[loop] = []
            try:
                running = loop.run_in_executor(executor, self.wait, mine)
            except RuntimeError:  # the queue was closed since, and closing it has ended the round
                running = loop.create_future()
                if mine.error is None:
                    running.set_result(None)
                else:
                    running.set_exception(mine.error)
            running.add_done_callback(partial(_settle, waiting))
        waiting.append(future)
        return future

    def _lead(self, mine: Round) -> None:
        try:
            self._sync(mine)
        except OSError as error:
            mine.error = error
        except BaseException:
            # Control-C in the leader: it leaves, but nobody else may believe that the sync was done.
            mine.error = OSError(errno.EINTR, "the sync was interrupted")
            raise
        finally:
            with self._lock:
                mine.finished = mine.following is not None
                heir = (mine.following or mine).heir()  # of `mine`, if it was interrupted before it was closed
                self._syncing = heir is not None
            if heir is not None:
                heir.release()  # first: its sync can run while the others wake
            if mine.finished:
                mine.release()


def _settle(waiting: "list[asyncio.Future[None]]", done: "asyncio.Future[None]") -> None:
    """Tell all of them how the round ended, but those who were cancelled."""
    error = done.exception()
    for future in waiting:
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
