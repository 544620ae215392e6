"""Full partitions: waiting, refusing, timing out, and never holding more than allowed."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from penstock import BatchQueue, BufferStrategy, PartitionPolicy, PartitionSelector, ThreadPolicy
from penstock.batch.partition import CREDITS
from penstock.errors import BlockTooLarge
from penstock.testing import wait_until
from tests.batch.support import A, B, Recorder, join_all, open_queue, run_threads


class Stuck:
    """A queue whose only handler is inside `consume` until released, so that its partition can be filled."""

    def __init__(self, queue: BatchQueue) -> None:
        self.release = threading.Event()
        self.handler = Recorder(self.release)
        self.queue = queue
        queue.add_handler(A, self.handler)
        queue.produce(A(0, 0))
        assert self.handler.entered.wait(10)


def test_if_possible_answers_false_when_full_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    with open_queue(buffer_size=4, strategy=BufferStrategy.IF_POSSIBLE) as queue:
        stuck = Stuck(queue)
        answers = [queue.produce(A(0, number)) for number in range(1, 8)]
        stuck.release.set()
        queue.close()

    assert answers == [True] * 4 + [False] * 3
    assert [item.number for item in stuck.handler.items] == [0, 1, 2, 3, 4]
    counts = queue.stats().types[A]
    assert (counts.produced, counts.consumed, counts.dropped) == (5, 5, 3)
    assert caplog.text.count("Queue started dropping") == 1


def test_dropping_is_logged_once_until_there_was_room_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with open_queue(buffer_size=4, strategy=BufferStrategy.IF_POSSIBLE) as queue:
        stuck = Stuck(queue)
        while queue.produce(A()):
            pass
        queue.produce(A())
        stuck.release.set()
        wait_until(lambda: "has room again" in caplog.text)

    assert caplog.text.count("Queue started dropping") == 1


def test_blocking_waits_for_room_and_keeps_the_order() -> None:
    with open_queue(buffer_size=2) as queue:
        stuck = Stuck(queue)
        queue.produce_many([A(0, 1), A(0, 2)])
        answers: list[bool] = []
        threads = run_threads(lambda: answers.append(queue.produce(A(0, 3))))
        wait_until(lambda: queue._layout.partitions[0]._waiters)
        assert answers == []
        stuck.release.set()
        join_all(threads)
        queue.close()

    assert answers == [True]
    assert [item.number for item in stuck.handler.items] == [0, 1, 2, 3]


def test_waiters_are_served_in_the_order_in_which_they_came() -> None:
    with open_queue(buffer_size=1) as queue:
        stuck = Stuck(queue)
        queue.produce(A(0, 1))
        line = queue._layout.partitions[0]._waiters
        threads = []
        for number in range(2, 6):
            threads += run_threads(lambda number=number: queue.produce(A(0, number)))  # type: ignore[misc]
            wait_until(lambda number=number: len(line) == number - 1)  # type: ignore[misc]
        stuck.release.set()
        join_all(threads)
        queue.close()

    assert [item.number for item in stuck.handler.items] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("strategy", list(BufferStrategy))
def test_a_timeout_overrides_the_patience_of_the_strategy(strategy: BufferStrategy) -> None:
    with open_queue(buffer_size=1, strategy=strategy) as queue:
        stuck = Stuck(queue)
        assert queue.produce(A(0, 1), timeout=0.0)
        started = time.monotonic()
        assert not queue.produce(A(0, 2), timeout=0.02)
        assert time.monotonic() - started >= 0.02
        assert not queue.produce(A(0, 3), timeout=0.0)
        threads = run_threads(lambda: queue.produce(A(0, 4), timeout=10.0))
        wait_until(lambda: queue._layout.partitions[0]._waiters)
        stuck.release.set()
        join_all(threads)
        queue.close()

    assert [item.number for item in stuck.handler.items] == [0, 1, 4]
    assert queue.stats().types[A].dropped == 2


def test_a_producer_that_timed_out_is_no_longer_in_line() -> None:
    with open_queue(buffer_size=1) as queue:
        stuck = Stuck(queue)
        queue.produce(A(0, 1))
        assert not queue.produce(A(0, 2), timeout=0.001)
        assert not queue._layout.partitions[0]._waiters
        stuck.release.set()


def test_produce_many_takes_lists_tuples_and_generators_of_any_mix() -> None:
    with open_queue(partitions=PartitionPolicy.fixed(2)) as queue:
        for_a, for_b = Recorder(), Recorder()
        queue.add_handler(A, for_a)
        queue.add_handler(B, for_b)
        assert queue.produce_many([]) == 0
        assert queue.produce_many([A(0, 0), A(0, 1)]) == 2
        assert queue.produce_many((A(0, 2), B(0, 0), B(0, 1))) == 3
        assert queue.produce_many(A(0, number) for number in range(3, 3000)) == 2997
        queue.close()

    assert [item.number for item in for_a.items] == list(range(3000))
    assert [item.number for item in for_b.items] == [0, 1]


def test_produce_many_of_more_than_fits_goes_in_as_room_is_made() -> None:
    with open_queue(buffer_size=7) as queue:
        handler = Recorder()
        queue.add_handler(A, handler)
        assert queue.produce_many([A(0, number) for number in range(100)]) == 100
        queue.close()

    assert [item.number for item in handler.items] == list(range(100))


def test_produce_many_says_how_many_found_room() -> None:
    with open_queue(buffer_size=4, strategy=BufferStrategy.IF_POSSIBLE, partitions=PartitionPolicy.fixed(2)) as queue:
        stuck = Stuck(queue)
        other = Recorder()
        queue.add_handler(B, other)
        assert queue.produce_many([A(0, number) for number in range(1, 8)]) == 4
        assert queue.produce_many([A(0, 8), B(0, 0), A(0, 9)]) == 1  # B has room in its own partition
        stuck.release.set()
        queue.close()

    assert [item.number for item in stuck.handler.items] == [0, 1, 2, 3, 4]
    assert queue.stats().types[A].dropped == 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_comes_after_the_first_that_timed_out_is_counted_as_dropped_too(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with open_queue(buffer_size=2, partitions=PartitionPolicy.fixed(2)) as queue:
        stuck = Stuck(queue)
        queue.add_handler(B, Recorder())
        mixed = [A(0, 1), B(0, 0), A(0, 2), A(0, 3), B(0, 1), B(0, 2), A(0, 4)]
        if asynchronous:
            accepted = asyncio.run(queue.produce_many_async(mixed, timeout=0.01))
        else:
            accepted = queue.produce_many(mixed, timeout=0.01)
        stuck.release.set()
        queue.close()

    counts = queue.stats().types
    assert accepted == 3
    assert (counts[A].produced, counts[A].dropped) == (3, 2)
    assert (counts[B].produced, counts[B].dropped) == (1, 2)
    assert caplog.text.count("started dropping") == 1  # B has room, its items were not tried


def test_a_timed_produce_many_accepts_the_first_so_many() -> None:
    with open_queue(buffer_size=4) as queue:
        stuck = Stuck(queue)
        assert queue.produce_many([A(0, number) for number in range(1, 8)], timeout=0.01) == 4
        assert queue.produce_many([A(0, 8), B(0, 9)], timeout=0.01) == 0
        stuck.release.set()
        queue.close()

    assert [item.number for item in stuck.handler.items] == [0, 1, 2, 3, 4]


def test_bulks_use_the_slots_that_single_producers_were_given() -> None:
    with open_queue(buffer_size=CREDITS // 2, strategy=BufferStrategy.IF_POSSIBLE) as queue:
        stuck = Stuck(queue)  # the first item left the rest of the room as credits
        assert queue.produce_many([A() for _ in range(CREDITS)]) == CREDITS // 2
        assert not queue.produce(A())
        stuck.release.set()


def test_a_partition_is_bounded_in_bytes_as_well() -> None:
    with open_queue(buffer_bytes=10, strategy=BufferStrategy.IF_POSSIBLE) as queue:
        hold = threading.Event()
        handler = Recorder(hold)
        queue.add_handler(bytes, handler)
        queue.produce(b"first")
        assert handler.entered.wait(10)
        assert [queue.produce(item) for item in (b"12345", b"123456", b"12345", b"")] == [True, False, True, True]
        stats = queue.stats().partitions[0]
        assert (stats.used, stats.used_bytes, stats.used_percentage) == (3, 10, 100.0)
        hold.set()
        queue.close()

    assert handler.items == [b"first", b"12345", b"12345", b""]
    assert queue.stats().partitions[0].used_bytes == 0


def test_bytes_are_waited_for_like_slots() -> None:
    with open_queue(buffer_bytes=100, size_of=lambda item: item) as queue:
        hold = threading.Event()
        handler = Recorder(hold)
        queue.add_handler(int, handler)
        queue.produce(1)
        assert handler.entered.wait(10)
        assert queue.produce_many([60, 40]) == 2
        threads = run_threads(lambda: queue.produce(100), lambda: queue.produce_many([50, 51]))
        wait_until(lambda: len(queue._layout.partitions[0]._waiters) == 2)
        hold.set()
        join_all(threads)
        assert queue.close()

    assert sorted(handler.items) == [1, 40, 50, 51, 60, 100]
    for batch in handler.batches:
        assert sum(batch) <= 100


def test_an_item_that_could_never_fit_is_an_error() -> None:
    with (
        open_queue(buffer_bytes=4) as queue,
        pytest.raises(BlockTooLarge, match="5 bytes never fits into buffer_bytes=4"),
    ):
        queue.produce(b"12345")


@pytest.mark.parametrize("items", [[b"1", b"12345"], [b"1", "2", b"12345"], [b"1", "2", "3", b"4", "12345"]])
def test_nothing_is_taken_of_a_batch_with_an_item_that_could_never_fit(items: list[object]) -> None:
    with open_queue(buffer_bytes=4) as queue:
        handler = Recorder()
        for kind in (bytes, str):
            queue.add_handler(kind, handler)
        with pytest.raises(BlockTooLarge):
            queue.produce_many(items)
        with pytest.raises(BlockTooLarge):
            asyncio.run(queue.produce_many_async(items))
        assert asyncio.run(queue.produce_many_async([])) == 0
        assert queue.close()

    assert handler.items == []


def _in_a_loop_of_its_own(queue: BatchQueue) -> bool:
    return asyncio.run(queue.produce_async(A()))


@pytest.mark.parametrize("produce", [lambda queue: queue.produce(A()), _in_a_loop_of_its_own])
def test_a_drain_thread_never_waits_for_itself(produce: Callable[[BatchQueue], bool]) -> None:
    answers: list[bool] = []
    with open_queue(buffer_size=1) as queue:

        def echo(batch: list[A]) -> None:
            if not answers:
                answers.extend([produce(queue) for _ in range(3)])

        queue.add_handler(A, echo)
        queue.produce(A())
        wait_until(lambda: len(answers) == 3)
        assert queue.close()

    assert answers == [True, False, False]


def test_the_async_producer_awaits_room_and_the_loop_goes_on() -> None:
    with open_queue(buffer_size=2) as queue:
        stuck = Stuck(queue)

        async def produce() -> tuple[bool, list[bool]]:
            assert await queue.produce_many_async([A(0, 1), A(0, 2)]) == 2
            waiting = asyncio.create_task(queue.produce_async(A(0, 3)))
            ticks = [waiting.done()]
            await asyncio.sleep(0)
            ticks.append(waiting.done())
            assert not await queue.produce_async(A(0, 4), timeout=0.01)
            ticks.append(waiting.done())
            stuck.release.set()
            return await waiting, ticks

        accepted, ticks = asyncio.run(produce())
        queue.close()

    assert accepted
    assert ticks == [False, False, False]
    assert [item.number for item in stuck.handler.items] == [0, 1, 2, 3]


def test_a_cancelled_async_producer_leaves_the_line() -> None:
    with open_queue(buffer_size=1) as queue:
        stuck = Stuck(queue)
        queue.produce(A(0, 1))

        async def give_up() -> None:
            waiting = asyncio.create_task(queue.produce_async(A(0, 2)))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(give_up())
        assert not queue._layout.partitions[0]._waiters
        stuck.release.set()
        queue.close()

    assert [item.number for item in stuck.handler.items] == [0, 1]


def test_many_async_producers_of_mixed_types_lose_nothing() -> None:
    with open_queue(buffer_size=5, threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.fixed(2)) as queue:
        for_a, for_b = Recorder(), Recorder()
        queue.add_handler(A, for_a)
        queue.add_handler(B, for_b)

        async def producer(number: int) -> int:
            accepted = await queue.produce_many_async([(A, B)[i % 2](number, i) for i in range(60)])
            return accepted + sum([await queue.produce_async(A(number, 60 + i)) for i in range(40)])

        async def all_producers() -> list[int]:
            return await asyncio.gather(*(producer(number) for number in range(10)))

        assert asyncio.run(all_producers()) == [100] * 10
        queue.close()

    assert len(for_a.items) + len(for_b.items) == 1000


@pytest.mark.parametrize("selector", [PartitionSelector.type_hash(), PartitionSelector.round_robin()])
def test_the_bound_holds_exactly_under_many_producers(selector: PartitionSelector) -> None:
    """No thread drains while sixteen producers of every kind try: exactly the capacity must have gone in."""
    with open_queue(
        buffer_size=50,
        strategy=BufferStrategy.IF_POSSIBLE,
        selector=selector,
        partitions=PartitionPolicy.fixed(2),
        consumer=(handler := Recorder(release := threading.Event())),
    ) as queue:
        queue.produce(A())
        assert handler.entered.wait(10)
        accepted = [0] * 16
        start = threading.Barrier(16)

        def produce(index: int) -> None:
            start.wait()
            for _ in range(50):
                accepted[index] += queue.produce(A()) if index % 2 else queue.produce_many([A()] * 3)

        join_all(run_threads(*(lambda index=index: produce(index) for index in range(16))))
        held = queue.stats()
        release.set()
        queue.close()

    capacity = 50 if selector.kind == "type_hash" else 100
    assert held.total_used == sum(accepted) == capacity
    assert len(handler.items) == capacity + 1
