"""When `on_idle` may be called: after which pause, and never together with `consume` of the same handler."""

import threading


class IdlePace:
    """First `shortest` seconds after data, then after twice as long each time, up to `longest`.

    While data keeps coming, handlers that get none of it are called every `longest` seconds.
    """

    __slots__ = ("_called", "_delay", "_longest", "_shortest", "due")

    def __init__(self, shortest: float, longest: float, now: float) -> None:
        self._shortest = shortest
        self._longest = longest
        self._called = now
        self._delay = shortest
        self.due = now + shortest

    def had_data(self, now: float) -> None:
        """Start over."""
        self._delay = self._shortest
        self.due = now + self._delay

    def is_late(self, now: float) -> bool:
        """Whether data has kept the task from calling for too long."""
        return now >= self._called + self._longest

    def was_called(self, now: float) -> None:
        """Wait longer the next time."""
        self._called = now
        self._delay = min(self._delay * 2, self._longest)
        self.due = now + self._delay


class IdleExclusion:
    """Several threads may consume for a handler at once, or one thread calls its `on_idle`.

    Blocks: `enter` waits while `on_idle` runs; `try_alone` never waits.
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
