"""A disk that fills up or fails, at every single call that the queue makes of it."""

import errno
import logging
import random
import threading

import pytest

from penstock import DiskFailed, DiskFull, Durability, FastQueue, FastQueueConfig, FullBehavior
from penstock.spool.config import Order
from penstock.testing import FakeClock, wait_until
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles

LEVELS = pytest.mark.parametrize("durability", list(Durability), ids=lambda level: str(level.value))


class Workload:
    """Some life of a queue on a disk that may refuse; remembers what was accepted and what was done with."""

    def __init__(self, durability: Durability) -> None:
        self.files = FakeFiles()
        self.config = FastQueueConfig(
            durability=durability, inmemory_blocks=4, chunk_size=300, write_buffer_size=100, meta_sync_interval=3600
        )
        self.queue = FastQueue("q", self.config, files=self.files)
        self.accepted: dict[int, bytes] = {}
        self.doubtful: dict[int, bytes] = {}
        self.refused = 0

    def run(self) -> None:
        for i in range(12):
            self.push(b"a%02d" % i * 10)
            if i % 3 == 2:
                self.take(2)
        self.push(*[b"b%02d" % i * 9 for i in range(21)])  # seven frames, four chunks
        self.try_to(self.queue.flush)
        self.take(19)
        for i in range(6):
            self.push(b"c%02d" % i * 8)
        self.try_to(self.queue.flush)

    def push(self, *blocks: bytes) -> None:
        before = self.queue._state.backlog.next_sequence
        try:
            self.accepted.update(zip(self.queue.push_many(blocks), blocks, strict=True))
        except (DiskFull, DiskFailed):
            self.refused += 1
            self.doubtful.update(zip(range(before, self.queue._state.backlog.next_sequence), blocks, strict=False))

    def take(self, most: int) -> None:
        leases = self.queue.lease(most)
        self.queue.ack(leases)
        for lease in leases:
            assert lease.data == (self.accepted | self.doubtful)[lease.sequence]
            self.accepted.pop(lease.sequence, None)
            self.doubtful.pop(lease.sequence, None)

    def try_to(self, call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except (DiskFull, DiskFailed):
            self.refused += 1

    def reopen(self) -> None:
        FastQueue("q", self.config, files=self.files).close()

    def check(self, blocks: list[bytes]) -> None:
        """All that was accepted, in order; of what a failed sync left in doubt, anything."""
        assert [block for block in blocks if block not in self.doubtful.values()] == list(self.accepted.values())
        assert set(blocks) <= {*self.accepted.values(), *self.doubtful.values()}


def calls_of(durability: Durability) -> int:
    workload = Workload(durability)
    workload.files.calls.clear()
    workload.run()
    return len(workload.files.calls)


@LEVELS
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("length", [1, 15])
def test_no_failing_call_costs_a_block_that_was_accepted(durability: Durability, code: int, length: int) -> None:
    for number in range(calls_of(durability)):
        workload = Workload(durability)
        workload.files.fail(number, code, until=number + length)
        workload.run()
        workload.files.heal()
        workload.push(b"after")
        assert b"after" in workload.accepted.values(), "service resumes"
        workload.check(drain(workload.queue))
        assert len(workload.queue) == workload.queue.size_bytes == 0
        workload.queue.close()


@LEVELS
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_restart_after_a_failing_call_finds_what_was_accepted(durability: Durability, code: int) -> None:
    for number in range(calls_of(durability)):
        workload = Workload(durability)
        workload.files.fail(number, code)
        workload.run()
        workload.files.heal()
        workload.queue.close()
        with FastQueue("q", workload.config, files=workload.files) as queue:
            workload.check(drain(queue))


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_kill_after_a_failing_call_finds_what_was_accepted(durability: Durability, code: int) -> None:
    for number in range(calls_of(durability)):
        workload = Workload(durability)
        workload.files.fail(number, code)
        workload.run()
        workload.files.kill()
        workload.queue._syncer.close()
        workload.files.heal()
        with FastQueue("q", workload.config, files=workload.files) as queue:
            blocks = drain(queue)
            assert [b for b in blocks if b in workload.accepted.values()] == list(workload.accepted.values())


def test_a_failed_sync_tells_every_pusher_that_shared_it_and_the_next_ones_are_safe() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.FSYNC, meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    queue.push(b"before")
    files.fail(1, errno.EIO)  # the write goes well, the sync behind it does not
    with pytest.raises(DiskFailed, match="what was accepted before is safe"):
        queue.push(b"in doubt")
    queue.push(b"after")
    assert queue.stats().chunks == 2  # the file whose sync has failed is not trusted again
    assert queue.stats().disk_failures == 1
    queue._syncer.close()
    files.cut_power(random.Random(0))
    with FastQueue("q", config, files=files) as queue:
        assert [block for block in drain(queue) if block != b"in doubt"] == [b"before", b"after"]


def test_block_waits_for_room_on_the_disk_and_goes_on_when_there_is() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, full_behavior=FullBehavior.BLOCK, meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    files.fail(0, until=10**9)
    pushed: list[int] = []
    thread = threading.Thread(target=lambda: pushed.append(queue.push(b"patient", timeout=30)))
    thread.start()
    wait_until(lambda: queue._state._waiting_to_push)
    files.heal()
    queue._syncer.run_once()
    thread.join()
    assert len(pushed) == 1
    assert queue.pop() == b"patient"
    queue.close()


def test_block_gives_up_on_a_full_disk_after_its_timeout() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, full_behavior=FullBehavior.BLOCK, meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    files.fail(0, until=10**9)
    with pytest.raises(DiskFull):
        queue.push(b"x", timeout=0.01)
    files.heal()
    queue.close()


def test_a_queue_on_a_full_disk_opens_drains_and_frees_its_chunks() -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, chunk_size=300, compression="none", meta_sync_interval=3600)
    with FastQueue("q", config, files=files) as queue:
        for i in range(20):
            queue.push(b"%02d" % i * 50)
    chunks = len(files.names("q"))
    # Everything that would take room fails; to cut and to delete does not.
    files._fault = lambda call, number: errno.ENOSPC if call in ("write", "create", "sync") else None
    queue = FastQueue("q", config, files=files)
    assert drain(queue) == [b"%02d" % i * 50 for i in range(20)]
    queue._syncer.run_once()
    assert len(files.names("q")) < chunks / 2
    files.heal()
    queue.close()
    with FastQueue("q", config, files=files) as queue:
        assert queue.pop() is None


