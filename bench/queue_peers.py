"""Other durable queues for Python, each used as its documentation says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diskcache
import litequeue
import persistqueue
import queuelib


@dataclass(frozen=True)
class Peer:
    """How to open one, and how to put all blocks in and take them out as done."""

    name: str
    survives_kill: bool  # everything put is there after kill -9, and what was taken and done does not come again
    open: Callable[[str], Any]
    run: Callable[[Any, list[bytes]], None]
    close: Callable[[Any], object]


def _file_queue(queue: Any, blocks: list[bytes]) -> None:
    for block in blocks:
        queue.put(block)
    for _ in blocks:
        queue.get()
        queue.task_done()


def _sqlite_ack(queue: Any, blocks: list[bytes]) -> None:
    for block in blocks:
        queue.put(block)
    for _ in blocks:
        queue.ack(queue.get())


def _deque(queue: Any, blocks: list[bytes]) -> None:
    for block in blocks:
        queue.append(block)
    for _ in blocks:
        queue.popleft()


def _lite(queue: Any, blocks: list[bytes]) -> None:
    for block in blocks:
        queue.put(block)
    for _ in blocks:
        queue.done(queue.pop().message_id)


def _push_pop(queue: Any, blocks: list[bytes]) -> None:
    for block in blocks:
        queue.push(block)
    for _ in blocks:
        queue.pop()


PEERS = [
    Peer(
        "persist-queue (file)",
        True,
        lambda path: persistqueue.Queue(path, autosave=True, tempdir=path),
        _file_queue,
        lambda queue: None,
    ),
    Peer(
        "persist-queue (SQLite, acks)",
        True,
        lambda path: persistqueue.SQLiteAckQueue(path, auto_commit=True),
        _sqlite_ack,
        lambda queue: queue.close(),
    ),
    Peer("diskcache", True, lambda path: diskcache.Deque(directory=path), _deque, lambda queue: queue._cache.close()),
    Peer("litequeue", True, lambda path: litequeue.LiteQueue(f"{path}/q.db"), _lite, lambda queue: queue.close()),
    Peer("queuelib", False, lambda path: queuelib.FifoDiskQueue(f"{path}/q"), _push_pop, lambda queue: queue.close()),
]
