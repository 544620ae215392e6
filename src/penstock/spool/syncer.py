"""Brings a queue to the disk: group commit of the log, the meta file, and the thread that writes it in time."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from penstock.spool.disk_store import DiskStore
from penstock.spool.files import SpoolFiles
from penstock.spool.group_commit import GroupCommit, SyncRound
from penstock.spool.queue_state import SpoolState

log = logging.getLogger(__name__)


class Syncer:
    """Syncs one queue: on demand, and every `interval` in a thread of its own.

    Threads: every method may be called from any thread. No sync runs under the queue's lock.
    """

    def __init__(self, state: SpoolState, store: DiskStore, files: SpoolFiles) -> None:
        self._state = state
        self._store = store
        self._files = files
        self._commit = GroupCommit(self._sync_round)
        self._executor = ThreadPoolExecutor(2, "penstock-spool-sync")  # for coroutines; no thread until one waits
        self._one_meta_at_a_time = threading.Lock()  # taken before the queue's
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0
        self._failing = False

    def start(self, name: str, interval: float) -> None:
        """Call `run_once` every `interval` seconds until `close`."""

        def run() -> None:
            while not self._stop.wait(interval):
                try:
                    self.run_once()
                except Exception:
                    if not self._failing:
                        self._failing = True
                        log.exception("Queue cannot be kept, for a reason that is not the disk's. queue=%s", name)

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def run_once(self) -> None:
        """Spill what is stale, and sync."""
        try:
            self._state.spill_stale()
        except OSError as error:
            self._reclaim_after(error)
        with suppress(OSError):  # logged and counted; the next turn tries again. There may be room though no spill fits
            self.sync()

    def close(self) -> None:
        self._stop.set()
        self._executor.shutdown(wait=False)
        if self._thread is not None:
            self._thread.join()

    def wait_for(self, gathering: SyncRound) -> None:
        """Return when what was written while `gathering` gathered is on the disk; OSError if it cannot be."""
        self._commit.wait(gathering)

    def wait_for_async(self, gathering: SyncRound) -> "asyncio.Future[None]":
        """`wait_for` for a coroutine."""
        return self._commit.wait_async(self._executor, gathering)

    def sync(self, *, clean: bool = False, is_disk_full: bool = False) -> None:
        """Write the meta if anything has changed; then delete the chunks that it does not need. Raises OSError.

        With `is_disk_full` the last chunk is deleted, too, if all of it is done.
        """
        while (error := self._write_meta(clean, is_disk_full)) is not None:
            if not self._reclaim_after(error):
                raise error
            # Again, at once: until there is a meta, a kill takes the chunks that have just gone for lost ones.

    def free_last_chunk(self) -> bool:
        """Delete the last chunk if all of it is done: it may fill the disk. Returns whether that freed room."""
        before = self._store.chunks.size_bytes
        with suppress(OSError):
            self.sync(is_disk_full=True)
        return self._store.chunks.size_bytes < before

    def _write_meta(self, clean: bool, is_disk_full: bool) -> OSError | None:
        """Returns the error of writing the meta, None if it is written. Raises the error of syncing the log."""
        with self._one_meta_at_a_time:
            begun = self._state.begin_meta(clean=clean)
            if begun is None:
                return None
            meta, gathering = begun
            try:
                self._commit.wait(gathering)  # else the meta might survive a power cut that its frames did not
            except OSError as error:
                self._reclaim_after(error)
                raise
            try:
                self._store.write_meta(meta)
            except OSError as error:
                if clean and self._store.is_marked_closed():
                    self._state.forget_reserved_sequences()
                return error
            self._close(self._state.end_meta(meta, is_disk_full=is_disk_full))
            if self._failing:
                self._failing = False
                log.warning("Queue syncs again. queue=%s", self._store.folder)
        return None

    def _reclaim_after(self, error: OSError) -> bool:
        """Log the failure. If the disk is full, delete the chunks that are done; returns whether there were any."""
        self.failures += 1
        if not self._failing:
            self._failing = True
            log.warning("Queue cannot sync. queue=%s error=%s", self._store.folder, error)
        has_shrunk, gone = self._state.reclaim_after(error)
        self._close(gone)
        return has_shrunk

    def _close(self, handles: list[int]) -> None:
        for handle in handles:
            with suppress(OSError):
                self._files.close(handle)

    def _sync_round(self, current: SyncRound) -> None:
        """Sync all that was written until now."""
        dirty, names_changed = self._state.begin_round(current)
        failures: list[OSError] = []
        is_interrupted = True
        try:
            for chunk in dirty:  # all of them: the failure of one is no reason to forget the others
                with _collected(failures):
                    self._files.sync(chunk.handle)
            if names_changed:
                with _collected(failures):
                    self._files.sync_folder(self._store.folder)
            is_interrupted = False
        finally:
            self._close(self._state.end_round(dirty, is_refused=bool(failures), is_interrupted=is_interrupted))
        if failures:
            raise failures[0]


@contextmanager
def _collected(failures: list[OSError]) -> Iterator[None]:
    """Collect an OSError instead of raising it."""
    try:
        yield
    except OSError as error:
        failures.append(error)
