"""One bounded buffer: lanes of items by type, the room that is left, and the token of the thread that drains it.

Room. Every slot of a partition is in exactly one of five places, and their sum is the capacity at all times:
    spare      a number, guarded by the lock: slots that are free
    credits    a list, at most CREDITS long: slots that single producers take without the lock, by `pop`;
               each of them is `asleep`, at which the producer has to look next
    in flight  popped, not yet appended: one per producer, for the time of two bytecodes
    held       items in the lanes
    waiting    none: a producer waits only when spare and credits are empty
So the bound is exact without a lock per item, and "closed, and spare equals the capacity" proves that nothing is held
and no producer is about to append: this is how `close` knows that it has seen the last item.

The token. `asleep` holds the partition itself while it is not drained, and is empty while it is. A thread that pops it
must see to it that the partition is drained: a producer by submitting it to its owner, an owner by draining it.
A producer appends the item, then looks at `asleep`; a drainer puts the token back, then looks at the lanes. In any
interleaving one of the two sees the other, so no item is left without a thread that will drain it.

What is relied on: `list.append`, `list.extend` of a list, `list.pop`, slice reads and slice deletion of lists are each
atomic and seen in one order by all threads. The language's FAQ on thread-safe operations promises the former; the
global lock gives the latter.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.batch.idle import IdleExclusion
from penstock.batch.waiting import ProduceWaiter

if TYPE_CHECKING:
    from penstock.batch.drain import DrainTask

CREDITS = 1024  # slots handed out at a time: the lock is then taken once for so many single items

Asleep = list["Partition"]  # the place of the token
Route = tuple[list[Asleep], list[Any]]  # what a producer of single items needs of a lane: credits and items


class Registration:
    """One type and its handler. Written under the layout's lock; read without it, field by field."""

    __slots__ = ("consume", "exclusion", "lanes", "on_idle", "type", "unregistered_logged", "weight")

    def __init__(self, type_: type, exclusion: IdleExclusion | None) -> None:
        self.type = type_
        self.consume: Callable[[list[Any]], object] | None = None
        self.on_idle: Callable[[], object] | None = None
        self.weight = 0.0
        self.exclusion = exclusion  # only where several partitions feed one handler
        self.lanes: list[Lane] = []
        self.unregistered_logged = False


class Lane:
    """The items of one type in one partition, so that grouping by type costs nothing when they are drained."""

    __slots__ = (
        "abandoned", "consumed", "dropped", "errors", "idle_mark", "items", "partition", "registration", "route",
        "sizes", "taken", "unregistered",
    )  # fmt: skip

    def __init__(self, registration: Registration, partition: "Partition") -> None:
        self.registration = registration
        self.partition = partition
        self.items: list[Any] = []
        self.sizes: list[int] = []  # beside `items` where bytes are limited
        self.taken = 0  # guarded by the partition's lock, like `dropped`
        self.dropped = 0
        self.consumed = 0  # these belong to the holder of the partition's token
        self.errors = 0
        self.unregistered = 0
        self.idle_mark = 0
        self.abandoned = 0  # belongs to `close`
        self.route: Route = (partition.credits, self.items)


