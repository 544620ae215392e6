"""Questions and answers between the service and its own processes: JSON lines over a pair of sockets.

    parent ──{"ask": "values", "number": 1}──► child          the socket is inherited, so no other process can ask
           ◄──{"answer": […], "number": 1}──

The child sees the end of the stream when its parent dies, however that happens, and stops by itself.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)
_PATIENCE = 3.0  # seconds for an answer: a scrape must not wait for a process that hangs


class ChildQuestions:
    """The parent's end.

    Threads: every method may be called from any thread; questions go one after the other.
    Errors: OSError if there is no answer in time, or the process has ended.
    """

    def __init__(self, end: socket.socket) -> None:
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._socket = end
        self._read = bytearray()
        self._number = 0

    def ask(self, what: str, timeout: float = _PATIENCE, **more: Any) -> Any:
        deadline = time.monotonic() + timeout
        with self._lock:
            self._number += 1
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps({"ask": what, "number": self._number, **more}).encode() + b"\n")
            while True:
                answer = json.loads(self._line(deadline))
                if answer["number"] == self._number:  # else it answers a question that timed out
                    return answer["answer"]

    def _line(self, deadline: float) -> bytes:
        while (end := self._read.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the process does not answer")
            self._socket.settimeout(left)
            part = self._socket.recv(65536)
            if not part:
                raise BrokenPipeError("the process has ended")
            self._read += part
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class ChildAnswers:
    """The child's end: answers on a thread of its own until the parent is gone, then calls `orphaned`."""

    def __init__(self, descriptor: int, orphaned: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._lines = self._socket.makefile("rb")
        self._orphaned = orphaned
        self._thread = threading.Thread(target=self._run, name="penstock-channel", daemon=True)
        self._answers: Mapping[str, Callable[[dict[str, Any]], Any]] = {}

    def first(self) -> dict[str, Any]:
        """The first message: what the child needs to begin. Ends the process if the service is gone already."""
        try:
            message: dict[str, Any] = json.loads(self._lines.readline())
            self._send(message, "ok")
        except (OSError, ValueError):
            raise SystemExit(0) from None
        return message

    def start(self, answers: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
        self._answers = answers
        self._thread.start()

    def _run(self) -> None:
        try:
            for line in self._lines:
                message = json.loads(line)
                try:
                    self._send(message, self._answers[message["ask"]](message))
                except Exception as error:  # noqa: BLE001 - a question that fails must not end the child
                    log.warning("A question could not be answered. reason=%r", error)
                    self._send(message, None)
        except OSError as error:
            log.debug("The channel to the service broke. reason=%s", error)
        self._orphaned()

    def _send(self, message: dict[str, Any], answer: Any) -> None:
        self._socket.sendall(json.dumps({"number": message["number"], "answer": answer}).encode() + b"\n")
