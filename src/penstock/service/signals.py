"""Signals, handled on a thread of their own: at once, whatever the main thread does.

Python runs a handler in the main thread, when that comes back from what it waits for. While it waits for a lock or for
Java, a signal that the kernel gave to another thread would stay unhandled.
"""

import signal
import socket
import threading
from collections.abc import Callable


def call_on_signals(handle: Callable[[int], object], *numbers: signal.Signals) -> None:
    """Call `handle` with the number of each of these signals, from now on, on a thread of its own. Main thread only."""
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)

    def listen() -> None:
        with pythons:  # kept open: Python knows its number only
            while byte := ours.recv(1):
                if byte[0] in numbers:
                    handle(byte[0])

    threading.Thread(target=listen, name="penstock-signals", daemon=True).start()
