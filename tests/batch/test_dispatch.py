"""From produce to consume: by exact type, in batches, with errors contained."""

import logging
import threading
from typing import Any

import pytest

from penstock import BufferStrategy, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.errors import ConfigError, NoHandler, QueueClosed
from penstock.testing import wait_until
from tests.batch.support import A, B, C, Item, Recorder, assert_in_order, open_queue, settle


def test_each_type_reaches_its_own_handler_and_no_other() -> None:
    with open_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.adaptive()) as queue:
        for_a, for_b = Recorder(), Recorder()
        queue.add_handler(A, for_a)
        queue.add_handler(B, for_b)
        items: list[Item] = [A(0, 1), B(0, 2), A(0, 3), B(0, 4)]
        assert all(queue.produce(item) for item in items)
        assert queue.close()

    assert for_a.items == [items[0], items[2]]
    assert for_b.items == [items[1], items[3]]


def test_a_subclass_is_another_type() -> None:
    errors: list[BaseException] = []
    with open_queue(error_handler=lambda batch, error: errors.append(error)) as queue:
        handler = Recorder()
        queue.add_handler(Item, handler)
        queue.produce(A())
        queue.close()

    assert handler.items == []
    assert [type(error) for error in errors] == [NoHandler]


def test_a_plain_function_is_a_handler() -> None:
    seen: list[int] = []
    with open_queue() as queue:
        queue.add_handler(int, seen.extend)
        queue.produce(7)
        queue.close()

    assert seen == [7]


def test_something_that_cannot_consume_is_refused() -> None:
    with open_queue() as queue, pytest.raises(ConfigError, match="consume"):
        queue.add_handler(A, object())  # type: ignore[arg-type]


def test_a_batch_holds_everything_of_its_type_that_has_come() -> None:
    hold = threading.Event()
    with open_queue() as queue:
        handler = Recorder(hold)
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        assert handler.entered.wait(10)
        for number in range(1, 6):
            queue.produce(A(0, number))
        hold.set()
        queue.close()

    assert [len(batch) for batch in handler.batches] == [1, 5]
    assert_in_order(handler.items)


def test_max_batch_bounds_what_one_call_gets() -> None:
    hold = threading.Event()
    with open_queue(max_batch=3) as queue:
        handler = Recorder(hold)
        queue.add_handler(A, handler)
        queue.produce(A(0, 0))
        assert handler.entered.wait(10)
        queue.produce_many([A(0, number) for number in range(1, 8)])
        hold.set()
        queue.close()

    assert [len(batch) for batch in handler.batches] == [1, 3, 3, 1]
    assert_in_order(handler.items)


def test_the_consumer_gets_all_types_in_one_batch_in_their_order() -> None:
    hold = threading.Event()
    consumer = Recorder(hold)
    with open_queue(consumer=consumer) as queue:
        queue.produce(A(0, 0))
        assert consumer.entered.wait(10)
        queue.produce_many([B(0, 1), A(0, 2), C(0, 3)])
        hold.set()
        queue.close()

    assert [len(batch) for batch in consumer.batches] == [1, 3]
    assert_in_order(consumer.items)
    assert queue.stats().types[object].consumed == 4


def test_the_consumer_beats_the_handlers(caplog: pytest.LogCaptureFixture) -> None:
    consumer, handler = Recorder(), Recorder()
    with open_queue(consumer=consumer) as queue:
        queue.add_handler(A, handler)
        assert not queue.remove_handler(A)
        queue.produce(A())
        queue.close()

    assert len(consumer.items) == 1
    assert handler.items == []
    assert "handler ignored" in caplog.text


def test_several_partitions_of_one_thread_make_one_batch() -> None:
    hold = threading.Event()
    consumer = Recorder(hold)
    with open_queue(consumer=consumer, partitions=PartitionPolicy.fixed(4)) as queue:
        queue.produce(A(0, 0))
        assert consumer.entered.wait(10)
        for number in range(1, 9):
            queue.produce(A(0, number))
        hold.set()
        queue.close()

    assert sorted(len(batch) for batch in consumer.batches) == [1, 8]


def test_max_batch_bounds_a_batch_from_several_partitions_too() -> None:
    hold = threading.Event()
    consumer = Recorder(hold)
    with open_queue(consumer=consumer, partitions=PartitionPolicy.fixed(4), max_batch=3) as queue:
        queue.produce(A())
        assert consumer.entered.wait(10)
        for _ in range(8):
            queue.produce(A())
        hold.set()
        assert queue.close()

    assert len(consumer.items) == 9
    assert max(len(batch) for batch in consumer.batches) <= 3


def test_a_failing_handler_costs_its_batch_only_and_the_error_handler_gets_it() -> None:
    failures: list[tuple[list[Any], BaseException]] = []

    def fails(batch: list[A]) -> None:
        raise ValueError("not today")

    with open_queue(error_handler=lambda batch, error: failures.append((batch, error))) as queue:
        fine = Recorder()
        queue.add_handler(A, fails)
        queue.add_handler(B, fine)
        lost, kept = A(), B()
        queue.produce(lost)
        queue.produce(kept)
        queue.close()

    assert [batch for batch, _ in failures] == [[lost]]
    assert isinstance(failures[0][1], ValueError)
    assert fine.items == [kept]
    assert queue.stats().types[A].errors == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_no_exception_of_a_handler_ends_the_drain_thread(error: type[BaseException]) -> None:
    calls: list[int] = []

    def fails_once(batch: list[A]) -> None:
        calls.append(len(batch))
        if len(calls) == 1:
            raise error

    with open_queue() as queue:
        queue.add_handler(A, fails_once)
        queue.produce(A())
        wait_until(lambda: calls)
        queue.produce(A())
        assert queue.close()

    assert calls == [1, 1]


