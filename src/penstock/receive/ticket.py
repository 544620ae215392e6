"""A group that was handed over: waits until all of it is safe, then answers all of its requests at once."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from penstock.receive.sink import Answer, Done, Status

Finish = Callable[[list[tuple[Any, Answer]], BaseException | None], None]


class Ticket:
    """Counts the parts of a group that are still under way: its bodies at the relay, its points at L1.

    Threads: every method may be called from any thread. `finish` is called exactly once, on the last part's thread.
    """

    def __init__(self, answers: Sequence[tuple[Any, Answer]], finish: Finish) -> None:
        self._answers = answers
        self._finish = finish
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._parts = 1  # until `sealed`: a part that ends at once must not end the group
        self._instead: Answer | None = None
        self._error: BaseException | None = None

    def part(self) -> Done:
        """What is to be called when one more part is safe, or will not be."""
        with self._lock:
            self._parts += 1
        return self._end_part

    def refused(self, answer: Answer) -> None:
        """The last part was not taken: all requests are answered so, whatever becomes of the others."""
        with self._lock:
            self._instead = answer
            self._parts -= 1

    def sealed(self) -> None:
        """There are no more parts to come."""
        self._end_part(None)

    def _end_part(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
        instead = self._instead
        if self._error is not None:
            instead = Answer(Status.BROKEN, f"{type(self._error).__name__}: {self._error}")
        answers = [(request, instead or answer) for request, answer in self._answers]
        self._finish(answers, self._error)
