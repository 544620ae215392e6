"""When `on_idle` is due: soon after data, then less and less often."""


class IdlePace:
    """First `shortest` seconds after data, then after twice as long each time, up to `longest`.

    While data keeps coming, those who get none of it are called every `longest` seconds.
    """

    __slots__ = ("_delay", "_shortest", "called", "due", "longest")

    def __init__(self, shortest: float, longest: float, now: float) -> None:
        self.longest = longest
        self._shortest = shortest
        self.called = now
        self._delay = shortest
        self.due = now + shortest

    def had_data(self, now: float) -> None:
        """Start over."""
        self._delay = 0.0  # not `_shortest`, which may be the longest too: steady it is after the next call
        self.due = now + self._shortest

    def is_late(self, now: float) -> bool:
        """Whether data has kept us from calling for too long."""
        return now >= self.called + self.longest

    def is_steady(self) -> bool:
        """Whether the pause has grown to `longest` and stays there until data comes."""
        return self._delay >= self.longest

    def was_called(self, now: float) -> None:
        """Wait longer the next time."""
        self.called = now
        self._delay = min(max(self._delay, self._shortest) * 2, self.longest)
        self.due = now + self._delay