def test_close_on_a_full_disk_says_so_and_can_be_done_again() -> None:
    files = FakeFiles()
    config = FastQueueConfig(meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    queue.push(b"in memory")
    files.fail(0, until=10**9)
    with pytest.raises(DiskFull):
        queue.close()
    files.heal()
    queue.push(b"still open")
    queue.close()
    with FastQueue("q", config, files=files) as queue:
        assert drain(queue) == [b"in memory", b"still open"]


def test_a_disk_that_fails_is_logged_once_and_again_when_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    files = FakeFiles()
    queue = FastQueue("q", FastQueueConfig(meta_sync_interval=3600, stale_flush=0), files=files, clock=FakeClock())
    files.fail(0, errno.EIO, until=10**9)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            queue.push(b"x")
            queue.ack(queue.lease())
            queue._syncer.run_once()
        assert [r.message.split(".")[0] for r in caplog.records] == ["Queue cannot sync"]
        assert queue.stats().disk_failures == 5
        files.heal()
        queue._syncer.run_once()
    assert [r.message.split(".")[0] for r in caplog.records] == ["Queue cannot sync", "Queue syncs again"]
    queue.close()


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_a_disk_that_cannot_be_read_for_a_while_costs_nothing(order: Order) -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, write_buffer_size=100, meta_sync_interval=3600, order=order)
    queue = FastQueue("q", config, files=files)
    queue.push_many([b"%02d" % i * 20 for i in range(10)])
    nacked = queue.lease(3)
    queue.nack(nacked[1])
    files.reads_fail = True
    for call in (queue.lease, queue.peek):
        with pytest.raises(DiskFailed):
            call()
    assert queue.stats().size == 10
    files.reads_fail = False
    blocks = [lease.data for lease in queue.lease(100)]
    assert sorted(blocks) == sorted({b"%02d" % i * 20 for i in range(10)} - {nacked[0].data, nacked[2].data})
    queue.close()


