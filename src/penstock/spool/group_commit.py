"""Group commit: pushes that come while a sync is running share the next one, and the write before it."""

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial


class StagedBlocks:
    """Blocks that have their sequences and are written together, at the latest when their round's sync begins."""

    __slots__ = ("at", "blocks", "bytes", "error")

    def __init__(self, at: float) -> None:
        self.at = at
        self.blocks: list[bytes] = []
        self.bytes = 0
        self.error: OSError | None = None  # they were not written, none of them


class SyncRound:
    """The pushes whose frames one sync brings to the disk, and the round that gathers while it runs."""

    __slots__ = ("_waiting", "error", "finished", "following", "waiters_by_loop")

    def __init__(self) -> None:
        self.finished = False
        self.error: OSError | None = None
        self.following: SyncRound | None = None
        self._waiting: list[threading.Lock] = []
        # Each list belongs to its event loop: only that loop's thread touches it.
        self.waiters_by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add_waiter(self) -> threading.Lock:
        """Returns a lock that is released when the round is over, or when the waiting thread has to lead it."""
        turn = threading.Lock()
        turn.acquire()
        self._waiting.append(turn)
        return turn

    def next_leader(self) -> "threading.Lock | None":
        return self._waiting.pop() if self._waiting else None

    def release(self) -> None:
        for turn in self._waiting:
            turn.release()


class GroupCommit:
    """Lets one of the waiting threads sync for all of them.

    `sync` closes the round that it is given, which is the gathering one: it sets its `following` first, then brings
    to the disk what was pushed until then. Every thread waits on a lock of its own: a condition would wake those of
    the next round as well, and waking a thread is what costs here.
    """

    def __init__(self, sync: Callable[[SyncRound], None]) -> None:
        self._sync = sync  # called without a lock
        # _lock guards everything below, and the rounds.
        self._lock = threading.Lock()
        self._syncing = False

    def wait(self, mine: SyncRound) -> None:
        """Return when `mine` is on the disk; raise the OSError that prevented it."""
        with self._lock:
            turn = mine.add_waiter() if self._syncing and not mine.finished else None
            if turn is None and not mine.finished:
                self._syncing = True
        if turn is not None:
            turn.acquire()
        if not mine.finished:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error

    def wait_async(self, executor: Executor, mine: SyncRound) -> "asyncio.Future[None]":
        """`wait` for a coroutine: returns a future of its own. An event loop needs one thread a round."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if (waiting := mine.waiters_by_loop.get(loop)) is None:
            waiting = mine.waiters_by_loop[loop] = []
            try:
                running = loop.run_in_executor(executor, self.wait, mine)
            except RuntimeError:  # the queue was closed since, and closing it has ended the round
                running = loop.create_future()
                if mine.error is None:
                    running.set_result(None)
                else:
                    running.set_exception(mine.error)
            running.add_done_callback(partial(_pass_outcome_on, waiting))
        waiting.append(future)
        return future

    def _lead(self, mine: SyncRound) -> None:
        try:
            self._sync(mine)
        except OSError as error:
            mine.error = error
        except BaseException:
            # Control-C in the leader: it leaves, but no other thread may believe that the sync was done.
            mine.error = OSError(errno.EINTR, "the sync was interrupted")
            raise
        finally:
            with self._lock:
                mine.finished = mine.following is not None
                leader = (mine.following or mine).next_leader()  # of `mine`, if interrupted before it was closed
                self._syncing = leader is not None
            if leader is not None:
                leader.release()  # first: its sync can run while the others wake
            if mine.finished:
                mine.release()


def _pass_outcome_on(waiting: "list[asyncio.Future[None]]", done: "asyncio.Future[None]") -> None:
    """Give the round's outcome to every future that is not cancelled."""
    error = done.exception()
    for future in waiting:
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