def test_without_an_error_handler_the_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with open_queue() as queue:
        queue.add_handler(int, lambda batch: batch[0] / 0)
        queue.produce(1)
        queue.close()

    assert "Handler failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_error_handler_that_fails_is_logged_and_the_queue_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def worse(batch: list[Any], error: BaseException) -> None:
        raise RuntimeError("the error handler fails too")

    with open_queue(error_handler=worse) as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        queue.produce(B())
        queue.produce(A())
        queue.close()

    assert len(handler.items) == 1
    assert "the error handler fails too" in caplog.text


def test_items_without_a_handler_are_counted_logged_once_and_handed_to_the_error_handler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handed: list[Any] = []
    with open_queue(error_handler=lambda batch, error: handed.extend(batch)) as queue:
        for _ in range(3):
            queue.produce(A())
            settle(queue)
        queue.close()

    assert len(handed) == 3
    assert queue.stats().types[A].unregistered == 3
    assert caplog.text.count("Dropping items without a handler") == 1


def test_a_handler_that_comes_before_the_drain_gets_what_came_before_it() -> None:
    hold = threading.Event()
    with open_queue() as queue:
        busy, late = Recorder(hold), Recorder()
        queue.add_handler(A, busy)
        queue.produce(A())
        assert busy.entered.wait(10)
        queue.produce(B())
        queue.add_handler(B, late)
        hold.set()
        queue.close()

    assert len(late.items) == 1


def test_a_second_handler_of_a_type_takes_the_place_of_the_first() -> None:
    with open_queue() as queue:
        first, second = Recorder(), Recorder()
        queue.add_handler(A, first)
        queue.add_handler(A, second)
        queue.produce(A())
        queue.close()

    assert first.items == []
    assert len(second.items) == 1


def test_removing_a_handler_says_whether_there_was_one() -> None:
    with open_queue() as queue:
        handler = Recorder()
        queue.add_handler(A, handler)

        assert queue.remove_handler(A)
        assert not queue.remove_handler(A)
        assert not queue.remove_handler(B)
        queue.produce(A())
        queue.close()

    assert handler.items == []
    assert queue.stats().types[A].unregistered == 1


def test_removing_handlers_takes_their_weight_away_but_no_partition() -> None:
    with open_queue(partitions=PartitionPolicy.adaptive()) as queue:
        for type_ in (A, B, C):
            queue.add_handler(type_, Recorder())
        assert len(queue.stats().partitions) == 3
        queue.remove_handler(A)
        queue.add_handler(Item, Recorder())

        assert len(queue.stats().partitions) == 3


def test_a_weight_must_be_positive_and_a_closed_queue_takes_no_handler() -> None:
    with open_queue() as queue:
        with pytest.raises(ConfigError, match="weight must be a number > 0, got 0"):
            queue.add_handler(A, Recorder(), weight=0)
        queue.close()
        with pytest.raises(QueueClosed):
            queue.add_handler(A, Recorder())


def test_items_of_one_key_go_to_one_partition_in_order() -> None:
    handler = Recorder()
    by_producer = PartitionSelector.by_key(lambda item: item.producer)
    with open_queue(
        threads=ThreadPolicy.fixed(4),
        partitions=PartitionPolicy.fixed(4),
        selector=by_producer,
        consumer=handler.consume,
    ) as queue:
        for number in range(200):
            for producer in range(8):
                queue.produce(A(producer, number))
        queue.close()

    per_batch = [{item.producer % 4 for item in batch} for batch in handler.batches]
    assert all(len(partitions) == 1 for partitions in per_batch)
    assert_in_order(handler.items)
    assert len(handler.items) == 1600


def test_fewer_partitions_than_threads_mean_fewer_threads_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_queue(threads=ThreadPolicy.fixed(4)) as queue:
        assert len(queue.stats().thread_items) == 1

    assert "using fewer threads" in caplog.text


def test_a_producer_handle_needs_no_lookup_and_answers_like_produce() -> None:
    with open_queue(buffer_size=10) as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        emit = queue.producer(A)
        assert all(emit(A(0, number)) for number in range(100))
        queue.close()
        assert not emit(A(0, 100))

    assert [item.number for item in handler.items] == list(range(100))


def test_a_batch_producer_answers_like_produce_many() -> None:
    with open_queue(buffer_size=10, strategy=BufferStrategy.IF_POSSIBLE) as queue:
        entered, proceed = threading.Event(), threading.Event()
        seen: list[int] = []

        def handler(batch: list[A]) -> None:
            entered.set()
            assert proceed.wait(30)
            seen.extend(item.number for item in batch)

        queue.add_handler(A, handler)
        emit = queue.batch_producer(A)
        assert emit([A(0, 0)]) == 1
        assert entered.wait(30)
        assert emit([]) == 0
        assert emit(A(0, number) for number in range(1, 5)) == 4
        accepted = emit([A(0, number) for number in range(5, 25)])
        assert accepted < 20
        proceed.set()
        queue.close()
        assert emit([A(0, 100)]) == 0

    assert seen == list(range(5 + accepted))


def test_producer_handles_work_with_every_selector_and_bound() -> None:
    bounds: tuple[dict[str, Any], ...] = (
        {"selector": PartitionSelector.round_robin(), "partitions": PartitionPolicy.fixed(3)},
        {"buffer_bytes": 100, "size_of": lambda item: 10},
    )
    for settings in bounds:
        with open_queue(**settings) as queue:
            handler = Recorder()
            queue.add_handler(A, handler)
            emit = queue.producer(A)
            assert all(emit(A(0, number)) for number in range(50))
            assert queue.batch_producer(A)([A(0, number) for number in range(50)]) == 50
            queue.close()
        assert len(handler.items) == 100
