"""The moments that threads rarely hit, each brought about on purpose: between two steps of the drain protocol."""

import threading
from collections.abc import Iterator
from typing import Any

from penstock import BatchQueueConfig, BatchQueueManager, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.batch.drain import DrainTask, wake_owner
from penstock.batch.layout import PartitionLayout
from penstock.batch.partition import Partition
from penstock.batch.waiting import ThreadProduceWaiter
from penstock.testing import FakeClock, wait_until
from tests.batch.support import A, B, Recorder, join_all, open_queue, run_threads


def task_without_a_thread(**settings: Any) -> tuple[DrainTask, PartitionLayout]:
    config = BatchQueueConfig(threads=ThreadPolicy.fixed(1), **settings)
    merges = config.resolved_selector.kind != "type_hash"
    task = DrainTask("test", 0, config, FakeClock(), merges=merges, on_quiet=lambda partition: None, on_cycle=None)
    return task, PartitionLayout(config, (task,), config.partitions.resolve(1))


class InterruptedPlace(list[Partition]):
    """A token's place where something happens just before the token is put back."""

    def __init__(self, happening: Any) -> None:
        super().__init__()
        self.happening = happening

    def append(self, token: Partition) -> None:
        happening, self.happening = self.happening, None
        if happening is not None:
            happening()
        super().append(token)


def test_an_item_that_comes_just_before_the_token_is_put_back_is_drained() -> None:
    task, layout = task_without_a_thread()
    handler = Recorder()
    layout.register(A, handler, 1.0)
    lane = layout.lane_for(A())
    # The producer of the second item sees no token, so it wakes no thread.
    lane.partition.asleep = InterruptedPlace(lambda: lane.items.append(A(0, 1)))
    lane.items.append(A(0, 0))
    task.ready.get_nowait()  # the nudge of a handler that wants to be called when idle

    task.cycle(lane.partition)

    assert task.ready.get_nowait() is lane.partition
    task.cycle(lane.partition)
    assert [item.number for item in handler.items] == [0, 1]


def two_tasks_without_threads() -> tuple[DrainTask, DrainTask, PartitionLayout]:
    config = BatchQueueConfig(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2))
    first, second = (
        DrainTask("test", index, config, FakeClock(), merges=False, on_quiet=lambda partition: None, on_cycle=None)
        for index in range(2)
    )
    return first, second, PartitionLayout(config, (first, second), 2)


def received(task: DrainTask) -> list[Partition]:
    """What has been sent to `task`, without the nudges."""
    return [entry for entry in iter_ready(task) if entry is not None]


def iter_ready(task: DrainTask) -> Iterator[Partition | None]:
    while not task.ready.empty():
        yield task.ready.get_nowait()


def test_a_partition_whose_handler_is_called_idle_is_not_drained_by_its_new_owner_before_that_is_over() -> None:
    first, second, layout = two_tasks_without_threads()
    consumed: list[Any] = []
    steps: list[str] = []

    class Moving:
        def consume(self, batch: list[Any]) -> None:
            consumed.extend(batch)

        def on_idle(self) -> None:
            layout.reassign([1, 1])
            lane.items.append(A())
            wake_owner(partition.asleep)
            for arrived in received(second):
                second.cycle(arrived)
            steps.append(f"consumed {len(consumed)} during the call")

    layout.register(A, Moving(), 1.0)
    lane = layout.lane_for(A())
    partition = lane.partition

    first.make_idle_calls(0.0)  # the token goes to the new owner when the call is over
    (arrived,) = received(second)
    second.cycle(arrived)

    assert steps == ["consumed 0 during the call"]
    assert len(consumed) == 1


def test_a_partition_is_not_held_up_by_idle_calls_of_other_partitions() -> None:
    first, _, layout = two_tasks_without_threads()
    consumed: list[Any] = []

    class Moving:
        def consume(self, batch: list[Any]) -> None:
            pass

        def on_idle(self) -> None:
            layout.reassign([1, 0])
            wake_owner(lane.partition.asleep)
            for arrived in received(first):
                first.cycle(arrived)
            assert len(consumed) == 1

    layout.register(A, Moving(), 1.0)
    layout.register(B, consumed.extend, 1.0)
    lane = layout.lane_for(B())
    lane.items.append(B())

    first.make_idle_calls(0.0)

    assert len(consumed) == 1


def test_a_new_owner_calls_no_handler_idle_whose_last_batch_is_being_consumed() -> None:
    first, second, layout = two_tasks_without_threads()
    calls: list[str] = []

    class Moving:
        def consume(self, batch: list[Any]) -> None:
            layout.reassign([1, 1])
            second.make_idle_calls(0.0)
            calls.append("consumed")

        def on_idle(self) -> None:
            calls.append("idle")

    layout.register(A, Moving(), 1.0)
    lane = layout.lane_for(A())
    lane.items.append(A())
    lane.partition.asleep.clear()

    first.cycle(lane.partition)
    assert calls == ["consumed"]
    (arrived,) = received(second)
    second.cycle(arrived)
    second.make_idle_calls(0.0)

    assert calls == ["consumed", "idle"]


def test_a_partition_that_moves_on_its_way_to_its_new_owner_is_passed_on() -> None:
    first, second, layout = two_tasks_without_threads()
    handler = Recorder()
    layout.register(A, handler, 1.0)
    lane = layout.lane_for(A())
    lane.items.append(A())
    layout.reassign([1, 1])
    wake_owner(lane.partition.asleep)
    (arriving,) = received(second)
    layout.reassign([0, 1])
    second.cycle(arriving)
    assert handler.items == []
    for partition in received(first):
        first.cycle(partition)

    assert len(handler.items) == 1
    assert lane.partition.asleep == [lane.partition]
    assert first.idle_partitions == (lane.partition,)


