"""When `on_idle` is due: soon after data, then less and less often."""


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
