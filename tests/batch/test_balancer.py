"""Which thread drains which partition: the assignment, and what it does to a running queue."""

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import BatchQueue, DrainBalancer, PartitionPolicy, ThreadPolicy
from penstock.batch.balancer import SKIP_BELOW, _items_of
from penstock.testing import wait_until
from tests.batch.support import (
    A,
    Recorder,
    assert_in_order,
    config,
    item_types,
    join_all,
    open_queue,
    run_threads,
    settle,
)

balancer = DrainBalancer.throughput_weighted()


def per_task(loads: Sequence[float], owners: Sequence[int], tasks: int) -> list[float]:
    totals = [0.0] * tasks
    for load, owner in zip(loads, owners):
        totals[owner] += load
    return totals


def test_the_heaviest_partitions_go_to_different_threads() -> None:
    assigned = balancer.assign([100, 1, 100, 1], [0, 1, 0, 1], 2)

    assert assigned is not None
    assert assigned[0] != assigned[2]
    assert per_task([100, 1, 100, 1], assigned, 2) == [101, 101]


@pytest.mark.parametrize(
    ("loads", "owners", "tasks"),
    [
        ([0, 0, 0], [0, 1, 0], 2),  # nothing came
        ([114, 100], [0, 1], 2),  # nearly even
        ([5, 5], [0, 0], 1),  # no other thread
        ([7, 0], [0, 1], 2),  # one partition is all there is
    ],
)
def test_nothing_moves_where_moving_brings_nothing(loads: list[float], owners: list[int], tasks: int) -> None:
    assert balancer.assign(loads, owners, tasks) is None


def test_a_partition_without_load_stays_where_it_is() -> None:
    assigned = balancer.assign([90, 0, 30, 30, 0], [0, 0, 0, 0, 1], 2)

    assert assigned is not None
    assert (assigned[1], assigned[4]) == (0, 1)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3)), min_size=1, max_size=60))
def test_an_assignment_keeps_every_partition_and_never_makes_the_worst_thread_much_worse(
    partitions: list[tuple[int, int]],
) -> None:
    loads, owners = [load for load, _ in partitions], [owner for _, owner in partitions]
    before = per_task(loads, owners, 4)
    assigned = balancer.assign(loads, owners, 4)
    if assigned is None:
        lightest, heaviest = min(before), max(before)
        nearly_even = lightest and heaviest / lightest < SKIP_BELOW
        assert heaviest == 0 or nearly_even or heaviest <= sum(loads) / 4 + max(loads)
        return
    after = per_task(loads, assigned, 4)
    assert len(assigned) == len(loads)
    assert sum(after) == sum(loads)
    assert max(after) <= sum(loads) / 4 + max(loads)  # what giving to the least loaded guarantees
    assert all(assigned[i] == owners[i] for i, load in enumerate(loads) if not load)


def test_skewed_load_becomes_even_and_nothing_is_lost_or_reordered() -> None:
    types = item_types(48)
    weights = {type_: (24 if index % 4 == 0 else 1) for index, type_ in enumerate(types)}
    with open_queue(
        threads=ThreadPolicy.fixed(4),
        partitions=PartitionPolicy.adaptive(),
        balancer=DrainBalancer.throughput_weighted(),
        balance_interval=3600.0,
    ) as queue:
        handlers = {type_: Recorder() for type_ in types}
        for type_, handler in handlers.items():
            queue.add_handler(type_, handler)
        schedule = random.Random(1).choices(types, list(weights.values()), k=10_000)

        def produce(producer: int, start: int) -> None:
            for number, type_ in enumerate(schedule, start):
                queue.produce(type_(producer, number))

        ratios = []
        for start in (0, 10_000):
            before = queue.stats().thread_items
            join_all(run_threads(*(lambda p=p, start=start: produce(p, start) for p in range(3))))
            settle(queue)
            shares = [after - was for after, was in zip(queue.stats().thread_items, before)]
            ratios.append(max(shares) / min(shares))
            assert queue.rebalance() == (start == 0)
        assert queue.close()

    assert ratios[0] > 10
    assert ratios[1] < SKIP_BELOW
    assert sum(len(handler.items) for handler in handlers.values()) == 60_000
    for handler in handlers.values():
        assert not handler.overlapped
        assert_in_order(handler.items)


def test_a_running_queue_balances_itself() -> None:
    types = item_types(4)
    with open_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(4),
        balancer=DrainBalancer.throughput_weighted(),
        balance_interval=0.005,
    ) as queue:
        for type_ in types:
            queue.add_handler(type_, Recorder())

        def both_of_the_first_thread() -> bool:
            queue.produce_many([types[0]()] * 10)
            queue.produce_many([types[2]()] * 10)
            return queue.stats().rebalances > 0

        wait_until(both_of_the_first_thread)


def test_cost_counts_where_it_is_what_differs() -> None:
    types = item_types(4)
    with open_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(4),
        balancer=DrainBalancer.cost_weighted(),
        balance_interval=3600.0,
    ) as queue:
        # The two slow ones on the first thread, and by far slower than a busy machine makes the others look.
        for index, type_ in enumerate(types):
            queue.add_handler(type_, (lambda batch: time.sleep(0.2)) if index % 2 == 0 else (lambda batch: None))
        for type_ in types:
            queue.produce(type_())
        settle(queue)
        wait_until(lambda: sum(queue.stats().thread_seconds) > 0.35)
        assert queue.rebalance()
        owners = [partition.owner for partition in queue.stats().partitions]

    assert owners[0] != owners[2]


def test_a_queue_of_one_thread_ignores_its_balancer() -> None:
    with open_queue(balancer=balancer, balance_interval=0.001) as queue:
        assert queue._tasks[0]._on_cycle is None
        assert not queue.rebalance()


def test_a_balancer_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(DrainBalancer):
        def assign(self, loads: Sequence[float], owners: Sequence[int], tasks: int) -> list[int] | None:
            return [99 for _ in owners]

    queue = BatchQueue(
        "wrong",
        config(
            threads=ThreadPolicy.fixed(2),
            partitions=PartitionPolicy.fixed(2),
            balancer=Wrong.throughput_weighted(),
            balance_interval=3600.0,
        ),
    )
    assert not queue.rebalance()
    assert [partition.owner for partition in queue.stats().partitions] == [0, 1]
    assert queue.close()
    assert "Balancer failed" in caplog.text


def test_a_batch_that_is_being_taken_counts_once() -> None:
    """Read at the wrong moment it would be missing now, and come twice the next time."""
    with open_queue() as queue:
        lane = queue._layout.lane_for(A())
        partition = lane.partition
        seen: list[float] = []
        with partition._lock:  # the owner is in the middle of `take`
            threads = run_threads(lambda: seen.append(_items_of(partition)))
            threads[0].join(0.05)
            lane.taken += 3
        join_all(threads)

        assert seen == [3.0]
