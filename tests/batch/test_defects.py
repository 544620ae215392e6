"""What was found to break elsewhere, each as a test that it does not break here.

The names carry the numbers of the list of known defects: p1 is a hang at shutdown, p2 a wrong pause, and so on.
"""

import threading
from typing import Any

import pytest

from penstock import BufferStrategy, DrainBalancer, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.batch import stats
from penstock.batch.idle import IdlePace
from penstock.batch.partition import Partition
from penstock.testing import wait_until
from tests.batch.support import A, B, Recorder, item_types, join_all, open_queue, run_threads, settle


def test_p1_producers_blocked_at_shutdown_are_answered_false_and_every_true_is_consumed() -> None:
    release = threading.Event()
    with open_queue(buffer_size=4) as queue:
        handler = Recorder(release)
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        assert handler.entered.wait(10)
        answers: list[bool] = []
        threads = run_threads(*(lambda: answers.append(queue.produce(A(1, 0))) for _ in range(12)))
        wait_until(lambda: len(answers) == 4 and len(queue._layout.partitions[0]._waiters) == 8)

        queue.stop_accepting()
        join_all(threads, timeout=5.0)  # although the handler is still busy
        release.set()
        assert queue.close()

    assert sorted(answers) == [False] * 8 + [True] * 4
    assert len(handler.items) == 1 + 4


def test_p2_the_first_pause_after_data_is_min_idle_and_then_doubles_up_to_max_idle() -> None:
    pace = IdlePace(0.001, 0.05, now=0.0)
    pace.had_data(now=10.0)
    pauses, now = [], 10.0
    for _ in range(8):
        pauses.append(round(pace.due - now, 6))
        now = pace.due
        pace.was_called(now)

    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]
    pace.had_data(now)
    assert pace.due - now == pytest.approx(0.001)


def test_p3_a_handler_never_runs_on_two_threads_at_once_while_partitions_grow() -> None:
    types = item_types(400)
    with open_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive(), buffer_size=100) as queue:
        handlers = [Recorder() for _ in types]
        for type_, handler in list(zip(types, handlers))[:4]:
            queue.add_handler(type_, handler)
        stop = threading.Event()
        accepted = [0] * 4

        def produce(index: int) -> None:
            while not stop.is_set():
                for type_ in types[:4]:
                    accepted[index] += queue.produce(type_(index, accepted[index]))

        threads = run_threads(*(lambda index=index: produce(index) for index in range(4)))
        for type_, handler in list(zip(types, handlers))[4:]:
            queue.add_handler(type_, handler)
        stop.set()
        join_all(threads)
        assert queue.close()

    assert len(queue.stats().partitions) == 100 + 300 // 2
    assert not any(handler.overlapped for handler in handlers)
    assert all(len(handler.threads) == 1 for handler in handlers[:4])
    assert sum(len(handler.items) for handler in handlers) == sum(accepted)


def test_p4_partitions_that_grow_after_a_rebalance_are_drained() -> None:
    types = item_types(40)
    with open_queue(
        threads=ThreadPolicy.fixed(4),
        partitions=PartitionPolicy.adaptive(),
        balancer=DrainBalancer.throughput_weighted(),
        balance_interval=3600.0,
    ) as queue:
        handlers = [Recorder() for _ in types]
        for index, (type_, handler) in enumerate(zip(types, handlers)):
            queue.add_handler(type_, handler)
            for heavy in types[: index + 1 : 4]:  # all of them the first thread's, until some are moved
                queue.produce_many([heavy()] * 50)
            settle(queue)
            queue.rebalance()
            owners = [partition.owner.index for partition in queue._layout.partitions]
            owned = [partition for task in queue._tasks for partition in task.partitions]
            assert sorted(partition.index for partition in owned) == list(range(len(owners)))
        assert queue.stats().rebalances > 0
        before = [len(handler.items) for handler in handlers]
        queue.produce_many([type_() for type_ in types for _ in range(50)])
        assert queue.close()

    assert [len(handler.items) - count for handler, count in zip(handlers, before)] == [50] * 40


