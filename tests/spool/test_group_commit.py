"""Group commit at `fsync`: pushes that come while a sync runs share the next write and the next sync.

Invariants: a push returns only after a sync that began when its block was written; a block that could not be written
is in no count and never delivered; what one pusher pushes in turn comes out in that order.
"""

import asyncio
import errno
import random
import threading
from collections.abc import Callable, Coroutine
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from penstock import DiskFailed, DiskFull, Durability, FastQueue, FastQueueConfig, FullBehavior, QueueClosed, QueueFull
from penstock.testing import wait_until
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles

CONFIG = FastQueueConfig(durability=Durability.FSYNC, meta_sync_interval=3600)


class HeldFiles(FakeFiles):
    """A disk whose syncs wait while `held` is set; they and the writes can be counted in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()
        self.syncing = threading.Event()

    def sync(self, handle: int, /) -> None:
        self.syncing.set()
        assert self.go_on.wait(60)
        super().sync(handle)


class Pushers:
    """A queue of which the first pusher is in the middle of its sync, with others that come during it."""

    def __init__(self, config: FastQueueConfig = CONFIG) -> None:
        self.files = HeldFiles()
        self.queue = FastQueue("q", config, files=self.files)
        self.outcomes: dict[bytes, int | Exception] = {}
        self._threads: list[threading.Thread] = []
        self.queue.push(b"first")  # opens the chunk
        self.files.go_on.clear()
        self.files.syncing.clear()
        self.start(b"leader")
        assert self.files.syncing.wait(60)
        self.files.calls.clear()

    def start(self, block: bytes) -> None:
        self._threads.append(threading.Thread(target=self._push, args=(block,)))
        self._threads[-1].start()

    def _push(self, block: bytes) -> None:
        try:
            self.outcomes[block] = self.queue.push(block)
        except Exception as error:
            self.outcomes[block] = error

    def come(self, count: int) -> list[bytes]:
        """So many come while the sync runs; their blocks."""
        blocks = [b"block %d" % i for i in range(count)]
        before = len(self.queue)
        for at, block in enumerate(blocks):
            self.start(block)
            wait_until(lambda at=at: len(self.queue) == before + at + 1 or len(self.outcomes) > at)  # type: ignore[misc]
        return blocks

    def finish(self) -> None:
        self.files.go_on.set()
        for thread in self._threads:
            thread.join()


def test_pushes_during_a_sync_share_the_next_write_and_sync() -> None:
    pushers = Pushers()
    blocks = pushers.come(20)
    pushers.finish()
    assert pushers.files.calls == ["sync", "write", "sync"]
    assert [pushers.outcomes[block] for block in blocks] == list(range(2, 22))
    assert drain(pushers.queue) == [b"first", b"leader", *blocks]
    pushers.queue.close()


def test_no_push_returns_before_the_sync_that_covers_it() -> None:
    pushers = Pushers()
    blocks = pushers.come(5)
    assert pushers.outcomes == {}
    pushers.finish()
    pushers.queue._syncer.close()
    pushers.files.cut_power(random.Random(1))
    with FastQueue("q", CONFIG, files=pushers.files) as queue:
        assert drain(queue) == [b"first", b"leader", *blocks]


def test_a_write_that_fails_raises_in_every_push_that_shared_it_and_counts_nothing() -> None:
    pushers = Pushers()
    blocks = pushers.come(5)
    pushers.files.fail(1, errno.ENOSPC)  # 0 is the leader's sync
    pushers.finish()
    assert pushers.outcomes[b"leader"] == 1
    assert all(isinstance(pushers.outcomes[block], DiskFull) for block in blocks)
    stats = pushers.queue.stats()
    assert (stats.size, stats.bytes, stats.pushed, stats.dropped["disk_full"]) == (2, 11, 2, 5)
    assert pushers.queue.push(b"after") == 2
    assert drain(pushers.queue) == [b"first", b"leader", b"after"]
    pushers.queue.close()


def test_a_sync_that_fails_raises_in_every_push_that_shared_it() -> None:
    pushers = Pushers()
    blocks = pushers.come(5)
    pushers.files.fail(2, errno.EIO)  # 0 is the leader's sync, 1 the write
    pushers.finish()
    assert pushers.outcomes[b"leader"] == 1
    assert all(isinstance(pushers.outcomes[block], DiskFailed) for block in blocks)
    assert pushers.queue.stats().dropped["disk_failed"] == 5
    assert pushers.queue.stats().dropped["disk_full"] == 0
    pushers.queue.push(b"after")
    pushers.queue._syncer.close()
    pushers.files.cut_power(random.Random(2))
    with FastQueue("q", CONFIG, files=pushers.files) as queue:
        assert [block for block in drain(queue) if block not in blocks] == [b"first", b"leader", b"after"]


def test_under_block_a_full_disk_is_tried_again_and_nothing_comes_twice() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.FSYNC, full_behavior=FullBehavior.BLOCK, meta_sync_interval=3600)
    with FastQueue("q", config, files=files) as queue:
        files.fail(0, until=10**9)
        threads = [threading.Thread(target=queue.push, args=(b"%d" % i,), kwargs={"timeout": 60}) for i in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: queue._state._waiting_to_push == 4)
        files.heal()
        queue._syncer.run_once()
        for thread in threads:
            thread.join()
        assert sorted(drain(queue)) == [b"0", b"1", b"2", b"3"]


def test_a_staged_block_is_evicted_before_a_leased_one() -> None:
    files = FakeFiles()
    with FastQueue("q", FastQueueConfig(durability=Durability.FSYNC, max_size=2), files=files) as queue:
        queue.push(b"on lease")
        leases = queue.lease()
        queue._state.stage_at_once(b"staged")
        queue.push(b"newest")
        queue.ack(leases)
        assert drain(queue) == [b"newest"]
        assert (queue.stats().acked, queue.dropped) == (2, 1)


def test_a_staged_block_whose_pusher_is_gone_is_written_by_the_syncer() -> None:
    files = FakeFiles()
    queue = FastQueue("q", CONFIG, files=files)
    queue._state.stage_at_once(b"interrupted")
    queue._syncer.run_once()
    queue._syncer.close()
    files.cut_power(random.Random(0))
    with FastQueue("q", CONFIG, files=files) as queue:
        assert drain(queue) == [b"interrupted"]


def test_control_c_while_a_round_is_written_leaves_the_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FakeFiles()
    with FastQueue("q", CONFIG, files=files) as queue:

        def interrupted(*arguments: Any) -> int:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(files, "pwritev", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.push(b"never")
        assert len(queue) == 0
        queue.push(b"after")
        assert drain(queue) == [b"after"]


def test_many_threads_keep_their_own_order_over_reopenings(tmp_path: Path) -> None:
    config = FastQueueConfig(durability=Durability.FSYNC, compression="none")
    for life in range(3):
        with FastQueue(tmp_path, config) as queue:

            def push(name: int, life: int = life, queue: FastQueue = queue) -> None:
                for number in range(20):
                    queue.push(b"%d %d" % (name, life * 20 + number))

            threads = [threading.Thread(target=push, args=(name,)) for name in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    with FastQueue(tmp_path, config) as queue:
        seen: dict[int, list[int]] = {}
        for block in drain(queue):
            name, number = map(int, block.split())
            seen.setdefault(name, []).append(number)
    assert seen == {name: list(range(60)) for name in range(16)}


# -- coroutines ----------------------------------------------------------------------------------------------------


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


async def turns_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in a thread
        await asyncio.sleep(0)


def test_coroutines_share_a_write_and_a_sync_and_keep_their_order() -> None:
    files = FakeFiles()
    queue = FastQueue("q", CONFIG, files=files)

    async def push(name: int) -> list[int]:
        return [await queue.push_async(b"%d %d" % (name, number)) for number in range(10)]

    async def push_all() -> list[list[int]]:
        return await asyncio.gather(*(push(name) for name in range(20)))

    queue.push(b"opens the chunk")
    files.calls.clear()
    sequences = run(push_all())
    assert sorted(chain.from_iterable(sequences)) == list(range(1, 201))
    assert all(mine == sorted(mine) for mine in sequences)
    assert files.calls.count("write") == files.calls.count("sync") <= 40  # 10 if the loop is always faster
    queue._syncer.close()
    files.cut_power(random.Random(0))
    with FastQueue("q", CONFIG, files=files) as reopened:
        blocks = drain(reopened)[1:]
    for name in range(20):
        assert [b for b in blocks if b.startswith(b"%d " % name)] == [b"%d %d" % (name, i) for i in range(10)]


def test_a_cancelled_coroutine_cancels_no_other() -> None:
    files = HeldFiles()
    queue = FastQueue("q", CONFIG, files=files)

    async def main() -> list[int]:
        files.go_on.clear()
        tasks = [asyncio.create_task(queue.push_async(b"%d" % i)) for i in range(3)]
        await turns_until(lambda: len(queue) == 3)
        tasks[0].cancel()
        files.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return [await tasks[1], await tasks[2]]

    assert run(main()) == [1, 2]
    assert drain(queue) == [b"0", b"1", b"2"]
    queue.close()


@pytest.mark.parametrize(("call", "error"), [(0, DiskFull), (1, DiskFull)])
def test_coroutines_hear_that_the_disk_refuses(call: int, error: type[Exception]) -> None:
    files = FakeFiles()
    queue = FastQueue("q", CONFIG, files=files)
    queue.push(b"before")
    files.fail(call, errno.ENOSPC, until=10**9)

    async def main() -> list[Any]:
        return await asyncio.gather(*(queue.push_async(b"%d" % i) for i in range(5)), return_exceptions=True)

    assert [type(outcome) for outcome in run(main())] == [error] * 5
    assert queue.stats().dropped["disk_full"] == 5
    files.heal()
    run(queue.push_async(b"after"))
    assert [block for block in drain(queue) if not block.isdigit()] == [b"before", b"after"]
    queue.close()


@pytest.mark.parametrize("durability", list(Durability))
def test_what_coroutines_push_comes_out_in_the_order_of_their_calls(durability: Durability, tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(durability=durability)) as queue:

        async def main() -> list[int]:
            return await asyncio.gather(*(queue.push_async(b"%d" % i) for i in range(500)))

        assert run(main()) == list(range(500))
        assert drain(queue) == [b"%d" % i for i in range(500)]


def test_a_full_disk_lets_the_loop_go_on() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, full_behavior=FullBehavior.BLOCK, meta_sync_interval=3600)
    with FastQueue("q", config, files=files) as queue:

        async def main() -> None:
            files.fail(0, until=10**9)
            pushing = asyncio.create_task(queue.push_async(b"patient", timeout=60))
            await turns_until(lambda: queue._state._waiting_to_push == 1)
            files.heal()
            queue._syncer.run_once()
            await pushing

        run(main())
        assert drain(queue) == [b"patient"]


@pytest.mark.parametrize("durability", list(Durability))
def test_a_full_queue_lets_the_loop_go_on(durability: Durability) -> None:
    config = FastQueueConfig(durability=durability, max_size=1, full_behavior=FullBehavior.BLOCK)
    with FastQueue("q", config, files=FakeFiles()) as queue:

        async def main() -> int:
            await queue.push_async(b"first")
            second = asyncio.create_task(queue.push_async(b"second", timeout=60))
            await turns_until(lambda: queue._state._waiting_to_push == 1)  # the loop turns: that is the test
            assert queue.pop() == b"first"
            return await second

        assert run(main()) == 1
        with pytest.raises(QueueFull):
            run(queue.push_async(b"third", timeout=0))
        assert drain(queue) == [b"second"]


@pytest.mark.parametrize("durability", list(Durability))
def test_a_closed_queue_refuses_coroutines(durability: Durability) -> None:
    queue = FastQueue("q", FastQueueConfig(durability=durability), files=FakeFiles())
    queue.close()
    with pytest.raises(QueueClosed):
        run(queue.push_async(b"late"))


def test_a_queue_closed_between_staging_and_waiting_has_the_block() -> None:
    files = FakeFiles()
    queue = FastQueue("q", CONFIG, files=files)

    async def main() -> None:
        found = queue._state.stage_at_once(b"just in time")
        assert found is not None
        _, staged, gathering = found
        queue.close()
        await queue._syncer.wait_for_async(gathering)
        assert staged.error is None

    run(main())
    with FastQueue("q", CONFIG, files=files) as reopened:
        assert drain(reopened) == [b"just in time"]
