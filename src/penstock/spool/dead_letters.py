"""Dead letters: blocks that can never succeed, in a durable queue of their own beside the one they came from.

A dead letter is one block:

     0  u32  length of the JSON, little-endian
     4       JSON: sequence, attempts, enqueued_at, died_at, reason
             the block, byte for byte
"""

import json
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.clock import Clock
from penstock.spool.lease import Lease

FOLDER_NAME = "dead-letters"  # inside the queue's own folder, unless the settings name another
LENGTH = struct.Struct("<I")
LONGEST_REASON = 1000
OVERHEAD = 4096  # more than the JSON can need


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A block and why it was given up."""

    sequence: int
    attempts: int
    enqueued_at: float
    died_at: float
    reason: str
    data: bytes


def pack(lease: Lease, reason: str, died_at: float) -> bytes:
    text = json.dumps(
        {
            "sequence": lease.sequence,
            "attempts": lease.attempts,
            "enqueued_at": lease.enqueued_at,
            "died_at": died_at,
            "reason": reason[:LONGEST_REASON],
        }
    ).encode()
    return LENGTH.pack(len(text)) + text + lease.data


def unpack(block: bytes) -> DeadLetter:
    """ValueError if the block is no dead letter."""
    if len(block) < LENGTH.size:
        raise ValueError("too short for a dead letter")
    end = LENGTH.size + LENGTH.unpack_from(block)[0]
    fields = json.loads(block[LENGTH.size : end])
    return DeadLetter(**fields, data=block[end:])


class _Queue(Protocol):
    def push(self, block: bytes) -> int: ...

    def close(self) -> None: ...


class DeadLetters:
    """The dead-letter queue of one queue, opened when the first letter comes.

    Threads: every method may be called from any thread.
    """

    def __init__(self, open_queue: Callable[[], _Queue], clock: Clock) -> None:
        self._open_queue = open_queue
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._queue: _Queue | None = None
        self.pushed = 0

    def push(self, lease: Lease, reason: str) -> None:
        """Keep the block; a QueueError says that it is not kept."""
        letter = pack(lease, reason, self._clock.time())
        with self._lock:
            if self._queue is None:
                self._queue = self._open_queue()
            self._queue.push(letter)
            self.pushed += 1

    def close(self) -> None:
        with self._lock:
            if self._queue is not None:
                self._queue.close()
                self._queue = None
