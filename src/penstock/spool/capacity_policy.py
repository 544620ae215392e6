"""The limits of a queue, what happens to a push at them, and counts of what was dropped."""

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.errors import BlockTooLarge, QueueFull
from penstock.spool.backlog import Backlog
from penstock.spool.config import FastQueueConfig, FullBehavior, parsed_bytes
from penstock.spool.files import DISK_FULL

log = logging.getLogger(__name__)


class Demand(NamedTuple):
    """The room that a push wants."""

    blocks: int
    bytes: int
    largest: int  # bytes of its largest block
    deadline: float  # FullBehavior.BLOCK waits until then
    may_drop: bool = True  # False: no block is evicted for it, and a refusal is not counted as a drop


DROP_REASONS = ("oldest", "newest", "timeout", "disk_full", "disk_failed")


class SequencesExhausted(Exception):
    """The meta on the disk has no more sequences reserved: it has to be written before the next push."""


class CapacityPolicy:
    """The limits of one queue and what happens at them. Not thread-safe: the queue's lock guards it."""

    def __init__(self, backlog: Backlog, config: FastQueueConfig) -> None:
        self._backlog = backlog
        self.behavior = FullBehavior(config.full_behavior)
        self.max_size = config.max_size
        self.max_bytes = parsed_bytes(config.max_bytes)
        self.max_block = parsed_bytes(config.max_block_bytes)
        self.dropped = dict.fromkeys(DROP_REASONS, 0)
        self.disk_full = 0
        self.disk_failures = 0
        self.is_dropping = False
        self._just_dropped = self._disk_refuses = False

    def is_full_for(self, count: int, length: int) -> bool:
        """Whether `count` blocks of `length` bytes together exceed a limit."""
        return self._backlog.count + count > self.max_size or self._backlog.bytes + length > self.max_bytes

    def count_fitting(self, blocks: Sequence[bytes]) -> int:
        """Returns how many of the blocks, from the first on, there is room for now; 1 if there is none."""
        lengths = accumulate(map(len, blocks), initial=self._backlog.bytes)
        most = bisect_right(list(lengths), self.max_bytes) - 1
        return max(1, min(most, self.max_size - self._backlog.count))

    def check(self, demand: Demand) -> None:
        """Raise BlockTooLarge or QueueFull if there can never be room."""
        if demand.largest > self.max_block:
            raise BlockTooLarge(f"a block of {demand.largest} bytes exceeds max_block_bytes = {self.max_block}")
        if demand.blocks > self.max_size or demand.bytes > self.max_bytes:
            wanted = f"{demand.blocks} blocks of {demand.bytes} bytes"
            raise QueueFull(f"{wanted} never fit max_size = {self.max_size}, max_bytes = {self.max_bytes}")

    def refuse(self, demand: Demand) -> QueueFull:
        """Count the blocks as dropped. Returns the error to raise."""
        backlog = self._backlog
        if demand.may_drop:
            self.drop("newest" if self.behavior is FullBehavior.DROP_NEWEST else "timeout", demand.blocks)
        held = f"{backlog.count} blocks, {backlog.bytes} bytes"
        limits = f"max_size = {self.max_size}, max_bytes = {self.max_bytes}"
        return QueueFull(f"no room in {backlog.store.folder}: {held}, with {limits}")

    def refused_by_disk(self, error: OSError, count: int) -> None:
        """Count blocks that a full or failing disk did not take."""
        self.drop("disk_full" if error.errno in DISK_FULL else "disk_failed", count)

    def drop(self, reason: str, count: int) -> None:
        """Count blocks that were evicted or refused. Logs when dropping begins."""
        self.dropped[reason] += count
        self._just_dropped, self._disk_refuses = True, reason in ("disk_full", "disk_failed")
        if not self.is_dropping:
            self.is_dropping = True
            log.warning("Queue started dropping. queue=%s reason=%s", self._backlog.store.folder, reason)

    def accepted(self, *, on_disk: bool) -> None:
        """Note that a block was accepted while the queue was dropping; logs when dropping is over.

        It is over if no block was evicted for this one, if the disk takes blocks again, and if the queue is well below
        its limits: at them the state would change with every push.
        """
        just_dropped, self._just_dropped = self._just_dropped, False
        if just_dropped or (self._disk_refuses and not on_disk):
            return
        self._disk_refuses = False
        if self._backlog.count < 0.9 * self.max_size and self._backlog.bytes < 0.9 * self.max_bytes:
            self.is_dropping = False
            log.warning("Queue takes everything again. queue=%s", self._backlog.store.folder)
