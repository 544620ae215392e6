"""The queue's one thread: brings the log and the meta file to the disk at their interval and frees what is done."""

import errno
import logging
import threading
from collections.abc import Callable

from penstock.spool.backlog import Backlog

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Keeper:
    """Syncs one queue. `lock` is the queue's; `sync_log` returns when the log is on the disk.

    Threads: `sync` may be called from any thread that does not hold the queue's lock.
    """

    def __init__(self, lock: threading.Lock, backlog: Backlog, sync_log: Callable[[], None]) -> None:
        self._lock = lock
        self._backlog = backlog
        self._sync_log = sync_log
        self._one_at_a_time = threading.Lock()  # taken before the queue's
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0
        self._failing = False

    def start(self, name: str, interval: float, work: Callable[[], None]) -> None:
        """Do `work` every `interval` seconds until `close`."""

        def run() -> None:
            while not self._stop.wait(interval):
                work()

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def sync(self, *, clean: bool = False) -> None:
        """Write the meta if anything has changed; then delete the chunks that it does not need. Raises OSError."""
        backlog, store = self._backlog, self._backlog.store
        with self._one_at_a_time:
            with self._lock:
                if not store.changed and not clean:
                    return
                snapshot = backlog.snapshot(clean=clean)
            try:
                self._sync_log()
                store.write_meta(snapshot)
            except OSError as error:
                self._failed(error)
                raise
            with self._lock:
                backlog.sequence_limit = snapshot.next_sequence
                store.reclaim()
            if self._failing:
                self._failing = False
                log.warning("Queue syncs again. queue=%s", store.folder)

    def _failed(self, error: OSError) -> None:
        store = self._backlog.store
        self.failures += 1
        if not self._failing:
            self._failing = True
            log.warning("Queue cannot sync. queue=%s error=%s", store.folder, error)
        with self._lock:
            store.changed = True
            if error.errno in DISK_FULL:
                store.reclaim()  # a meta needs room: acked chunks go first, at worst their blocks count as lost twice

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
