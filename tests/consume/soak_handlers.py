"""Handlers of the soak test. What they have done they note in a file, which outlives every kill.

A message says its number and where to note it. Its number says its fate: some are poison, some fail once, some kill
the worker process that takes them first.
"""

import functools
import os
import signal
import sys

from penstock.amqp import BackoffPolicy, ConsumerRegistry, DeadLetters, Declarations, Message

DEAD = "soak.dead"
SOON = BackoffPolicy(first=0.05, limit=0.5)


def is_poison(number: int) -> bool:
    return number % 100 == 7


@functools.cache
def _notes(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def handle(message: Message) -> None:
    path, text = message.body.decode().split("|")
    number = int(text)
    if is_poison(number):
        raise ValueError(f"{number} is poison")
    if number % 50 == 3 and message.attempt == 1:
        raise RuntimeError("fails once")
    os.write(_notes(path), b"%d\n" % number)


def handle_or_die(message: Message) -> None:
    number = int(message.body.decode().split("|")[1])
    if number % 200 == 11 and message.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle(message)


def declare(queue: str, execution: str) -> Declarations:
    declarations = Declarations()
    declarations.queue(DEAD)
    declarations.queue(queue, dead_letter=DeadLetters(exchange="", routing_key=DEAD))
    declarations.consumer(
        queue=queue,
        handler=handle_or_die if execution == "process" else handle,
        execution=execution,
        workers=2 if execution == "process" else 8,
        retry=SOON,
        # A worker that the test kills is an attempt too, and must not be the last one.
        max_attempts=12 if execution == "process" else 3,
    )
    return declarations


def main(url: str, queue: str) -> None:
    ConsumerRegistry(url, declare(queue, "thread"), reconnect=SOON).run(stop_timeout=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
