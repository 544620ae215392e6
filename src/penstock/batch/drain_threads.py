"""The threads that drain, and for whom."""

import threading
from collections.abc import Callable


class DrainThread(threading.Thread):
    """A thread that drains. `crew` says for whom, so that it never waits for room that only itself could make."""

    def __init__(self, name: str, run: Callable[[], None], crew: object) -> None:
        # A daemon, so that a forgotten queue does not keep the process alive; `lifecycle` drains it at exit.
        super().__init__(target=run, name=name, daemon=True)
        self.crew = crew


def is_of_crew(crew: object) -> bool:
    """Whether the current thread is one of those that drain for `crew`."""
    return getattr(threading.current_thread(), "crew", None) is crew
