"""A process for tests: echoes its first message, dies on request, ends with its parent, see `child_channel`."""

import os
import signal
import sys
import threading

from penstock.service.child_channel import ChildAnswers


def main() -> int:
    ending, stubborn = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if stubborn.is_set() else ending.set())
    answerer = ChildAnswers(int(sys.argv[1]), ending.set)
    first = answerer.first()
    if first.get("code") is not None:
        return int(first["code"])

    def fail(_: object) -> None:
        raise FileNotFoundError("tokens")

    answerer.start(
        {
            "first": lambda _: first,
            "pid": lambda _: os.getpid(),
            "die": lambda _: os._exit(7),
            "fail": fail,
            "ignore": lambda _: stubborn.set(),
            "values": lambda _: [["penstock_queue_size", "", {"queue": "x"}, 2.0]],
        }
    )
    ending.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
