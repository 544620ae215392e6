"""Workers that are processes: each belongs to one thread, which gives it a job and waits for the outcome.

A handler that computes holds the interpreter lock; in a process of its own it starves neither heartbeats nor other
handlers. A process that dies takes one job with it, which is tried again as one failed attempt, and is replaced.
"""

import contextlib
import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from penstock.consume.delivery import (
    RETURNED,
    HandlerOutcome,
    Job,
    Outcomes,
    Verdict,
    handler_argument_of_messages,
    outcomes_of_answer,
    outcomes_of_failure,
)
from penstock.consume.message import Message
from penstock.consume.thread_workers import ConsumerThreads
from penstock.consume.worker_pool import THREADS, PoolSettings
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

# A forked child would inherit locks that other threads hold at that moment.
_spawn = multiprocessing.get_context("spawn")


class ConsumerProcesses(ConsumerThreads):
    """Handlers in processes."""

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._children: dict[int, _Child] = {}
        self._killed = False

    def start(self) -> None:
        """Start the processes side by side and wait for them; ConfigError if they cannot import the handler."""
        children = [self._child(number) for number in range(1, self._settings.workers + 1)]
        try:
            for child in children:
                child.wait_until_ready()
        except (EOFError, OSError) as error:
            for child in children:
                child.end(kill=True)
            raise ConfigError(
                f"the worker processes of {self._settings.name} do not start (their own message is on stderr): "
                "the handler must be importable, and the program must start its consumers under "
                '`if __name__ == "__main__":`'
            ) from error
        super().start()

    def close(self, deadline: float) -> list[str]:
        unfinished = super().close(deadline)
        with self._lock:
            self._killed = True
            children = list(self._children.values())
        for child in children:
            child.end(kill=bool(unfinished))
        # A thread whose process was killed reports its job as returned and ends.
        for thread in self._threads:
            thread.join(1.0)
        return unfinished

    def _child(self, number: int) -> "_Child":
        with self._lock:
            child = self._children.get(number)
            if child is None or not child.process.is_alive():
                if self._killed:
                    raise EOFError("the pool is closed")
                child = self._children[number] = _Child(
                    f"{THREADS}{self._settings.name}-process-{number}", self._settings.calls
                )
            return child

    def _perform(self, job: Job, number: int) -> Outcomes:
        child, argument = None, handler_argument_of_messages(job)
        try:
            child = self._child(number)
            return child.perform(job[0].route.index, argument)
        except (EOFError, OSError):
            if self._killed:
                return [RETURNED] * len(job)
            how = child.end(kill=True) if child else "could not be started"
            log.warning("Worker process died. consumer=%s worker=%d how=%s", self._settings.name, number, how)
            with contextlib.suppress(EOFError, OSError):
                self._child(number)  # the next job need not wait for an interpreter to start
            return [HandlerOutcome(Verdict.RETRY, f"the worker process died ({how})")] * len(job)
        except Exception as error:  # noqa: BLE001 - what cannot be pickled fails as the handler would
            return outcomes_of_failure(error, argument)


class _Child:
    """One process and the pipe to it."""

    def __init__(self, name: str, calls: Sequence[Callable[[Any], Any]]) -> None:
        ours, theirs = _spawn.Pipe()
        self._pipe: Connection[Any, Any] = ours
        self.process = _spawn.Process(target=_serve, args=(theirs, calls), name=name, daemon=True)
        self._ready = False
        self.process.start()
        theirs.close()  # so that we see the end of the pipe when the process dies

    def wait_until_ready(self) -> None:
        """Return when the process has imported what it needs; EOFError if it died of it."""
        if not self._ready:
            self._ready = bool(self._pipe.recv())

    def perform(self, index: int, argument: Message | list[Message]) -> Outcomes:
        self.wait_until_ready()
        self._pipe.send_bytes(pickle.dumps((index, argument), protocol=pickle.HIGHEST_PROTOCOL))
        outcomes: Outcomes = self._pipe.recv()
        return outcomes

    def end(self, kill: bool = False) -> str:
        """End the process; says how it ended."""
        with contextlib.suppress(OSError):
            self._pipe.close()  # its loop ends with the pipe
        if kill:
            self.process.kill()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _serve(pipe: "Connection[Any, Any]", calls: Sequence[Callable[[Any], Any]]) -> None:
    """The worker process: runs until its pipe ends, also when the parent was killed."""
    # A signal to the whole group is for the parent to act on: what is in hand is to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send(True)
    while True:
        try:
            index, argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            outcomes = outcomes_of_answer(calls[index](argument), argument)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; SystemExit does end the process
            outcomes = outcomes_of_failure(error, argument)
        pipe.send(outcomes)
