"""The process that `test_full_disk` starts on a disk of 4 MB: fills it, and brings everything to its destination.

python -m tests.export.full_disk_child <folder on that disk> <durability>
"""

import errno
import os
import sys
from collections import Counter
from pathlib import Path

from penstock.errors import DiskFull
from penstock.export import SendQueue
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
from penstock.spool import Durability, fast_queue
from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving, answer
from tests.export.quick import quick

IN_MEMORY = 20  # blocks
_filler = os.urandom(20_000)


class Rig:
    """A destination that is up or down, and what was pushed for it. Its batches are numbered in their first bytes."""

    def __init__(self, disk: Path, durability: str) -> None:
        self.server = Misbehaving(keep=8)
        with self.server.running():
            pass  # it has a port now, and is down
        self.pushed: list[bytes] = []
        self._others = disk / "others"
        self.config = quick(
            path=disk / "queue",
            durability=Durability(durability),
            workers=4,
            inmemory_blocks=IN_MEMORY,
            meta_sync_interval=0.05,
            chunk_size="512Ki",
            adaptive_enabled=False,
        )

    def open(self) -> SendQueue:
        exporter = OtlpHttpExporter(OtlpHttpConfig(url=self.server.url, compression="none"))
        return SendQueue.open(exporter, self.config).start()

    @property
    def is_in_memory(self) -> bool:
        return self.config.durability is Durability.MEMORY

    def push(self, sender: SendQueue, count: int) -> int:
        """Push so many batches. Returns how many were taken: all of them, unless the queue promises its disk."""
        before = len(self.pushed)
        for number in range(count):
            batch = b"%08d" % (before + number)
            try:
                sender.push(batch + _filler)
            except DiskFull:
                assert not self.is_in_memory
                continue
            self.pushed.append(batch)
        return len(self.pushed) - before

    def fill(self) -> None:
        """Let others have the rest of the disk."""
        handle = os.open(self._others, os.O_CREAT | os.O_WRONLY)
        try:
            while True:
                os.write(handle, bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(handle)

    def clear(self) -> None:
        self._others.unlink()

    def check(self) -> None:
        """Everything that was pushed has arrived, and nothing twice."""
        times = Counter(request.body for request in self.server.requests)
        assert set(times) == set(self.pushed), f"lost: {sorted(set(self.pushed) - set(times))}"
        assert set(times.values()) == {1}, times.most_common(5)


def outage(rig: Rig) -> None:
    """The queue fills the disk, the failover takes the rest if memory is enough, and all that was taken arrives."""
    sender = rig.open()
    taken = rig.push(sender, 300)  # 6 MB
    stats = sender.stats()
    assert stats.queue.disk_full > 0
    assert (stats.failover_size > 0) == rig.is_in_memory
    assert stats.queue.size + stats.failover_size == taken
    assert (taken == 300) == rig.is_in_memory
    rig.fill()
    rig.push(sender, 20)
    with rig.server.running():
        assert sender.flush(30)
        rig.clear()
        assert rig.push(sender, 20) == 20  # only if what was sent has left the disk
        assert sender.flush(30)
    assert sender.stats().data_loss == 0
    sender.close()
    rig.check()


def restart(rig: Rig) -> None:
    """Closed and opened again while others have the whole disk: what it held is there."""
    sender = rig.open()
    rig.push(sender, 50)
    rig.fill()
    try:
        sender.close()
        assert not rig.is_in_memory
    except DiskFull:  # there is no room for what is in memory, or for a meta
        rig.clear()
        sender.close()
        rig.fill()
    assert sender.stats().data_loss == 0
    sender = rig.open()
    assert len(sender) == 50
    with rig.server.running():
        assert sender.flush(30)
    rig.clear()
    sender.close()
    rig.check()


def dead_letters(rig: Rig) -> None:
    """What the destination refuses stays, and is tried again, until there is room for dead letters."""
    fast_queue.DEAD_LETTER_RETRY = 0.02
    sender = rig.open()
    rig.push(sender, 5)
    rig.fill()
    count = 5 + rig.push(sender, IN_MEMORY)
    before = len(rig.server.requests)
    rig.server.behaviours[:] = [answer(400)] * 100_000
    with rig.server.running():
        wait_until(lambda: len(rig.server.requests) > before + 100)
        assert sender.stats().data_loss == 0
        rig.clear()
        assert sender.flush(30)
        assert sender.stats().queue.dead_lettered == count
        rig.server.behaviours.clear()
        rig.server.requests[before:] = []
        assert sender.replay_dead_letters("400") == count
        assert sender.flush(30)
    sender.close()
    rig.check()


if __name__ == "__main__":
    the_rig = Rig(Path(sys.argv[1]), sys.argv[2])
    outage(the_rig)
    restart(the_rig)
    dead_letters(the_rig)
