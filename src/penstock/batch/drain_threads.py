"""The threads that drain, and the queue or scheduler that each serves."""

import threading
from collections.abc import Callable


class DrainThread(threading.Thread):
    """A thread that drains. `served` is its queue or scheduler: it never waits for room there."""

    def __init__(self, name: str, run: Callable[[], None], served: object) -> None:
        # A daemon, so that a forgotten queue does not keep the process alive; `lifecycle` drains it at exit.
        super().__init__(target=run, name=name, daemon=True)
        self.served = served


def drains_for(served: object) -> bool:
    """Whether the current thread is one of those that drain for `served`."""
    return getattr(threading.current_thread(), "served", None) is served
