"""The durable queue on an event loop: coroutines lease without a thread, and leave a closed queue behind them."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock import FastQueue, FastQueueConfig, Lease, QueueClosed
from penstock.spool.block_condition import SpoolCondition

T = TypeVar("T")
LONG = 60.0  # seconds: no test lasts as long, unless it waits for nothing


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, LONG))


async def until_waiting(queue: FastQueue, count: int = 1) -> None:
    while queue._state._not_empty.waiting < count:  # noqa: ASYNC110 - nothing tells when it waits
        await asyncio.sleep(0)


def test_a_coroutine_gets_what_a_thread_pushes_while_it_waits(tmp_path: Path) -> None:
    async def main() -> list[bytes]:
        async with FastQueue(tmp_path / "queue", FastQueueConfig(durability="disk")) as queue:
            threads = threading.active_count()
            waiting = asyncio.create_task(queue.lease_async(10, timeout=LONG))
            await until_waiting(queue)
            assert threading.active_count() == threads
            pusher = threading.Thread(target=queue.push, args=(b"block",))
            pusher.start()
            leases = await waiting
            queue.ack(leases)
            pusher.join()
            return [lease.data for lease in leases]

    assert run(main()) == [b"block"]
    with FastQueue(tmp_path / "queue") as again:  # it was closed, and the ack is known
        assert len(again) == 0


def test_many_coroutines_share_what_comes_each_block_once(tmp_path: Path) -> None:
    async def main() -> list[int]:
        async with FastQueue(tmp_path / "queue") as queue:
            waiting = [asyncio.create_task(queue.lease_async(timeout=LONG)) for _ in range(50)]
            await until_waiting(queue, 50)
            queue.push_many([b"%d" % number for number in range(50)])
            return [int(lease.data) for leases in await asyncio.gather(*waiting) for lease in leases]

    assert sorted(run(main())) == list(range(50))


def test_without_a_timeout_or_after_it_the_answer_is_an_empty_list(tmp_path: Path) -> None:
    async def main() -> tuple[list[Lease], list[Lease], int]:
        async with FastQueue(tmp_path / "queue") as queue:
            found = await queue.lease_async(), await queue.lease_async(timeout=0.01)
            return *found, queue._state._not_empty.waiting

    assert run(main()) == ([], [], 0)


def test_a_block_that_is_due_again_wakes_a_coroutine(tmp_path: Path) -> None:
    async def main() -> int:
        async with FastQueue(tmp_path / "queue") as queue:
            queue.push(b"block")
            (lease,) = await queue.lease_async()
            queue.nack(lease, delay=0.02)
            (again,) = await queue.lease_async(timeout=LONG)
            return again.attempts

    assert run(main()) == 2


def test_a_cancelled_lease_takes_nothing(tmp_path: Path) -> None:
    async def main() -> bytes:
        async with FastQueue(tmp_path / "queue") as queue:
            waiting = asyncio.create_task(queue.lease_async(timeout=LONG))
            await until_waiting(queue)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            queue.push(b"block")
            (lease,) = await queue.lease_async()
            return lease.data

    assert run(main()) == b"block"


def test_close_wakes_a_coroutine_that_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with FastQueue(tmp_path / "queue") as queue:
            waiting = asyncio.create_task(queue.lease_async(timeout=LONG))
            await until_waiting(queue)
        with pytest.raises(QueueClosed):
            await waiting

    run(main())


def test_a_loop_that_has_ended_disturbs_no_push() -> None:
    lock = threading.Lock()
    condition = SpoolCondition(lock)

    async def begin_to_wait() -> None:
        with lock:
            condition.new_future()

    run(begin_to_wait())
    with lock:
        condition.notify()
        assert condition.waiting == 1
