"""The time of day is set: no block waits for it, no write fails over it."""

import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.testing import FakeClock
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles


class SettableClock(FakeClock):
    """A clock whose time of day can be set, as NTP or an administrator does."""

    offset = 0.0

    def time(self) -> float:
        return self.monotonic() + self.offset


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


def opened(clock: SettableClock, files: FakeFiles, durability: Durability = Durability.MEMORY) -> FastQueue:
    return FastQueue("q", FastQueueConfig(durability=durability, meta_sync_interval=3600), files=files, clock=clock)


def test_a_clock_set_back_does_not_keep_blocks_in_memory(clock: SettableClock) -> None:
    queue = opened(clock, FakeFiles())
    queue.push(b"x")
    clock.offset = -86400.0
    clock.advance(29.0)
    queue._syncer.run_once()
    assert queue.stats().inmemory_blocks == 1
    clock.advance(1.5)
    queue._syncer.run_once()
    assert queue.stats().inmemory_blocks == 0
    queue.close()


def test_a_clock_set_forward_does_not_flush_too_early(clock: SettableClock) -> None:
    queue = opened(clock, FakeFiles())
    queue.push(b"x")
    clock.offset = 86400.0
    queue._syncer.run_once()
    assert queue.stats().inmemory_blocks == 1
    queue.close()


def test_no_block_stays_in_memory_for_longer_than_it_should_while_others_come_and_go(clock: SettableClock) -> None:
    queue = opened(clock, FakeFiles())
    for _ in range(20):
        queue.push(b"quick")
        queue.ack(queue.lease())
        clock.advance(1.0)
        queue._syncer.run_once()
    queue.push(b"slow")
    for second in range(30):
        assert queue.stats().inmemory_blocks == 1, second
        clock.advance(1.0)
        queue._syncer.run_once()
    assert queue.stats().inmemory_blocks == 0
    queue.close()


@pytest.mark.parametrize("step", [-40 * 365 * 86400.0, -3600.0, 3600.0, 40 * 365 * 86400.0])
def test_every_block_keeps_the_time_at_which_it_was_pushed(clock: SettableClock, step: float) -> None:
    files = FakeFiles()
    queue = opened(clock, files)
    times = []
    for offset in (0.0, step, step, 0.0):
        clock.offset = offset
        clock.advance(1.0)
        queue.push(b"x")
        times.append(clock.time())
    queue.close()
    queue = opened(clock, files)
    assert [lease.enqueued_at for lease in queue.lease(10)] == times
    queue.close()


def test_a_delay_does_not_depend_on_the_time_of_day(clock: SettableClock) -> None:
    queue = opened(clock, FakeFiles(), Durability.DISK)
    queue.push(b"x")
    queue.nack(queue.lease()[0], delay=5.0)
    clock.offset = 86400.0
    assert queue.lease() == []
    clock.offset = -86400.0
    clock.advance(5.0)
    assert drain(queue) == [b"x"]
    assert queue.stats().oldest_age == 0.0
    queue.close()
