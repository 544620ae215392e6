"""Handlers that worker processes can import."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.amqp import Message, Reject, Retry


def note(message: Message) -> None:
    """Write into the folder that the message names which process had it."""
    folder, name = message.body.decode().split("|")
    (Path(folder) / f"{name}.{os.getpid()}").touch()


def die_at_first(message: Message) -> None:
    """Kill the worker process at the first attempt, as a crash in native code would."""
    if message.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note(message)


def die_always(message: Message) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def spin(message: Message) -> None:
    """Hold the interpreter lock for as many seconds as the message says, and say so in the file that it names."""
    seconds, _, begun = message.body.decode().partition("|")
    if begun:
        Path(begun).touch()
    until = time.perf_counter() + float(seconds)
    while time.perf_counter() < until:
        pass


def refuse(message: Message) -> None:
    """Refuse what is no JSON, and `"later"` twice."""
    if message.json() == "later" and message.attempt < 3:
        raise Retry(0.001, "later")


async def refuse_async(message: Message) -> None:
    refuse(message)


def refuse_in_batches(messages: Sequence[Message]) -> list[Reject | None]:
    return [Reject("odd") if int(message.body) % 2 else None for message in messages]
