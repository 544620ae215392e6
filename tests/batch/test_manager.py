"""The registry: names, consistency, shared schedulers, shutting down."""

import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

import penstock
from penstock import (
    BatchQueueConfig,
    BatchQueueManager,
    BufferStrategy,
    DrainBalancer,
    PartitionPolicy,
    PartitionSelector,
    ThreadPolicy,
)
from penstock.errors import QueueConflict, QueueExists
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.batch.support import A, B, Recorder, config, join_all, run_threads

FIELDS = [field.name for field in fields(BatchQueueConfig)]


@pytest.fixture
def manager() -> Iterator[BatchQueueManager]:
    manager = BatchQueueManager()
    yield manager
    manager.shutdown_all(5.0)


def test_the_process_has_one_manager_of_its_own() -> None:
    assert isinstance(penstock.queues, BatchQueueManager)


def test_a_name_is_taken_once(manager: BatchQueueManager) -> None:
    queue = manager.create("l1", config())

    assert manager.get("l1") is queue
    assert manager.get("l2") is None
    assert manager.names() == ["l1"]
    with pytest.raises(QueueExists, match="'l1' exists already"):
        manager.create("l1", config())


def test_get_or_create_gives_all_threads_the_same_queue(manager: BatchQueueManager) -> None:
    queues = []
    join_all(run_threads(*(lambda: queues.append(manager.get_or_create("shared", config())) for _ in range(8))))

    assert len(set(queues)) == 1


def test_the_other_mode_of_dispatch_is_a_conflict(manager: BatchQueueManager) -> None:
    manager.create("handlers", config())
    manager.create("consumer", config(consumer=print))

    with pytest.raises(QueueConflict, match="'handlers' dispatches to handlers by type"):
        manager.get_or_create("handlers", config(consumer=print))
    with pytest.raises(QueueConflict, match="'consumer' has one consumer"):
        manager.get_or_create("consumer", config())


