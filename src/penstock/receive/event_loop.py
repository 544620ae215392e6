"""An event loop on a thread of its own, for receivers and peers; answers come to it from other threads."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from penstock.decode.outcome import DecodeAnswer


class ReceiverLoopThread:
    """Runs coroutines until `close`.

    Threads: every method may be called from any thread but its own.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def dead_threads(self) -> list[str]:
        """Its thread's name, if that was started and has ended without `close`."""
        is_dead = self._thread.ident is not None and not self._thread.is_alive() and not self.loop.is_closed()
        return [self._thread.name] if is_dead else []

    def run(self, work: Coroutine[Any, Any, None], timeout: float) -> None:
        """Runs `work` there and waits for it."""
        asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def deliver(self, answers: list[tuple[Any, DecodeAnswer]]) -> None:
        """Resolves the futures of these answers: one wake-up of the loop for a whole group."""
        try:
            self.loop.call_soon_threadsafe(_resolve, answers)
        except RuntimeError:
            pass  # the loop has closed, and all connections with it

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        if not self.loop.is_closed():
            self.loop.close()


def _resolve(answers: list[tuple[asyncio.Future[DecodeAnswer], DecodeAnswer]]) -> None:
    for waiting, answer in answers:
        if not waiting.done():  # its client may have gone
            waiting.set_result(answer)
