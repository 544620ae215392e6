"""A process of the service: started, watched, started again with growing pauses when it dies, stopped in time."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.service.child_channel import ChildQuestions
from penstock.service.exit_codes import FINAL, LATE
from penstock.telemetry import Sample, Value

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
STEADY = 60.0  # seconds after which a process that runs counts as healthy, and its pauses begin anew
_BEGIN = 60.0  # seconds: a machine that is busy takes its time to load Python


class ChildProcess:
    """One process that runs a module of ours, and is there again after it died.

    Threads: one of its own watches. Every method may be called from any thread.
    """

    def __init__(
        self,
        name: str,
        module: str,
        first: Callable[[], Mapping[str, Any]],
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._module = module
        self._first = first
        self._environ = environ or {}
        self._clock: Clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"penstock-child-{name}", daemon=True)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._questions: ChildQuestions | None = None
        self._last_exit = ""
        self.restarts = 0

    def start(self) -> None:
        self._launch()
        self._thread.start()

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._process.pid if self._process is not None else None

    @property
    def is_up(self) -> bool:
        with self._lock:
            return self._process is not None and self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """Whether it is gone for good: stopped by us, or failed in a way that no restart mends."""
        return self._ended.is_set()

    @property
    def was_late(self) -> bool:
        """Whether it has ended without having done everything in time."""
        with self._lock:
            return self._process is not None and self._process.poll() == LATE

    @property
    def has_died(self) -> bool:
        """Whether its process is not there, or has ended without having said how."""
        with self._lock:
            return self._process is None or self._process.poll() not in (None, 0, LATE)

    def ask(self, what: str, **more: Any) -> Any:
        """Its answer; OSError if it is not there or does not answer."""
        with self._lock:
            questions = self._questions
        if questions is None:
            raise BrokenPipeError(f"{self.name} does not run")
        return questions.ask(what, **more)

    def problem(self) -> str | None:
        """What is wrong with it now."""
        if self.is_up:
            return None
        return f"{self.name} is down" + (f": {self._last_exit}" if self._last_exit else "")

    def signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)

    def stop(self) -> None:
        """Ask it to end; `join` waits for it."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def join(self, timeout: float) -> bool:
        """Whether it has ended within that time; one that has not is killed."""
        with self._lock:
            process = self._process
        if process is None:
            return True
        try:
            process.wait(max(0.0, timeout))
            return True
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def kill(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def values(self) -> Iterable[Value]:
        """Its own metrics, for `Telemetry.watch_values`; none while it is down."""
        try:
            answer = self.ask("values")
        except OSError:
            return []
        return [Value(*entry) for entry in answer or ()]

    def samples(self) -> Iterable[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_service_child_up", float(self.is_up), (self.name,))
        yield Sample("penstock_service_child_restarts_total", self.restarts, (self.name,))

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._environ},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to hand on, in order
            )
        questions = ChildQuestions(ours)
        with self._lock:
            if self._questions is not None:
                self._questions.close()
            self._process, self._questions = process, None
            if self._stopping.is_set():  # stopped between two runs
                process.terminate()
        try:
            questions.ask("begin", timeout=_BEGIN, **self._first())
        except OSError as error:
            log.debug("A process did not begin. child=%s reason=%s", self.name, error)
        with self._lock:
            self._questions = questions  # not before: the first message must be what it needs to begin

    def _watch(self) -> None:
        pause = FIRST_PAUSE
        while True:
            began = self._clock.monotonic()
            process = self._process
            assert process is not None
            code = process.wait()
            if self._stopping.is_set():
                break
            self._last_exit = _describe_exit(code)
            if code == FINAL:
                log.error("A process ended and stays ended: see its last message. child=%s", self.name)
                break
            lasted = self._clock.monotonic() - began
            pause = FIRST_PAUSE if lasted > STEADY else min(pause * 2, LONGEST_PAUSE)
            log.warning(
                "A process died and is started again. child=%s cause=%s pause=%.1f",
                self.name,
                _describe_exit(code),
                pause,
            )
            if self._stopping.wait(pause):
                break
            self.restarts += 1
            self._launch()
        self._ended.set()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
