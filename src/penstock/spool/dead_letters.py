"""Dead letters: blocks that can never succeed, in a durable queue of their own beside the one they came from.

A dead letter is one block:

     0  u32  length of the JSON, little-endian
     4       JSON: sequence, attempts, enqueued_at, died_at, reason
             the block, byte for byte
"""

import json
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.clock import Clock
from penstock.errors import QueueError
from penstock.spool.config import Durability, FastQueueConfig, FullBehavior, parsed_bytes
from penstock.spool.lease import Lease

FOLDER_NAME = "dead-letters"  # inside the queue's own folder, unless the settings name another
LENGTH = struct.Struct("<I")
LONGEST_REASON = 1000
OVERHEAD = 4096  # more than the JSON can need
_MOST = 100_000  # letters, unless the queue itself may hold more
_AT_ONCE = 256  # letters that are in memory while they are replayed


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A block and why it was given up."""

    sequence: int
    attempts: int
    enqueued_at: float
    died_at: float
    reason: str
    data: bytes


def pack_dead_letter(lease: Lease, reason: str, died_at: float) -> bytes:
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


def unpack_dead_letter(block: bytes) -> DeadLetter:
    """ValueError if the block is no dead letter."""
    if len(block) < LENGTH.size:
        raise ValueError("too short for a dead letter")
    end = LENGTH.size + LENGTH.unpack_from(block)[0]
    fields = json.loads(block[LENGTH.size : end])
    try:
        return DeadLetter(**fields, data=block[end:])
    except TypeError as error:
        raise ValueError(f"not a dead letter: {error}") from error


def dead_letter_config(config: FastQueueConfig) -> FastQueueConfig:
    """The settings of the dead-letter queue: at least as durable as the queue, and without dead letters of its own."""
    return replace(
        config,
        durability=Durability.FSYNC if config.durability is Durability.FSYNC else Durability.DISK,
        max_size=max(config.max_size, _MOST),
        max_bytes=parsed_bytes(config.max_bytes) + OVERHEAD,
        max_block_bytes=parsed_bytes(config.max_block_bytes) + OVERHEAD,
        full_behavior=FullBehavior.DROP_OLDEST,
        max_attempts=None,
        order="fifo",
    )


def _matching_letter(lease: Lease, reason: str, largest: int) -> DeadLetter | None:
    """The letter; None if its reason is another, if it is too large, or if the block is no letter."""
    try:
        letter = unpack_dead_letter(lease.data)
    except ValueError:
        return None
    return letter if reason in letter.reason and len(letter.data) <= largest else None


class LetterQueue(Protocol):
    def push(self, block: bytes) -> int: ...

    def lease(self, max_blocks: int = 1) -> list[Lease]: ...

    def ack(self, leases: Iterable[Lease]) -> None: ...

    def nack(self, lease: Lease) -> None: ...

    def close(self) -> None: ...

    @property
    def dropped(self) -> int: ...

    def __len__(self) -> int: ...


class DeadLetterQueue:
    """The dead-letter queue of one queue, opened when the first letter comes.

    Threads: every method may be called from any thread.
    """

    def __init__(self, open_queue: Callable[[], LetterQueue], clock: Clock) -> None:
        self._open_queue = open_queue
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._queue: LetterQueue | None = None
        self._dropped = 0  # from queues that are closed by now
        self.pushed = 0

    def push(self, lease: Lease, reason: str) -> None:
        """Keep the block. Raises QueueError if it is not kept."""
        letter = pack_dead_letter(lease, reason, self._clock.time())
        with self._lock:
            self._opened_locked().push(letter)
            self.pushed += 1

    @property
    def dropped(self) -> int:
        """Letters that were evicted for lack of room."""
        queue = self._queue
        return self._dropped + (queue.dropped if queue is not None else 0)

    def replay(
        self, into: Callable[[Sequence[bytes]], int], largest: int, reason: str, advance: Callable[[int], object]
    ) -> tuple[int, int]:
        """Hand the blocks whose reason contains `reason` to `into`, then forget them; how many, and how many stay.

        `into` says how many of them it has taken, from the first on; 0 ends it. Those of more than `largest` bytes
        stay. Letters that arrive during the replay, perhaps of the same blocks, wait for the next one.
        """
        with self._lock:
            letters = self._opened_locked()
        left, replayed, has_room = len(letters), 0, True
        kept: list[Lease] = []
        chosen: list[tuple[Lease, bytes]] = []
        try:
            while has_room and left > 0 and (leases := letters.lease(min(left, _AT_ONCE))):
                left -= len(leases)
                found = [(lease, _matching_letter(lease, reason, largest)) for lease in leases]
                kept += [lease for lease, letter in found if letter is None]
                chosen = [(lease, letter.data) for lease, letter in found if letter is not None]
                while chosen and has_room:
                    taken = into([data for _, data in chosen])
                    letters.ack([lease for lease, _ in chosen[:taken]])  # now: the next portion may raise
                    del chosen[:taken]
                    replayed += taken
                    has_room = taken > 0
                advance(len(leases))
        finally:
            kept += [lease for lease, _ in chosen]
            for lease in kept:
                letters.nack(lease)
        return replayed, len(kept) + left

    def _opened_locked(self) -> LetterQueue:
        if self._queue is None:
            try:
                self._queue = self._open_queue()
            except RuntimeError as error:  # the system has no thread left for it: like a full disk, that may pass
                raise QueueError(f"dead letters cannot be kept: {error}") from error
        return self._queue

    def close(self) -> None:
        with self._lock:
            if self._queue is not None:
                self._queue.close()
                self._dropped += self._queue.dropped
                self._queue = None