def test_p5_an_owner_that_never_runs_dry_hands_over_within_one_cycle() -> None:
    in_cycle, next_cycle = threading.Event(), threading.Event()
    with open_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(4)) as queue:
        moved = Recorder()

        def never_dry(batch: list[A]) -> None:
            queue.produce(A())
            in_cycle.set()
            next_cycle.wait(20)

        types = item_types(3)
        queue.add_handler(A, never_dry)  # partition 0, the first thread's
        queue.add_handler(types[0], Recorder())
        queue.add_handler(types[1], moved)  # partition 2, the first thread's too
        queue.produce(A())
        assert in_cycle.wait(10)
        queue.produce(types[1](0, 0))  # it waits for the first thread, which is busy
        queue._layout.reassign([0, 1, 1, 1])
        queue.produce(types[1](0, 1))
        next_cycle.set()
        wait_until(lambda: len(moved.items) == 2)
        queue.produce(types[1](0, 2))
        wait_until(lambda: len(moved.items) == 3)
        queue.remove_handler(A)

    assert moved.threads == {"penstock-test-1"}


def test_p5_a_partition_that_moves_while_it_is_drained_changes_threads_after_that_cycle() -> None:
    release = threading.Event()
    with open_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)) as queue:
        handler = Recorder(release)
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        assert handler.entered.wait(10)
        queue._layout.reassign([1, 1])
        queue.produce(A(0, 1))
        assert len(handler.items) == 0  # the new owner keeps its hands off what the old one is busy with
        release.set()
        wait_until(lambda: len(handler.items) == 2)

    assert not handler.overlapped
    assert handler.threads == {"penstock-test-0", "penstock-test-1"}


def test_p6_one_type_uses_all_threads_when_its_items_go_round() -> None:
    all_inside = threading.Barrier(4, timeout=10)
    with open_queue(
        threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.fixed(4), selector=PartitionSelector.round_robin()
    ) as queue:
        queue.add_handler(A, lambda batch: all_inside.wait())
        for _ in range(4):
            queue.produce(A())
        assert queue.close()

    assert queue.stats().types[A].errors == 0  # the barrier was passed: four threads were inside together


def test_p6_one_consumer_uses_all_threads_without_being_told() -> None:
    all_inside = threading.Barrier(4, timeout=10)
    with open_queue(
        threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.fixed(4), consumer=lambda batch: all_inside.wait()
    ) as queue:
        for _ in range(4):
            queue.produce(A())
        assert queue.close()

    assert queue.stats().types[object].errors == 0


def test_p6_a_full_partition_beside_idle_threads_is_not_passed_over_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    with open_queue(
        threads=ThreadPolicy.fixed(4),
        partitions=PartitionPolicy.fixed(4),
        buffer_size=1,
        strategy=BufferStrategy.IF_POSSIBLE,
    ) as queue:
        handler = Recorder(release)
        queue.add_handler(A, handler)
        while queue.produce(A()):
            pass
        release.set()

    assert "fewer types than threads" in caplog.text
    assert "threads=4 used=1" in caplog.text


@pytest.mark.parametrize("selector", [PartitionSelector.type_hash(), PartitionSelector.round_robin()])
def test_p7_idle_calls_come_from_the_thread_that_owns_the_handlers_partition(selector: PartitionSelector) -> None:
    seen: dict[str, set[str]] = {"A": set(), "B": set()}

    class Idle:
        def __init__(self, name: str) -> None:
            self.name = name

        def consume(self, batch: list[Any]) -> None:
            pass

        def on_idle(self) -> None:
            seen[self.name].add(threading.current_thread().name)

    with open_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(2),
        selector=selector,
        max_idle=0.005,
    ) as queue:
        queue.add_handler(A, Idle("A"))
        queue.add_handler(B, Idle("B"))
        homes = {
            name: f"penstock-test-{queue._layout.registrations[type_].lanes[0].partition.owner.index}"
            for name, type_ in (("A", A), ("B", B))
        }
        wait_until(lambda: seen["A"] and seen["B"])
        assert seen == {name: {home} for name, home in homes.items()}
        assert homes["A"] != homes["B"]
        partition = queue._layout.registrations[A].lanes[0].partition
        owners = [0, 0] if partition.owner.index else [1, 1]
        queue._layout.reassign(owners)
        seen["A"].clear()
        wait_until(lambda: seen["A"])
        assert seen["A"] <= {f"penstock-test-{owners[0]}", homes["A"]}
        seen["A"].clear()
        wait_until(lambda: seen["A"])
        assert seen["A"] == {f"penstock-test-{owners[0]}"}


