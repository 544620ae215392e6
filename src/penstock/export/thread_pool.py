"""A pool of threads that run one function, and whose number may change while they run."""

import logging
import threading
from collections.abc import Callable

from penstock.clock import Clock

log = logging.getLogger(__name__)

_ERROR_PAUSE = 1.0  # seconds after an unforeseen failure, so that it does not fill the log

IsRetired = Callable[[], bool]  # a worker asks it between two batches


class SendThreadPool:
    """Threads `name-0`, `name-1`, … that run `work` until it returns or they are retired.

    Threads: every method may be called from any thread.
    """

    def __init__(self, name: str, work: Callable[[int, IsRetired], None], clock: Clock) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._size = 0
        self._stopping = threading.Event()

    @property
    def size(self) -> int:
        """The number of threads asked for."""
        return self._size

    def resize(self, size: int) -> None:
        """Run `size` threads: start the missing ones, let surplus ones end after their current batch.

        Nothing happens once they were stopped.
        """
        with self._lock:
            if self._stopping.is_set():
                return
            self._size = size
            for number in range(size):
                thread = self._threads.get(number)
                if thread is None or not thread.is_alive():
                    thread = threading.Thread(
                        target=self._run,
                        args=(number,),
                        name=f"{self._name}-{number}",
                        daemon=True,  # one that hangs in a send must not keep the process
                    )
                    try:
                        thread.start()
                    except RuntimeError as error:  # the system has no more threads
                        self._size = number
                        if not number:
                            raise
                        log.warning("Fewer workers than wanted. pool=%s workers=%d error=%s", self._name, number, error)
                        return
                    self._threads[number] = thread

    def dead_threads(self) -> list[str]:
        """The names of threads that should run and have ended."""
        with self._lock:
            return [one.name for number, one in self._threads.items() if number < self._size and not one.is_alive()]

    def stop(self) -> None:
        """Ask all of them to end after their current batch."""
        with self._lock:
            self._size = 0
            self._stopping.set()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop`."""
        self._stopping.wait(seconds)

    def join(self, deadline: float) -> list[str]:
        """Wait until all have ended. Returns the names of those that have not by `deadline`."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():  # an exporter may close its own queue
                thread.join(max(0.0, deadline - self._clock.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _run(self, number: int) -> None:
        def is_retired() -> bool:
            return number >= self._size

        while not is_retired():
            try:
                self._work(number, is_retired)
                return
            except Exception:
                log.exception("Worker failed and goes on. worker=%s", f"{self._name}-{number}")
                self.pause(_ERROR_PAUSE)