class Partition:
    """A bounded buffer with exactly one owner."""

    def __init__(self, index: int, capacity: int, byte_capacity: int | None, owner: "DrainTask") -> None:
        self.index = index
        self.capacity = capacity
        self.byte_capacity = byte_capacity
        self.owner = owner  # written under the layout's lock; an old owner forwards what still reaches it
        self.asleep: Asleep = [self]
        self.credits: list[Asleep] = []
        # Append-only; written under the layout's lock.
        self.lanes: list[Lane] = []
        self.lane_of: dict[type, Lane] = {}
        self.weight = 0.0
        self.idle_lanes: tuple[Lane, ...] = ()  # their `on_idle` is called with this partition's token; replaced
        self.owes_idle_calls = False  # they were due while the token was in use
        # Belongs to the holder of the token.
        self.seconds = 0.0
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._spare = capacity
        self._bytes = 0
        self._waiters: deque[ProduceWaiter] = deque()
        self._dropping = False
        self._takes_many = byte_capacity is None  # at once; so until it closes
        self.closed = False

    # Producers

    def put_all(self, lane: Lane, items: Sequence[Any], count: int) -> bool:
        """Append all `count` of `items` if that is simple: there is room, no waiter, no limit of bytes."""
        with self._lock:
            spare = self._spare - count
            if spare < 0 or self._waiters or not self._takes_many:
                return False
            self._spare = spare
            held = lane.items
            held += items  # no call: the interpreter may switch threads in one, and other producers pile up at the lock
        return True

    def offer(self, lane: Lane, items: Sequence[Any], sizes: Sequence[int] | None, waiter: ProduceWaiter | None) -> int:
        """Append as many of `items` as there is room for, in order; with the rest, `waiter` stands in line.

        Nothing is appended while others wait, and nothing waits once the partition is closed.
        """
        with self._lock:
            if self.closed:
                return 0
            granted = 0 if self._waiters else self._grant_locked(lane, items, sizes, 0)
            if waiter is not None:
                waiter.granted = granted
                if granted < len(items):
                    self._waiters.append(waiter)
        return granted

    def withdraw(self, waiter: ProduceWaiter) -> int:
        """Leave the line; how many items of `waiter` were appended in the end."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            # Later waiters may fit into the bytes that it did not; slots would all have been its own.
            served = [] if self.byte_capacity is None else self._serve_locked()
        for other in served:
            other.wake()
        return waiter.granted

    def refuse(self, lane: Lane, count: int) -> bool:
        """Count items that were turned away; True if it is the first time since there was room."""
        with self._lock:
            lane.dropped += count
            began = not self._dropping and not self.closed
            self._dropping = True
        return began

    def count_untried(self, lane: Lane) -> None:
        """Count an item that was not tried: there may be room for it."""
        with self._lock:
            lane.dropped += 1

    def _grant_locked(self, lane: Lane, items: Sequence[Any], sizes: Sequence[int] | None, start: int) -> int:
        """Append from `items[start:]` what fits; how many that were."""
        count = wanted = len(items) - start
        size, credit = 0, 0
        while wanted > self._spare and self._take_back_credit_locked():
            self._spare += 1
        if sizes is not None:
            count, size = self._fitting_locked(sizes, start, min(wanted, self._spare))
        elif wanted > self._spare:
            count = self._spare
        elif wanted == 1 and not self._waiters:  # a later producer would take a credit past the waiters
            credit = min(self._spare - 1, CREDITS - len(self.credits))
        if not count:
            return 0
        held, held_sizes, credits = lane.items, lane.sizes, self.credits
        # No call from here on: an interrupt could come after it, and the slots would no longer add up.
        self._spare -= count + credit
        self._bytes += size
        credits += [self.asleep] * credit
        if sizes is not None:
            held_sizes += sizes[start : start + count]
        held += items if count == wanted and not start else items[start : start + count]
        return count

    def _fitting_locked(self, sizes: Sequence[int], start: int, most: int) -> tuple[int, int]:
        """How many from `start` on fit in bytes, and how many bytes that are."""
        room = (self.byte_capacity or 0) - self._bytes
        count = size = 0
        while count < most and size + sizes[start + count] <= room:
            size += sizes[start + count]
            count += 1
        return count, size

    def _take_back_credit_locked(self) -> bool:
        try:
            self.credits.pop()
        except IndexError:
            return False
        return True

    # The drainer, which holds the token

    def has_items(self) -> bool:
        for lane in self.lanes:  # noqa: SIM110 - a generator costs more than the loop
            if lane.items:
                return True
        return False

    def take(self, lane: Lane, limit: int | None) -> tuple[list[Any], list[ProduceWaiter], bool]:
        """Move up to `limit` items out, and let the waiters have the room.

        Also returns the waiters that got all of it, to be woken once no lock is held, and whether dropping has ended.
        """
        with self._lock:
            items = lane.items
            count = len(items)
            if limit is not None and count > limit:
                count = limit
            size = 0 if self.byte_capacity is None else sum(lane.sizes[:count])
            # As in granting, no call until the slots add up again.
            batch = items[:count]
            del items[:count]
            del lane.sizes[:count]
            lane.taken += count
            self._spare += count
            self._bytes -= size
            woken = self._serve_locked() if self._waiters else []
            recovered = self._dropping and self._spare * 2 >= self.capacity
            if recovered:
                self._dropping = False
        return batch, woken, recovered

    def _serve_locked(self) -> list[ProduceWaiter]:
        served = []
        while self._waiters and not self.closed:
            waiter = self._waiters[0]
            waiter.granted += self._grant_locked(waiter.lane, waiter.items, waiter.sizes, waiter.granted)
            if waiter.granted < len(waiter.items):
                break
            served.append(self._waiters.popleft())
        return served

    # The closing queue

    def close(self) -> None:
        """Let nothing in any more, and wake the waiters: they get nothing more, and withdraw."""
        with self._lock:
            self.closed = True
            self._takes_many = False
            while self._take_back_credit_locked():
                self._spare += 1
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    def is_quiet(self) -> bool:
        """Closed, nothing held, no producer about to append."""
        with self._lock:
            return self.closed and self._spare >= self.capacity  # more, if a slot was forgiven that was not lost

    def reclaim_lost_slots(self) -> None:
        """Give back the slots of producers that were interrupted between taking one and using it."""
        with self._lock:
            if self.closed:
                self._spare = self.capacity - sum(len(lane.items) for lane in self.lanes)

    # Any thread

    def used(self) -> tuple[int, int]:
        """Items and bytes held."""
        with self._lock:
            return sum(len(lane.items) for lane in self.lanes), self._bytes

    def counts(self, lane: Lane) -> tuple[int, int]:
        """How many items of `lane` were let in, and how many were turned away."""
        with self._lock:
            return lane.taken + len(lane.items), lane.dropped

    def reset(self) -> None:
        """Forget everything, in the child of a fork: what is held is the parent's."""
        self._lock = threading.Lock()
        self.credits.clear()
        for lane in self.lanes:
            lane.items.clear()
            lane.sizes.clear()
            lane.taken = lane.dropped = lane.consumed = lane.errors = lane.unregistered = 0
            lane.idle_mark = lane.abandoned = 0
        self._spare = self.capacity
        self._bytes = 0
        self._waiters.clear()
        self._dropping = False
        self.seconds = 0.0
        self.owes_idle_calls = False
        self.asleep[:] = [self]
