"""A group that was handed over: waits until all of it is safe, then answers all of its requests at once."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.decode.outcome import Answer, Status
from penstock.errors import BlockTooLarge, PayloadTooLarge, PermanentExportError
from penstock.receive.sink import DoneByPlace

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
        self._errors: dict[int, BaseException] = {}  # of single requests

    def part(self) -> DoneByPlace:
        """What is to be called when one more part is safe, or will not be: none of it, or not for some requests."""
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

    def _end_part(self, error: BaseException | Mapping[int, BaseException] | None) -> None:
        with self._lock:
            if isinstance(error, Mapping):
                self._errors.update(error)
            else:
                self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
        # What goes for all of them first: it is a reason to come again, and what can never be taken will be so again.
        instead = _told(self._error) if self._error is not None else self._instead
        alone = {place: _told(one) for place, one in self._errors.items()}
        answers = [
            (request, instead or alone.get(place, answer)) for place, (request, answer) in enumerate(self._answers)
        ]
        self._finish(answers, self._error or next(iter(self._errors.values()), None))


def _told(error: BaseException) -> Answer:
    """What a sender is told; that it must not come again only of what can never be taken, by the error's type."""
    match error:
        case BlockTooLarge() | PayloadTooLarge():
            return Answer(Status.TOO_LARGE, f"too large to be handed on: {error}")
        case PermanentExportError():
            return Answer(Status.BAD, f"the destination will never take it: {error}")
        case _:
            return Answer(Status.BROKEN, f"{type(error).__name__}: {error}")