@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_a_block_that_cannot_be_read_to_be_evicted_costs_the_new_one_only(order: Order) -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, max_size=3, meta_sync_interval=3600, order=order)
    queue = FastQueue("q", config, files=files)
    for i in range(3):
        queue.push(b"%d" % i)
    for lease in queue.lease(3):
        queue.nack(lease)
    files.reads_fail = True
    with pytest.raises(DiskFailed):
        queue.push(b"refused")
    assert queue.stats().dropped["disk_failed"] == queue.stats().disk_failures == 1
    files.reads_fail = False
    queue.push(b"3")
    assert sorted(drain(queue)) == [b"1", b"2", b"3"]
    queue.close()


def test_a_disk_too_full_to_spill_still_gets_its_done_chunks_back() -> None:
    files = FakeFiles()
    config = FastQueueConfig(
        inmemory_blocks=1, chunk_size=200, compression="none", stale_flush=0, meta_sync_interval=3600
    )
    queue = FastQueue("q", config, files=files)
    for i in range(10):
        queue.push(b"%d" % i * 90)
    chunks = queue.stats().chunks
    for _ in range(8):
        assert queue.pop() is not None
    assert queue.stats().inmemory_blocks == 1
    files._fault = lambda call, number: errno.ENOSPC if call in ("write", "create") else None
    queue._syncer.run_once()
    assert queue.stats().inmemory_blocks == 1
    assert queue.stats().chunks < chunks / 2
    files.heal()
    assert drain(queue) == [b"%d" % i * 90 for i in (8, 9)]
    queue.close()


def test_the_syncer_goes_on_after_a_mistake_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise ZeroDivisionError

    queue = FastQueue("q", FastQueueConfig(meta_sync_interval=0.001), files=FakeFiles())
    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(queue._state, "spill_stale", broken)
        wait_until(lambda: len(calls) > 2)
        monkeypatch.undo()
    assert len([r for r in caplog.records if "for a reason that is not the disk's" in r.getMessage()]) == 1
    queue.close()


def test_a_chunk_that_cannot_be_deleted_is_said_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, chunk_size=100, compression="none", meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    for i in range(4):
        queue.push(b"%d" % i * 60)
    assert len(drain(queue)) == 4
    files._fault = lambda call, number: errno.EACCES if call == "unlink" else None
    with caplog.at_level(logging.WARNING):
        queue.flush()
        queue.flush()
    assert len([r for r in caplog.records if "cannot be deleted" in r.getMessage()]) == 1
    files.heal()
    queue.flush()
    assert queue.stats().chunks == 1
    queue.close()


@LEVELS
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_no_failing_call_while_a_crashed_queue_is_opened_costs_a_block(durability: Durability, code: int) -> None:
    number, calls = 0, 1
    while number < calls:
        workload = Workload(durability)
        workload.run()
        workload.queue.flush()
        workload.files.kill()
        workload.queue._syncer.close()
        last = max(name for name in workload.files.names_now if len(name) == len("q/") + 16)
        workload.files.names_now[last].written += b"torn"
        workload.files.fail(number, code)
        workload.try_to(workload.reopen)
        calls = max(calls, len(workload.files.calls))
        workload.files.heal()
        workload.files.kill()
        with FastQueue("q", workload.config, files=workload.files) as queue:
            workload.check(drain(queue))
        number += 1
    assert number > 5