def test_a_close_that_comes_during_an_idle_call_is_seen_after_it() -> None:
    task, layout = task_without_a_thread()

    class Closing(Recorder):
        def on_idle(self) -> None:
            lane.partition.close()  # it finds no token to submit the partition with

    layout.register(A, Closing(), 1.0)
    lane = layout.lane_for(A())

    task.make_idle_calls(0.0)

    assert received(task) == [lane.partition]


def test_idle_calls_that_were_due_while_a_partition_was_ready_are_made_in_its_next_cycle() -> None:
    task, layout = task_without_a_thread()
    busy, quiet = Recorder(), Recorder()
    layout.register(A, busy, 1.0)
    layout.register(B, quiet, 1.0)
    partition = layout.lane_for(A()).partition
    for _ in range(3):
        partition.offer(layout.lane_for(A()), [A()], None, None)
        wake_owner(partition.asleep)
        task.make_idle_calls(0.0, absent_only=True)
        (ready,) = received(task)
        task.cycle(ready)

    assert len(busy.items) == 3
    assert busy.idle_calls == 0
    assert quiet.idle_calls == 3


def test_a_close_that_comes_just_before_the_token_is_put_back_is_seen() -> None:
    task, layout = task_without_a_thread()
    lane = layout.lane_for(A())
    lane.partition.asleep = InterruptedPlace(lane.partition.close)  # it finds no token to submit the partition with

    task.cycle(lane.partition)

    assert task.ready.get_nowait() is lane.partition


def test_handlers_that_several_partitions_feed_get_one_idle_call_per_round() -> None:
    task, layout = task_without_a_thread(partitions=PartitionPolicy.fixed(3), selector=PartitionSelector.round_robin())
    handlers = {A: Recorder(), B: Recorder()}
    for kind, handler in handlers.items():
        layout.register(kind, handler, 1.0)
        for _ in range(3):
            layout.lane_for(kind())  # in turn, so each of them has a lane in every partition
    homes = {layout.registrations[kind].lanes[0].partition for kind in handlers}
    assert len(homes) == 2
    assert all(len(partition.lanes) == 2 for partition in layout.partitions)

    for _ in range(4):
        task.make_idle_calls(0.0)

    assert [handler.idle_calls for handler in handlers.values()] == [4, 4]


def test_a_handler_is_not_called_idle_while_another_thread_consumes_for_it() -> None:
    release = threading.Event()
    handler = Recorder(release)
    with open_queue(
        threads=ThreadPolicy.fixed(2),
        partitions=PartitionPolicy.fixed(2),
        selector=PartitionSelector.by_key(lambda item: item.number),
        min_idle=0.0001,
        max_idle=0.0001,
    ) as queue:
        queue.add_handler(A, handler)
        home = queue._layout.registrations[A].lanes[0].partition
        queue.produce(A(0, 1 - home.index))  # goes to the other partition, whose thread is busy with it from now on
        assert handler.entered.wait(10)
        calls, pace = handler.idle_calls, home.owner.pace
        for _ in range(5):
            wait_until(lambda due=pace.due: pace.due > due)  # type: ignore[misc]

        assert handler.idle_calls <= calls + 1  # one may have been under way
        release.set()
    assert not handler.overlapped


def test_a_small_item_does_not_overtake_a_large_one_that_waits_for_bytes() -> None:
    release = threading.Event()
    handler = Recorder(release)
    with open_queue(buffer_bytes=10) as queue:
        queue.add_handler(bytes, handler)
        queue.produce(b"first")
        assert handler.entered.wait(10)
        queue.produce(b"12345")
        threads = run_threads(lambda: queue.produce(b"large one"))
        wait_until(lambda: queue._layout.partitions[0]._waiters)

        assert not queue.produce(b"x", timeout=0.0)
        release.set()
        join_all(threads)
    assert handler.items == [b"first", b"12345", b"large one"]


def test_two_threads_of_a_scheduler_never_run_one_queue_at_once() -> None:
    release = threading.Event()
    consumer = Recorder(release)
    manager = BatchQueueManager()
    queue = manager.create(
        "one",
        BatchQueueConfig(
            shared_scheduler=("pair", ThreadPolicy.fixed(2)), partitions=PartitionPolicy.fixed(2), consumer=consumer
        ),
    )
    queue.produce(A())
    assert consumer.entered.wait(10)
    queue.produce(B())  # the other partition: the free thread takes it, and must leave it to the busy one
    (task,) = queue._tasks
    wait_until(lambda: task.ready.qsize() == 1)
    assert not consumer.overlapped
    release.set()

    assert manager.shutdown_all()
    assert len(consumer.items) == 2
    assert not consumer.overlapped


def test_no_credit_is_handed_out_while_a_producer_is_in_line() -> None:
    """A later producer would take it without the lock, past the waiters."""
    _, layout = task_without_a_thread(buffer_size=4)
    layout.register(A, Recorder(), 1.0)
    lane = layout.lane_for(A())
    partition = lane.partition
    in_line: list[int] = []

    class Watched(list[Any]):
        def __iadd__(self, credits: Any) -> Any:  # type: ignore[misc]
            if credits:
                in_line.append(len(partition._waiters))
            return super().__iadd__(credits)

    partition.credits = Watched()
    partition.offer(lane, [A(), A(), A(), A()], None, None)
    waiters = [ThreadProduceWaiter(lane, (A(),), None) for _ in range(2)]
    for waiter in waiters:
        partition.offer(lane, waiter.items, None, waiter)
    _, woken, _ = partition.take(lane, None)

    assert woken == waiters
    assert in_line == []
    assert partition.offer(lane, (A(),), None, None) == 1
    assert in_line == [0]  # no producer waits any more: the rest becomes credits
