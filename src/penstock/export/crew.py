"""Whether one worker alone sends more than all of them: into a destination that answers at once, it often does.

    all at work ──enough was sent in a window──► one alone ──for a second──► all at work, to compare again
         ▲                                           │
         └─ it was slower, or nothing was sent ──────┘

Threads of one interpreter run in turns. Where the destination is faster than we prepare and read, a second worker has
nothing to wait for but the first one, and what they hand one another costs more than it brings. By how much depends on
the destination, the exporter and what else runs in the process, so it is tried, not computed.
"""

import threading
from collections.abc import Callable

from penstock.clock import Clock

WINDOW = 0.02  # seconds: a hundred sends where this matters, and not much lost where it does not
KEEP = 1.0  # seconds until we look again: destinations change, and two windows of it are some percent of one percent
STALL = 0.05  # seconds in which the one at work has sent nothing: its send may hang, the others go on without it
_ENOUGH = 20  # sends in a window, a thousand a second: slower destinations are waited for, and more workers wait better
_AS_FAST = 0.95  # of all of them together: fewer threads leave more to those who push
SOON = 5 * WINDOW  # until the second try: a window is short, and something else may have run in it
_LONGEST = 60.0  # seconds between two tries where it was slower each time


class Crew:
    """Says to workers whether they are wanted now. Worker 0 always is.

    Threads: every method may be called from any thread.
    Blocks: `wait`, while one works alone.
    """

    def __init__(self, clock: Clock, backlog: Callable[[], int]) -> None:
        self._clock = clock
        self._backlog = backlog
        # Read and counted without the lock: of two sends that end in one moment either may be missed.
        self.is_alone = False
        self._sent = 0
        self._sent_at = self._ends = 0.0
        # _lock guards everything below, and who changes what is above.
        self._lock = threading.Lock()
        self._all_wanted = threading.Condition(self._lock)
        self._began = 0.0
        self._was_deep = False
        self._together = 0.0  # sends a second of all of them, in the last window before one was left alone
        self._is_try = False
        self._next_try = self._keep_until = 0.0
        self._patience = SOON
        self._was_slow = False  # the last window of the one that works alone

    def wait(self, timeout: float) -> None:
        """Stand by for up to `timeout` seconds, while one is at work alone and sends."""
        with self._lock:
            if self.is_alone and not self._all_wanted.wait(min(timeout, STALL)) and self._is_stalled_locked():
                self._all_locked(self._clock.monotonic())

    def all_wanted(self) -> None:
        """Have everyone back, as there is something to be finished."""
        with self._lock:
            self._all_locked(self._clock.monotonic())

    def sent(self, now: float) -> None:
        """A worker has sent one."""
        self._sent += 1
        self._sent_at = now
        if now >= self._ends and self._lock.acquire(blocking=False):
            try:
                if now >= self._ends:
                    self._window_ended_locked(now)
            finally:
                self._lock.release()

    def _window_ended_locked(self, now: float) -> None:
        rate = self._sent / (now - self._began)
        # Only while more waits than they are at: what they send then is what they can.
        is_deep = self._backlog() > _ENOUGH
        counts, self._was_deep = is_deep and self._was_deep, is_deep
        if not self.is_alone:
            if counts and now >= self._next_try and self._sent >= _ENOUGH and now - self._began < 2 * WINDOW:
                self._together = rate
                self.is_alone = self._is_try = True
            self._begin_locked(now)
        elif now >= self._keep_until and not self._is_try:
            self._patience = SOON
            self._all_locked(now)
        elif counts and rate >= _AS_FAST * self._together:
            if self._is_try:
                self._is_try, self._keep_until = False, now + KEEP
            self._was_slow = False
            self._begin_locked(now)
        elif counts and not self._is_try and not self._was_slow:
            self._was_slow = True  # once is chance nearly as often as not: docs/performance.md
            self._begin_locked(now)
        else:
            # One that had been as fast may have been compared with a lucky window: compare again at once, the first
            # time. Where it is the one that has lucky windows, as with answers of which some are late, it falls behind
            # each time.
            wait = self._patience if self._is_try else self._patience - SOON
            self._all_locked(now)
            if counts:  # else there was nothing left to be slow with
                self._next_try = now + wait
                self._patience = min(2 * self._patience, _LONGEST)

    def _all_locked(self, now: float) -> None:
        self.is_alone = self._is_try = self._was_slow = False
        self._begin_locked(now)
        self._all_wanted.notify_all()

    def _begin_locked(self, now: float) -> None:
        self._sent = 0
        self._began, self._ends = now, now + WINDOW

    def _is_stalled_locked(self) -> bool:
        return self._clock.monotonic() - self._sent_at >= STALL
