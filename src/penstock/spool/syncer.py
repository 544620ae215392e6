"""What brings a queue to the disk: group commit of the log, the meta file, and the one thread that does it in time."""

import asyncio
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from penstock.spool.acked import Acked
from penstock.spool.backlog import Backlog
from penstock.spool.files import DISK_FULL, Files
from penstock.spool.group_commit import GroupCommit, Round, Staged

log = logging.getLogger(__name__)


class Keeper:
    """Syncs one queue. `lock` is the queue's.

    Threads: every method may be called from any thread that does not hold the queue's lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        backlog: Backlog,
        files: Files,
        stale_flush: float,
        now: float,
        on_written: Callable[[int], None],
    ) -> None:
        self._lock = lock
        self._stale_flush = stale_flush
        self._kept_at = now
        self._ages: deque[tuple[float, int]] = deque()  # (time, sequence): blocks below it were there at that time
        self._backlog = backlog
        self._files = files
        self._on_written = on_written  # called with the queue's lock held
        self.gathering = Round()  # guarded by the queue's lock: who writes now, waits for this round
        self._staged: Staged | None = None  # guarded by the queue's lock: the youngest blocks of all, not written yet
        self._commit = GroupCommit(self._sync_round)
        self._syncers = ThreadPoolExecutor(2, "penstock-spool-sync")  # for coroutines; no thread until one waits
        self._one_meta_at_a_time = threading.Lock()  # taken before the queue's
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0
        self._failing = False

    def start(self, name: str, interval: float, work: Callable[[], None]) -> None:
        """Do `work` every `interval` seconds until `close`."""

        def run() -> None:
            while not self._stop.wait(interval):
                try:
                    work()
                except Exception:
                    if not self._failing:
                        self._failing = True
                        log.exception("Queue cannot be kept, for a reason that is not the disk's. queue=%s", name)

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._syncers.shutdown(wait=False)
        if self._thread is not None:
            self._thread.join()

    def stage(self, batch: Sequence[bytes], length: int, now: float) -> tuple[int, Staged, Round]:
        """Take the blocks in, to be written with those of others who come before the next sync.

        Their first sequence, what says whether they could be written, and the round to wait for. Wants the queue's
        lock held. Nobody waits longer for it: a write would go to the page cache, and the sync is what is waited for.
        """
        staged = self._staged
        if staged is None:
            staged = self._staged = Staged(self._backlog.next_sequence, now)
            self._backlog.store.changed = True
        return self._backlog.stage(staged, batch, length), staged, self.gathering

    def write_staged(self) -> None:
        """Write what is staged. Those who wait for it are told if that fails. Wants the queue's lock held."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            self._backlog.write_staged(staged)
        except OSError as error:
            staged.error = error
        except BaseException:
            staged.error = OSError(errno.EINTR, "the write was interrupted")
            raise
        else:
            self._on_written(len(staged.blocks))

    def wait_for(self, gathering: Round) -> None:
        """Return when what was written while `gathering` gathered is on the disk; OSError if it cannot be."""
        self._commit.wait(gathering)

    def wait_for_async(self, gathering: Round) -> "asyncio.Future[None]":
        """`wait_for` for a coroutine."""
        return self._commit.wait_in(self._syncers, gathering)

    def spill_stale(self, now: float) -> None:
        """Move the memory layer into the log if any of it is older than `stale_flush`. Raises OSError.

        By the monotonic clock: whoever sets the time of day must not keep blocks in memory.
        """
        backlog, ages = self._backlog, self._ages
        try:
            with self._lock:
                ages.append((self._kept_at, backlog.next_sequence))  # what came since is younger than that
                self._kept_at = now
                while ages and not (backlog.memory and backlog.memory[0].sequence < ages[0][1]):
                    ages.popleft()
                if ages and now - ages[0][0] >= self._stale_flush:
                    backlog.spill()
        except OSError as error:
            self._has_given_back(error)
            raise

    def sync(self, *, clean: bool = False, is_disk_full: bool = False) -> None:
        """Write the meta if anything has changed; then delete the chunks that it does not need. Raises OSError."""
        while (error := self._write_meta(clean, is_disk_full)) is not None:
            if not self._has_given_back(error):
                raise error
            # Again, at once: until there is a meta, a kill takes the chunks that have just gone for lost ones.

    def _write_meta(self, clean: bool, is_disk_full: bool) -> OSError | None:
        """What kept the meta from being written; raises what kept the log from being synced."""
        backlog, store = self._backlog, self._backlog.store
        with self._one_meta_at_a_time:
            with self._lock:
                if not store.changed and not clean:
                    return None
                self.write_staged()  # the meta speaks of the log alone
                snapshot = backlog.snapshot(clean=clean)
                gathering = self.gathering
            try:
                self._commit.wait(gathering)  # else the meta might survive a power cut that its frames did not
            except OSError as error:
                self._has_given_back(error)
                raise
            try:
                store.write_meta(snapshot)
            except OSError as error:
                if clean and store.says_closed():  # only its name could not be synced: it has no sequences to spare
                    with self._lock:
                        backlog.sequence_limit = backlog.next_sequence
                return error
            acked = Acked(snapshot.low, snapshot.acked)
            with self._lock:
                backlog.sequence_limit = snapshot.next_sequence
                store.reclaim(acked, is_disk_full=is_disk_full)
                gone = store.chunks.take_gone()
            self._close(gone)
            if self._failing:
                self._failing = False
                log.warning("Queue syncs again. queue=%s", store.folder)
        return None

    def make_room(self) -> None:
        """Give back all that is done with, the last chunk too, and have a meta that says so."""
        with suppress(OSError):
            self.sync(is_disk_full=True)

    def _has_given_back(self, error: OSError) -> bool:
        """The disk has failed. If it is full, give back what is done with; whether that was anything."""
        store = self._backlog.store
        self.failures += 1
        if not self._failing:
            self._failing = True
            log.warning("Queue cannot sync. queue=%s error=%s", store.folder, error)
        with self._lock:
            store.changed, before = True, store.chunks.size_bytes
            if error.errno in DISK_FULL:
                # Without the meta that says so: the room for that meta has to come from somewhere.
                store.reclaim(store.acked, is_disk_full=True)
            gone = store.chunks.take_gone()
            has_shrunk = store.chunks.size_bytes < before
        self._close(gone)
        return has_shrunk

    def _close(self, handles: list[int]) -> None:
        for handle in handles:
            with suppress(OSError):
                self._files.close(handle)

    def _sync_round(self, current: Round) -> None:
        """Close the gathering round, write what is staged, and sync all that was written until then."""
        with self._lock:
            current.following = self.gathering = Round()
            self.write_staged()
            chunks = self._backlog.store.chunks
            dirty, names_changed = chunks.take_dirty()
        failures: list[OSError] = []
        try:
            for chunk in dirty:  # all of them: the failure of one is no reason to forget the others
                with collected(failures):
                    self._files.sync(chunk.handle)
            if names_changed:
                with collected(failures):
                    self._files.sync_folder(self._backlog.store.folder)
        except BaseException:
            with self._lock:
                chunks.not_synced(dirty)
            raise
        finally:
            with self._lock:
                chunks.synced(dirty)
                if failures:
                    # The kernel has given up on those pages; another sync of this file would claim success.
                    chunks.begin_chunk()
                gone = chunks.take_gone()
            self._close(gone)
        if failures:
            raise failures[0]


@contextmanager
def collected(failures: list[OSError]) -> Iterator[None]:
    """Put an OSError aside until the rest is done."""
    try:
        yield
    except OSError as error:
        failures.append(error)
