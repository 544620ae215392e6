"""What the batch queue's tests share: types to send, handlers that remember, queues that are closed again."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock import BatchQueue, BatchQueueConfig, HandlerConsumer, PartitionPolicy, ThreadPolicy
from penstock.testing import wait_until


class Item:
    """Something with an origin and a number, so that order and loss can be seen."""

    __slots__ = ("number", "producer")

    def __init__(self, producer: int = 0, number: int = 0) -> None:
        self.producer = producer
        self.number = number

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.producer}, {self.number})"


class A(Item):
    pass


class B(Item):
    pass


class C(Item):
    pass


def item_types(count: int) -> list[type[Item]]:
    return [type(f"Type{index}", (Item,), {"__slots__": ()}) for index in range(count)]


class Recorder(HandlerConsumer[Any]):
    """Keeps what it consumed, and notices if it was ever called on two threads at once."""

    def __init__(self, hold: threading.Event | None = None) -> None:
        self.items: list[Any] = []
        self.batches: list[list[Any]] = []
        self.idle_calls = 0
        self.threads: set[str] = set()
        self.overlapped = False
        self.entered = threading.Event()
        self._hold = hold
        self._inside = threading.Lock()

    def consume(self, batch: list[Any]) -> None:
        alone = self._inside.acquire(blocking=False)
        self.overlapped |= not alone
        try:
            self.entered.set()
            self.threads.add(threading.current_thread().name)
            if self._hold is not None:
                self._hold.wait(20)
            self.batches.append(batch)
            self.items.extend(batch)
        finally:
            if alone:
                self._inside.release()

    def on_idle(self) -> None:
        alone = self._inside.acquire(blocking=False)
        self.overlapped |= not alone
        self.idle_calls += 1
        if alone:
            self._inside.release()


def config(**settings: Any) -> BatchQueueConfig:
    if "shared_scheduler" not in settings:
        settings.setdefault("threads", ThreadPolicy.fixed(1))
    return BatchQueueConfig(**settings)


@contextmanager
def open_queue(name: str = "test", **settings: Any) -> Iterator[BatchQueue]:
    queue = BatchQueue(name, config(**settings))
    try:
        yield queue
    finally:
        queue.close(5.0)


def full_queue_settings(**settings: Any) -> dict[str, Any]:
    return {"threads": ThreadPolicy.fixed(1), "partitions": PartitionPolicy.fixed(1), "buffer_size": 4, **settings}


def run_threads(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def join_all(threads: list[threading.Thread], timeout: float = 20.0) -> None:
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), f"{thread.name} hangs"


def settle(queue: BatchQueue) -> None:
    """Wait until everything that was accepted has been handled."""
    wait_until(
        lambda: all(
            counts.produced == counts.consumed + counts.errors + counts.unregistered
            for counts in queue.stats().types.values()
        )
    )


def assert_in_order(items: list[Item]) -> None:
    """Items of one producer keep their order, whatever came between them."""
    last: dict[int, int] = defaultdict(lambda: -1)
    for item in items:
        assert item.number > last[item.producer], f"{item} after {last[item.producer]}"
        last[item.producer] = item.number