def test_p8_placement_is_even_and_the_same_in_every_run() -> None:
    types = item_types(100)
    layouts = []
    for _ in range(2):
        with open_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive()) as queue:
            for type_ in types:
                queue.add_handler(type_, Recorder())
            layouts.append([queue._layout.registrations[type_].lanes[0].partition.index for type_ in types])

    assert layouts[0] == layouts[1]
    assert sorted(layouts[0]) == list(range(100))  # one to one fills every partition


def test_p8_many_types_share_few_partitions_evenly() -> None:
    with open_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.thread_multiply(2)) as queue:
        for type_ in item_types(80):
            queue.add_handler(type_, Recorder())

        assert [len(partition.lanes) for partition in queue._layout.partitions] == [10] * 8


def test_p9_statistics_are_computed_when_asked_for_and_never_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_now(*arguments: object) -> None:
        raise AssertionError("statistics on the way of an item")

    with open_queue() as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        monkeypatch.setattr(stats, "batch_queue_snapshot", not_now)
        monkeypatch.setattr(Partition, "used", not_now)
        monkeypatch.setattr(Partition, "counts", not_now)
        queue.produce_many([A()] * 100)
        wait_until(lambda: len(handler.items) == 100)
        monkeypatch.undo()

        wait_until(lambda: queue.stats().types[A].consumed == 100)  # counted when the handler has returned


def test_p10_an_item_is_consumed_at_once_and_not_at_the_next_poll() -> None:
    """With pauses of an hour, polling would take as long. How little waking takes is measured in bench/."""
    with open_queue(min_idle=3600.0, max_idle=3600.0) as queue:
        arrived = threading.Event()
        queue.add_handler(A, lambda batch: arrived.set())
        for _ in range(200):
            queue.produce(A())
            assert arrived.wait(30)
            arrived.clear()


def test_p11_an_idle_queue_does_nothing() -> None:
    """Threads without an `on_idle` to call have no reason ever to wake up: none of them waits with a timeout."""
    with open_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive()) as queue:
        for type_ in item_types(100):
            queue.add_handler(type_, lambda batch: None)
        timeouts = [task.idle_timeout() for task in queue._tasks]

    assert timeouts == [None] * 4


def test_the_counters_that_were_missing_are_there() -> None:
    with open_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(4),
        balancer=DrainBalancer.throughput_weighted(),
        balance_interval=3600.0,
    ) as queue:
        queue.add_handler(A, lambda batch: None)
        queue.produce(B())
        queue.produce_many([A()] * 50)
        settle(queue)
        names = {sample.name for sample in queue.stats().samples()}
        assert queue.stats().types[B].unregistered == 1
        assert queue.stats().batches_by_size["100"] == 1
        assert queue.rebalance() == bool(queue.stats().rebalances)

    assert {
        "penstock_batch_queue_unregistered_total",
        "penstock_batch_queue_batches_total",
        "penstock_batch_queue_rebalances_total",
        "penstock_batch_queue_used_percentage",
    } <= names


def test_the_limits_that_were_missing_are_there() -> None:
    with open_queue(buffer_size=3, buffer_bytes=1000, max_batch=2) as queue:
        queue.add_handler(bytes, lambda batch: None)

        assert queue.produce_many([b"a", b"b", b"c", b"d"], timeout=10.0) == 4
        assert queue.produce(b"e", timeout=10.0)
