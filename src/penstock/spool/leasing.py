"""The way out of a queue: blocks are leased, and acked, nacked or rejected in any order."""

import logging
import threading
from collections.abc import Iterable

from penstock.clock import Clock
from penstock.errors import QueueError
from penstock.spool.backlog import Backlog
from penstock.spool.capacity_policy import Gate
from penstock.spool.config import Durability, FastQueueConfig
from penstock.spool.dead_letters import DeadLetters
from penstock.spool.lease import Lease

log = logging.getLogger(__name__)

_DEAD_LETTER_RETRY = 1.0


class LeaseSide:
    """The side of a queue on which blocks leave it; `FastQueue` is this and the side on which they come in.

    `lock` guards both sides: they meet in one backlog.
    """

    def __init__(
        self,
        path: str,
        config: FastQueueConfig,
        lock: threading.Lock,
        backlog: Backlog,
        gate: Gate,
        dead: DeadLetters,
        clock: Clock,
    ) -> None:
        self.path = path
        self.config = config
        self._time, self._monotonic = clock.time, clock.monotonic
        self._in_memory = config.durability is Durability.MEMORY
        self._dead = dead
        self._letters_refused = False
        # _lock guards everything below.
        self._lock = lock
        self._not_empty = threading.Condition(lock)
        self._waiting_to_lease = 0
        self._acked = self._nacked = self._redelivered = 0
        self._backlog = backlog
        self._gate = gate

    def lease(self, max_blocks: int = 1, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Lease]:
        """Take up to `max_blocks` blocks on loan, in order; empty if there is none.

        With `max_bytes` they are no more than that together, unless the first one is by itself.
        With `timeout` it waits so long for the first one; without, not at all. What is not acked in the end is
        delivered again: after `nack`, or when the queue is opened the next time.
        """
        deadline = None
        while True:
            with self._lock:
                backlog = self._backlog
                if self._gate.is_closed:
                    self._gate.check_open()
                taken = backlog.take(max_blocks, self._monotonic() if backlog.returned else 0.0, max_bytes)
                if not taken and timeout:
                    deadline = self._monotonic() + timeout if deadline is None else deadline
                    taken = self._wait_to_lease_locked(max_blocks, max_bytes, deadline)
                if not taken:
                    if max_blocks < 1:
                        raise ValueError(f"max_blocks must be >= 1, got {max_blocks}")
                    return taken
                spent = self._withhold_spent_locked(taken) if backlog.store.attempts else ()
                if self._in_memory:
                    backlog.store.changed = True
                elif taken:
                    backlog.note_leased(taken)
            for lease in spent:
                self.reject(lease, "too many attempts")
            if taken:
                return taken

    def _wait_to_lease_locked(self, max_blocks: int, max_bytes: int | None, deadline: float) -> list[Lease]:
        self._waiting_to_lease += 1
        try:
            while True:
                now = self._monotonic()
                taken = self._backlog.take(max_blocks, now, max_bytes)
                if taken or now >= deadline:
                    return taken
                due = self._backlog.next_due()
                self._not_empty.wait((deadline if due is None else min(due, deadline)) - now)
                self._gate.check_open()
        finally:
            self._waiting_to_lease -= 1

    def _withhold_spent_locked(self, taken: list[Lease]) -> list[Lease]:
        """Keep back what has had all its attempts, each of them ended by a crash; count the others that come again."""
        most = self.config.max_attempts
        spent = [] if most is None else [lease for lease in taken if lease.attempts > most]
        if spent:
            taken[:] = [lease for lease in taken if lease not in spent]
        self._redelivered += sum(lease.attempts > 1 for lease in taken)
        return spent

    def ack(self, leases: Lease | Iterable[Lease]) -> None:
        """The blocks are done with. A lease that is not out any more (acked, nacked, dropped) is passed over."""
        if type(leases) is not list:
            leases = [leases] if isinstance(leases, Lease) else list(leases)
        if not leases:
            return
        gate = self._gate
        with self._lock:
            if gate.is_closed:
                gate.check_open()
            self._acked += self._backlog.finish(leases)
            if gate.waiting:
                gate.not_full.notify_all()

    def exchange(self, lease: Lease) -> Lease | None:
        """Ack the block and lease the next: both for the price of one, where somebody works through a queue.

        None if there is no next one at once, or if some have been handed out before: `lease` has them, too.
        """
        backlog, gate = self._backlog, self._gate
        with self._lock:
            if gate.is_closed:
                gate.check_open()
            if not backlog.settle(lease):
                return None
            self._acked += 1
            if gate.waiting:
                gate.not_full.notify_all()
            return backlog.take_behind(lease)

    def nack(self, lease: Lease, delay: float = 0.0, *, keep: bool = False) -> None:
        """Deliver the block again, in its order, `delay` seconds from now; after `max_attempts` it is a dead letter.

        With `keep` it is not, this time: for a failure that had nothing to do with the block.
        """
        if self.is_last_attempt(lease):
            if not keep:
                self.reject(lease, "too many attempts")
                return
            lease = lease._replace(attempts=lease.attempts - 1)
        with self._lock:
            self._gate.check_open()
            due_at = self._monotonic() + delay if delay > 0 else None
            if self._backlog.give_back(lease, due_at):
                self._nacked += 1
                self._not_empty.notify()

    @property
    def max_attempts(self) -> int | None:
        """How often a block is handed out before it is a dead letter; None: as often as it takes."""
        return self.config.max_attempts

    def is_last_attempt(self, lease: Lease) -> bool:
        """Whether the block has had its `max_attempts` with this one."""
        most = self.config.max_attempts
        return most is not None and lease.attempts >= most

    def reject(self, lease: Lease, reason: str) -> None:
        """The block can never succeed: move it to the dead-letter queue.

        First it is written there, then acked here; if the first fails it stays here and comes again.
        """
        with self._lock:
            self._gate.check_open()
            if lease.sequence not in self._backlog.leased:
                return
        try:
            self._dead.push(lease, reason)
        except QueueError as error:
            if not self._letters_refused:  # one line, however many there are and however often each is tried
                self._letters_refused = True
                log.warning("Dead letters cannot be written, their blocks stay. queue=%s error=%s", self.path, error)
            with self._lock:
                self._backlog.give_back(lease, self._monotonic() + _DEAD_LETTER_RETRY)
            return
        self._letters_refused = False
        self.ack(lease)

    def bury(self, block: bytes, reason: str) -> None:
        """Keep a block that is not in the queue as a dead letter; a QueueError says that it is not kept."""
        self._gate.check_open()
        self._dead.push(Lease(-1, 1, block, self._time()), reason)

    def pop(self) -> bytes | None:
        """The next block, lease and ack in one; None if there is none. A crash after it has lost the block."""
        leases = self.lease()
        if not leases:
            return None
        self.ack(leases)
        return leases[0].data

    def peek(self) -> bytes | None:
        """The block that `lease` would hand out first; None if there is none. Nothing changes."""
        with self._lock:
            self._gate.check_open()
            lease = self._backlog.peek(self._monotonic())
            return None if lease is None else lease.data
