"""Time as an argument: what depends on it takes a `Clock`, so that a test can pass `penstock.testing.FakeClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time as an argument."""

    def monotonic(self) -> float:
        """Seconds that never go back; for deadlines and durations."""
        ...

    def time(self) -> float:
        """Seconds since the epoch; for what is written down."""
        ...


class SystemClock:
    """The machine's own time."""

    # Bound straight to the C functions: on a hot path the call is all there is to pay.
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
