"""The core against a model, step by step and without threads: every interleaving of whole steps that Hypothesis finds.

Producers, waiting producers, handlers that come and go, partitions that grow and change owners, drain cycles, idle
calls and closing, in any order. After every step the slots add up, every partition has one owner and one token, and
no handler got anything twice, out of order, or from two owners at once.
"""

from collections import defaultdict, deque
from queue import Empty
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock import BatchQueueConfig, PartitionPolicy, ThreadPolicy
from penstock.batch.drain import DrainTask, wake_owner
from penstock.batch.layout import PartitionLayout
from penstock.batch.partition import Partition
from penstock.batch.waiting import ProduceWaiter
from penstock.testing import FakeClock
from tests.batch.support import Item, item_types
from tests.examples import examples

TYPES = item_types(6)
TASKS = 3
CAPACITY = 4


class PatientProducer(ProduceWaiter):
    """A waiter without a thread."""

    def __init__(self, lane: Any, items: list[Item], queue_number: int) -> None:
        super().__init__(lane, items, None)
        self.woken = False

    def wake(self) -> None:
        self.woken = True


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.handed: dict[type, list[Item]] = defaultdict(list)  # consumed or given to the error handler
        self.accepted: dict[type, list[Item]] = defaultdict(list)
        self.waiting: dict[Partition, deque[PatientProducer]] = defaultdict(deque)
        self.quiet: list[Partition] = []
        self.number = 0
        self.closed = False
        config = BatchQueueConfig(
            threads=ThreadPolicy.fixed(TASKS),
            partitions=PartitionPolicy.adaptive(1),
            buffer_size=CAPACITY,
            max_batch=3,
            error_handler=lambda batch, error: self.consume(batch),
        )
        clock = FakeClock()
        self.tasks = tuple(
            DrainTask("model", index, config, clock, merges=False, on_quiet=self.quiet.append, on_cycle=None)
            for index in range(TASKS)
        )
        self.layout = PartitionLayout(config, self.tasks, TASKS)

    def consume(self, batch: list[Item]) -> None:
        self.handed[type(batch[0])] += batch

    def on_idle(self) -> None:
        assert sorted(self.tokens())[:2] == [0, 1]  # the task that calls holds the token of one partition

    def items(self, kind: type[Item], count: int) -> list[Item]:
        numbered = [kind(0, self.number + index) for index in range(count)]
        self.number += count
        return numbered

    @rule(kind=st.sampled_from(TYPES), count=st.integers(1, 6))
    def produce_what_fits(self, kind: type[Item], count: int) -> None:
        items = self.items(kind, count)
        lane = self.layout.lane_for(items[0])
        room = CAPACITY - lane.partition.used()[0]
        granted = lane.partition.offer(lane, items, None, None)
        wake_owner(lane.partition.asleep)
        self.accepted[kind] += items[:granted]
        assert granted == (0 if self.closed or self.waiting[lane.partition] else min(room, count))

    @rule(kind=st.sampled_from(TYPES))
    def produce_one_without_the_lock(self, kind: type[Item]) -> None:
        (item,) = self.items(kind, 1)
        credits, items = self.layout.lane_for(item).route
        try:
            asleep = credits.pop()
        except IndexError:
            return
        items.append(item)
        if asleep:
            wake_owner(asleep)
        self.accepted[kind].append(item)
        assert not self.closed

    @precondition(lambda self: not self.closed)
    @rule(kind=st.sampled_from(TYPES), count=st.integers(1, 6))
    def produce_and_wait(self, kind: type[Item], count: int) -> None:
        items = self.items(kind, count)
        lane = self.layout.lane_for(items[0])
        waiter = PatientProducer(lane, items, self.number)
        if lane.partition.offer(lane, items, None, waiter) < count:
            self.waiting[lane.partition].append(waiter)
        else:
            self.accepted[kind] += items
        wake_owner(lane.partition.asleep)

    @precondition(lambda self: any(self.waiting.values()))
    @rule(which=st.integers(0, 100))
    def give_up_waiting(self, which: int) -> None:
        lines = [line for line in self.waiting.values() if line]
        line = lines[which % len(lines)]
        waiter = line[which % len(line)]
        line.remove(waiter)
        granted = waiter.lane.partition.withdraw(waiter)
        self.accepted[waiter.lane.registration.type] += waiter.items[:granted]

    @precondition(lambda self: not self.closed)
    @rule(kind=st.sampled_from(TYPES), weight=st.sampled_from([0.5, 1.0, 3.0]))
    def add_handler(self, kind: type[Item], weight: float) -> None:
        before = self.layout.lane_for(kind())
        self.layout.register(kind, self, weight)
        assert self.layout.lane_for(kind()) is before

    @rule(kind=st.sampled_from(TYPES))
    def remove_handler(self, kind: type[Item]) -> None:
        self.layout.unregister(kind)

    @rule(owners=st.lists(st.integers(0, TASKS - 1), min_size=12, max_size=12))
    def reassign(self, owners: list[int]) -> None:
        self.layout.reassign(owners[: len(self.layout.partitions)])

    @rule(index=st.integers(0, TASKS - 1))
    def drain_a_cycle(self, index: int) -> None:
        task = self.tasks[index]
        try:
            partition = task.ready.get_nowait()
        except Empty:
            return
        if partition is not None:
            task.cycle(partition)

    @rule(index=st.integers(0, TASKS - 1), absent_only=st.booleans())
    def idle(self, index: int, absent_only: bool) -> None:
        self.tasks[index].make_idle_calls(0.0, absent_only=absent_only)

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        self.closed = True
        self.settle_waiters()
        self.layout.freeze()
        for partition in self.layout.partitions:
            partition.close()
        for line in self.waiting.values():
            for waiter in line:
                assert waiter.woken
                self.accepted[waiter.lane.registration.type] += waiter.items[: waiter.granted]
            line.clear()
        for partition in self.layout.partitions:
            wake_owner(partition.asleep)

    def settle_waiters(self) -> None:
        for line in self.waiting.values():
            while line and line[0].granted == len(line[0].items):
                waiter = line.popleft()
                self.accepted[waiter.lane.registration.type] += waiter.items

    @invariant()
    def waiters_were_served_in_order(self) -> None:
        self.settle_waiters()
        for line in self.waiting.values():
            assert all(waiter.granted == 0 for waiter in list(line)[1:])

    @invariant()
    def the_slots_add_up_and_the_bound_holds(self) -> None:
        for partition in self.layout.partitions:
            held = partition.used()[0]
            assert held <= CAPACITY
            assert held + partition._spare + len(partition.credits) == CAPACITY

    @invariant()
    def every_partition_has_one_owner(self) -> None:
        owned = [partition for task in self.tasks for partition in task.partitions]
        assert sorted(partition.index for partition in owned) == [p.index for p in self.layout.partitions]
        assert all(partition in partition.owner.partitions for partition in owned)

    def tokens(self) -> list[int]:
        """How many tokens of each partition are asleep, ready, or kept since the partition saw its last item."""
        ready: list[Partition] = []
        for task in self.tasks:
            for _ in range(task.ready.qsize()):
                partition = task.ready.get_nowait()
                task.ready.put(partition)
                if partition is not None:
                    ready.append(partition)
        return [
            len(partition.asleep) + ready.count(partition) + self.quiet.count(partition)
            for partition in self.layout.partitions
        ]

    @invariant()
    def every_partition_has_one_token_and_nothing_is_held_by_a_sleeping_one(self) -> None:
        assert set(self.tokens()) == {1}
        for partition in self.layout.partitions:
            if partition.asleep:
                assert not partition.has_items()

    @invariant()
    def everything_handed_over_was_accepted_once_and_in_order(self) -> None:
        for kind, handed in self.handed.items():
            numbers = [item.number for item in handed]
            waiting = [
                item.number
                for line in self.waiting.values()
                for waiter in line
                if waiter.lane.registration.type is kind
                for item in waiter.items[: waiter.granted]
            ]
            accepted = [item.number for item in self.accepted[kind]]
            assert len(set(numbers)) == len(numbers)
            assert set(numbers) <= {*accepted, *waiting}

    def teardown(self) -> None:
        if not self.closed:
            self.close()
        while any(not task.ready.empty() for task in self.tasks):
            for index in range(TASKS):
                self.drain_a_cycle(index)
        assert sorted(partition.index for partition in self.quiet) == [p.index for p in self.layout.partitions]
        for kind, accepted in self.accepted.items():
            assert sorted(item.number for item in self.handed[kind]) == sorted(item.number for item in accepted)


QueueMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
TestQueueAgainstItsModel = QueueMachine.TestCase
