"""The rounds at the moments at which they and somebody else could miss each other, and on a machine of made-up time."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock import BatchQueue, BatchQueueConfig
from penstock.batch import rounds
from tests.batch.support import A, Recorder, open_queue
from tests.batch.test_rounds import PAIR, Named


class Time:
    """Stands for the module of that name in the rounds; calls `look` whenever they look at the clock."""

    sleep = staticmethod(time.sleep)

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def monotonic(self) -> float:
        self._look()
        return time.monotonic()


def test_a_queue_closes_while_the_rounds_pass_by_what_its_task_has_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    passing_by, go_on, consuming = threading.Event(), threading.Event(), threading.Event()

    class Sending(Named):
        def on_idle(self) -> None:
            super().on_idle()
            if task.on_rounds and rounds.IDLE_ROUNDS.calling is not None and not consuming.is_set():
                second.produce(A())
                assert consuming.wait(10)

    class Consuming(Recorder):
        def consume(self, batch: list[Any]) -> None:
            consuming.set()
            assert passing_by.wait(10)
            super().consume(batch)

    def look() -> None:
        calling = rounds.IDLE_ROUNDS.calling
        if calling is not None and calling.task is task and consuming.is_set():
            passing_by.set()
            go_on.wait(10)

    second = BatchQueue("second", BatchQueueConfig(**PAIR))
    task = second._tasks[0]
    with open_queue("first", **PAIR) as first:
        monkeypatch.setattr(rounds, "time", Time(look))
        sending, handler = Sending(), Consuming()
        first.add_handler(A, sending)
        sending.wait_for_calls("penstock-idle")
        second.add_handler(A, handler)
        assert passing_by.wait(10)
        try:
            assert second.close(5.0)
        finally:
            go_on.set()

    assert len(handler.items) == 1
