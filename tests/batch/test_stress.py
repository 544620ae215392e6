"""Everything at once on real threads, switching as often as the interpreter can: the invariants hold."""

import asyncio
import dataclasses
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import (
    BatchQueue,
    BatchQueueConfig,
    BatchQueueManager,
    BufferStrategy,
    DrainBalancer,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from penstock.errors import NoHandler
from penstock.testing import wait_until
from tests.batch.support import Item, Recorder, assert_in_order, item_types, join_all, run_threads


@pytest.fixture(autouse=True)
def _switch_threads_all_the_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Handler(Recorder):
    """Fails now and then, so that some batches go to the error handler."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.failed: list[Any] = []

    def consume(self, batch: list[Any]) -> None:
        super().consume(batch)
        if self.fails and len(self.batches) % 7 == 0:
            raise ValueError("now and then")


class Chaos:
    """Producers of every kind, growth, rebalancing and statistics against one queue, until it is closed."""

    def __init__(self, config: BatchQueueConfig, seed: int) -> None:
        self.queue = BatchQueue("chaos", dataclasses.replace(config, error_handler=self.report))
        self.seed = seed
        self.unregistered: list[Item] = []
        self.types = item_types(24)
        self.handlers = {type_: Handler(fails=index % 5 == 0) for index, type_ in enumerate(self.types)}
        self.accepted: list[Item] = []
        self.over_bound: list[int] = []
        self._add(self.types[:6])

    def report(self, batch: list[Item], error: BaseException) -> None:
        if isinstance(error, NoHandler):  # the type's handler comes later
            self.unregistered += batch

    def _add(self, types: list[type[Item]]) -> None:
        for type_ in types:
            self.queue.add_handler(type_, self.handlers[type_])

    def produce(self, producer: int) -> None:
        dice = random.Random(self.seed * 1000 + producer)
        emits = {type_: self.queue.producer(type_) for type_ in self.types}
        emits_many = {type_: self.queue.batch_producer(type_) for type_ in self.types}
        mine: list[Item] = []
        number = 0
        while self.queue.running:
            number += 10
            kind = dice.choice(self.types[:6] if dice.random() < 0.5 else self.types)
            way = dice.randrange(6)
            if way == 0:
                item = kind(producer, number)
                if self.queue.produce(item):
                    mine.append(item)
            elif way == 1:
                item = kind(producer, number)
                if emits[kind](item):
                    mine.append(item)
            elif way == 2:
                item = kind(producer, number)
                if self.queue.produce(item, timeout=dice.choice([0.0, 0.0005])):
                    mine.append(item)
            elif way == 5:
                items = [kind(producer, number + i) for i in range(10)]
                accepted = emits_many[kind](items, timeout=0.001)
                mine += items[:accepted]
            else:
                one_type = way == 3
                items = [(kind if one_type else dice.choice(self.types))(producer, number + i) for i in range(10)]
                accepted = self.queue.produce_many(items, timeout=0.001)
                mine += items[:accepted]
        self.accepted += mine

    async def produce_async(self, producer: int) -> None:
        number = 0
        while self.queue.running:
            number += 1
            item = self.types[number % len(self.types)](producer, number)
            if await self.queue.produce_async(item, timeout=0.01):
                self.accepted.append(item)

    def disturb(self) -> None:
        dice = random.Random(self.seed)
        for type_ in self.types[6:]:
            self._add([type_])
            self.queue._layout.reassign([dice.randrange(3) for _ in self.queue.stats().partitions])
            self.over_bound += [p.used for p in self.queue.stats().partitions if p.used_percentage > 100]
            self.queue.rebalance()

    def run(self, seconds: float) -> None:
        def coroutines() -> None:
            async def all_of_them() -> None:
                await asyncio.gather(*(self.produce_async(100 + index) for index in range(3)))

            asyncio.run(all_of_them())

        producers = [lambda index=index: self.produce(index) for index in range(5)]
        threads = run_threads(coroutines, *producers)
        disturbing = run_threads(self.disturb)
        threading.Event().wait(seconds)
        join_all(disturbing)
        assert self.queue.close(20.0)
        join_all(threads)

    def check(self) -> None:
        consumed = [item for handler in self.handlers.values() for item in handler.items]
        assert Counter(map(id, consumed + self.unregistered)) == Counter(map(id, self.accepted))
        assert self.over_bound == []
        if self.queue.config.resolved_selector.kind == "type_hash":
            for handler in self.handlers.values():
                assert not handler.overlapped
                assert_in_order(handler.items)
        totals = self.queue.stats().types
        assert sum(counts.produced for counts in totals.values()) == len(self.accepted)
        assert sum(counts.unregistered for counts in totals.values()) == len(self.unregistered)
        for counts in totals.values():
            assert counts.produced == counts.consumed + counts.errors + counts.unregistered


@pytest.mark.parametrize("strategy", list(BufferStrategy))
@pytest.mark.parametrize("buffer_size", [1, 7, 3000])
def test_nothing_is_lost_doubled_reordered_or_run_twice_at_once(strategy: BufferStrategy, buffer_size: int) -> None:
    config = BatchQueueConfig(
        threads=ThreadPolicy.fixed(3),
        partitions=PartitionPolicy.adaptive(2),
        buffer_size=buffer_size,
        strategy=strategy,
        balancer=DrainBalancer.throughput_weighted(),
        balance_interval=0.005,
        min_idle=0.0005,
        max_idle=0.002,
        max_batch=50,
    )
    chaos = Chaos(config, seed=buffer_size)
    chaos.run(seconds=0.4)
    chaos.check()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_in_a_long_campaign(seed: int) -> None:
    dice = random.Random(seed)
    selector = dice.choice(
        [None, None, PartitionSelector.round_robin(), PartitionSelector.by_key(lambda item: item.producer)]
    )
    keyed = selector is not None and selector.kind == "by_key"
    config = BatchQueueConfig(
        threads=ThreadPolicy.fixed(3),
        partitions=PartitionPolicy.fixed(5) if keyed else PartitionPolicy.adaptive(dice.choice([1, 2, 25])),
        selector=selector,
        buffer_size=dice.choice([1, 2, 5, 50, 1500]),
        buffer_bytes=dice.choice([None, None, 10, 100]),
        size_of=lambda item: 1 + item.number % 7,
        strategy=dice.choice(list(BufferStrategy)),
        balancer=dice.choice([DrainBalancer.throughput_weighted(), DrainBalancer.cost_weighted()]),
        balance_interval=0.002,
        min_idle=0.0002,
        max_idle=dice.choice([0.001, 0.012]),
        max_batch=dice.choice([None, 1, 10]),
    )
    chaos = Chaos(config, seed)
    chaos.run(seconds=4.0)
    chaos.check()


def test_bursts_between_idle_calls_meet_none_of_them_and_lose_nothing() -> None:
    """All handlers are called idle; then data comes, and partitions change owners, in the middle of a call."""
    dice = random.Random(7)
    config = BatchQueueConfig(
        threads=ThreadPolicy.fixed(3), partitions=PartitionPolicy.adaptive(), min_idle=0.01, max_idle=0.01
    )
    queue = BatchQueue("bursts", config)
    types = item_types(12)
    handlers = {type_: Recorder() for type_ in types}
    for type_, handler in handlers.items():
        queue.add_handler(type_, handler)
    accepted = [0] * 3

    def burst(producer: int) -> None:
        for _ in range(50):
            accepted[producer] += queue.produce(types[accepted[producer] % 12](producer, accepted[producer]))

    for _ in range(30):
        calls = {type_: handler.idle_calls for type_, handler in handlers.items()}
        wait_until(lambda: all(handlers[type_].idle_calls > before for type_, before in calls.items()))  # noqa: B023
        threads = run_threads(*(lambda index=index: burst(index) for index in range(3)))
        queue._layout.reassign([dice.randrange(3) for _ in types])
        join_all(threads)
    assert queue.close(20.0)

    assert sum(len(handler.items) for handler in handlers.values()) == sum(accepted)
    for handler in handlers.values():
        assert not handler.overlapped
        assert_in_order(handler.items)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("selector", [PartitionSelector.round_robin(), PartitionSelector.by_key(lambda i: i.number)])
def test_spread_queues_lose_and_double_nothing(shared: bool, selector: PartitionSelector) -> None:
    manager = BatchQueueManager()
    threads = ThreadPolicy.fixed(3)
    config = BatchQueueConfig(
        threads=None if shared else threads,
        shared_scheduler=("stress", threads) if shared else None,
        partitions=PartitionPolicy.fixed(5),
        selector=selector,
        buffer_size=11,
        max_batch=20,
        min_idle=0.0005,
        max_idle=0.002,
    )
    queue = manager.create("spread", config)
    types = item_types(3)
    seen: list[Item] = []
    for type_ in types:
        queue.add_handler(type_, seen.extend)
    accepted = [0] * 4
    deadline = time.monotonic() + 0.3

    def produce(index: int) -> None:
        while time.monotonic() < deadline:
            accepted[index] += queue.produce(types[0](index, accepted[index]))
            accepted[index] += queue.produce_many([type_(index, accepted[index]) for type_ in types])

    join_all(run_threads(*(lambda index=index: produce(index) for index in range(4))))
    assert manager.shutdown_all(20.0)

    assert len(seen) == len(set(map(id, seen))) == sum(accepted)