def test_other_differences_are_warned_about_and_the_first_settings_stay(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    queue = manager.create("l1", config(buffer_size=10))
    manager.get_or_create("l1", config(buffer_size=10))
    assert caplog.text == ""

    again = manager.get_or_create("l1", config(buffer_size=20, strategy=BufferStrategy.IF_POSSIBLE))

    assert again is queue
    assert queue.config.buffer_size == 10
    assert "setting=buffer_size has=10 asked=20" in caplog.text
    assert "setting=strategy has=BufferStrategy.BLOCKING asked=BufferStrategy.IF_POSSIBLE" in caplog.text


def test_every_setting_that_differs_is_warned_about(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    others: dict[str, Any] = {
        "threads": ThreadPolicy.fixed(2), "partitions": PartitionPolicy.fixed(3), "buffer_size": 4, "buffer_bytes": 5,
        "selector": PartitionSelector.round_robin(), "size_of": sys.getsizeof, "consumer": repr, "error_handler": max,
        "strategy": BufferStrategy.IF_POSSIBLE, "min_idle": 0.002, "max_idle": 0.06, "max_batch": 7,
        "balancer": DrainBalancer.cost_weighted(), "balance_interval": 8.0, "shutdown_timeout": 9.0,
    }  # fmt: skip
    manager.create("l1", config(consumer=print))
    manager.get_or_create("l1", config(**others))
    manager.create("io", config(shared_scheduler=("pool", ThreadPolicy.fixed(1))))
    manager.get_or_create("io", config())

    warned = {name for name in FIELDS if f" setting={name} " in caplog.text}
    assert warned == set(FIELDS)
    assert set(FIELDS) == {*others, "shared_scheduler"}


def test_shutting_down_one_queue_drains_and_forgets_it(manager: BatchQueueManager) -> None:
    queue = manager.create("l1", config())
    handler = Recorder()
    queue.add_handler(A, handler)
    queue.produce_many([A()] * 10)

    assert manager.shutdown("l1")
    assert manager.get("l1") is None
    assert len(handler.items) == 10
    assert manager.shutdown("l1")  # there is none any more
    manager.create("l1", config())


def test_shutting_down_all_stops_all_producers_before_the_first_queue_is_drained(manager: BatchQueueManager) -> None:
    first, second = manager.create("first", config()), manager.create("second", config())
    accepted_late: list[bool] = []
    first.add_handler(A, lambda batch: accepted_late.append(second.produce(B())) if not first.running else None)
    hold = threading.Event()
    blocker = Recorder(hold)
    first.add_handler(B, blocker)
    first.produce(B())
    assert blocker.entered.wait(10)
    first.produce(A())
    threads = run_threads(lambda: manager.shutdown_all())
    wait_until(lambda: not second.running)
    hold.set()
    join_all(threads)

    assert accepted_late == [False]
    assert manager.names() == []


def shared(name: str = "io", threads: int = 2, **settings: object) -> penstock.BatchQueueConfig:
    return config(shared_scheduler=(name, ThreadPolicy.fixed(threads)), **settings)


def test_queues_share_the_threads_of_a_scheduler_made_on_first_use(manager: BatchQueueManager) -> None:
    consumers = [Recorder() for _ in range(6)]
    for index, consumer in enumerate(consumers):
        manager.create(f"peer-{index}", shared("share", consumer=consumer)).produce_many([A()] * 100)
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-share")}
    wait_until(lambda: all(len(consumer.items) == 100 for consumer in consumers))

    assert names == {"penstock-share-0", "penstock-share-1"}
    assert set().union(*(consumer.threads for consumer in consumers)) <= names


def test_another_policy_for_a_scheduler_is_warned_about_and_the_first_stays(
    manager: BatchQueueManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.create("one", shared("again", threads=1))
    manager.create("two", shared("again", threads=3))

    assert "Scheduler exists with another policy" in caplog.text
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("penstock-again")]) == 1


def test_a_handler_that_blocks_one_shared_thread_leaves_the_others_to_the_rest(manager: BatchQueueManager) -> None:
    hold = threading.Event()
    slow, quick = Recorder(hold), Recorder()
    manager.create("slow", shared(consumer=slow)).produce(A())
    assert slow.entered.wait(10)
    manager.create("quick", shared(consumer=quick)).produce(A())

    wait_until(lambda: quick.items)
    hold.set()


def test_a_shared_queue_is_drained_by_one_thread_at_a_time(manager: BatchQueueManager) -> None:
    handler = Recorder()
    queue = manager.create("many", shared(threads=4, partitions=PartitionPolicy.fixed(8), consumer=handler))
    join_all(run_threads(*(lambda: [queue.produce(A()) for _ in range(2000)] for _ in range(4))))
    assert manager.shutdown("many")

    assert len(handler.items) == 8000
    assert not handler.overlapped


def test_a_scheduler_outlives_its_queues_and_ends_with_shutdown_all(manager: BatchQueueManager) -> None:
    manager.create("one", shared("lasting"))
    manager.shutdown("one")
    alive = [thread for thread in threading.enumerate() if thread.name.startswith("penstock-lasting")]
    assert len(alive) == 2

    handler = Recorder()
    manager.create("two", shared("lasting", consumer=handler)).produce(A())
    assert manager.shutdown_all()
    assert len(handler.items) == 1
    assert not any(thread.is_alive() for thread in alive)


def test_idle_calls_reach_the_handlers_of_shared_queues(manager: BatchQueueManager) -> None:
    handlers = [Recorder() for _ in range(3)]
    for index, handler in enumerate(handlers):
        manager.create(f"idle-{index}", shared(consumer=handler))
    wait_until(lambda: all(handler.idle_calls >= 3 for handler in handlers))

    assert not any(handler.overlapped for handler in handlers)


def test_a_shared_thread_never_waits_for_room_that_only_it_could_make(manager: BatchQueueManager) -> None:
    answers: list[bool] = []
    target = manager.create("target", shared("loop", threads=1, buffer_size=1, consumer=Recorder()))
    relay = manager.create(
        "relay", shared("loop", threads=1, consumer=lambda batch: answers.extend(target.produce(A()) for _ in range(2)))
    )
    relay.produce(A())
    wait_until(lambda: len(answers) == 2)

    assert answers == [True, False]


def test_a_manager_tells_telemetry_about_all_its_queues(manager: BatchQueueManager) -> None:
    queue = manager.create("l1", config(buffer_size=100))
    queue.add_handler(A, Recorder())
    queue.produce_many([A()] * 3)
    wait_until(lambda: queue.stats().types[A].consumed == 3)
    telemetry = Telemetry()
    telemetry.watch(manager.samples)

    rendered = telemetry.render().decode()

    assert 'penstock_batch_queue_consumed_total{queue="l1",type="A"} 3.0' in rendered
    assert 'penstock_batch_queue_capacity{queue="l1"} 100.0' in rendered
    assert 'penstock_batch_queue_used_percentage{queue="l1"} 0.0' in rendered
    assert 'penstock_batch_queue_thread_items_total{queue="l1",thread="0"} 3.0' in rendered


def test_statistics_add_up_and_show_the_fullest_partitions(manager: BatchQueueManager) -> None:
    hold = threading.Event()
    queue = manager.create("l1", config(partitions=PartitionPolicy.fixed(3), buffer_size=10))
    handler = Recorder(hold)
    queue.add_handler(A, handler)
    queue.add_handler(B, Recorder())
    queue.produce(A())
    assert handler.entered.wait(10)
    queue.produce_many([A()] * 2)
    queue.produce_many([B()] * 7)
    stats = queue.stats()
    hold.set()

    assert (stats.total_used, stats.total_capacity, stats.total_used_percentage) == (9, 30, 30.0)
    assert [(partition.index, partition.used) for partition in stats.top_n(2)] == [(1, 7), (0, 2)]
    assert stats.top_n(1)[0].used_percentage == 70.0
    assert stats.types[A].produced == 3
    assert "running" in repr(queue)


def test_a_queue_that_was_closed_by_hand_leaves_its_name_to_the_next() -> None:
    manager = BatchQueueManager()
    manager.create("name", config()).close()

    second = manager.get_or_create("name", config())
    assert second.running
    second.close()
    assert manager.create("name", config()).running
    assert manager.shutdown_all()
