"""Keeps `on_idle` of a handler apart from its `consume` where several threads may consume at once."""

import threading


class IdleExclusion:
    """Many may be inside together, or one alone.

    Blocks: `enter` waits while a thread is alone inside; `try_alone` never waits.
    """

    __slots__ = ("_alone", "_free", "_inside")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """No thread is inside: also in the child of a fork, whatever the parent's threads were doing."""
        # _free's lock guards everything below.
        self._free = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False

    def enter(self) -> None:
        with self._free:
            while self._alone:
                self._free.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._free:
            self._inside -= 1

    def try_alone(self) -> bool:
        with self._free:
            if self._alone or self._inside:
                return False
            self._alone = True
            return True

    def leave_alone(self) -> None:
        with self._free:
            self._alone = False
            self._free.notify_all()
