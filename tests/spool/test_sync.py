"""Syncs that fail or are interrupted: no push reports a block as safe that is not, and nothing is forgotten."""

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock import DiskFailed, Durability, FastQueue, FastQueueConfig
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles


class RefusingFiles(FakeFiles):
    """Raises `refuse` once, in place of the next sync."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: BaseException | None = None

    def sync(self, handle: int, /) -> None:
        if self.refuse is not None:
            refused, self.refuse = self.refuse, None
            raise refused
        super().sync(handle)


class RenamingFiles(FakeFiles):
    """Does something after each rename."""

    then: Callable[[], object] | None = None

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if self.then is not None:
            self.then()


def test_the_failed_sync_of_one_chunk_does_not_forget_the_others() -> None:
    files = RefusingFiles()
    config = FastQueueConfig(durability=Durability.DISK, chunk_size=100, compression="none", meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    for i in range(4):
        queue.push(b"%d" % i * 60)
    files.refuse = OSError(errno.EIO, "of the first chunk")
    with pytest.raises(DiskFailed):
        queue.flush()
    queue.flush()
    queue._syncer.close()
    files.cut_power(random.Random(3))
    with FastQueue("q", config, files=files) as queue:
        assert drain(queue)[-3:] == [b"%d" % i * 60 for i in (1, 2, 3)]


def test_an_interrupted_sync_reports_no_block_as_safe() -> None:
    files = RefusingFiles()
    config = FastQueueConfig(durability=Durability.FSYNC, meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    interrupted, following = queue._state._gathering, b"next"
    files.refuse = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        queue.push(b"leader")
    with pytest.raises(OSError, match="interrupted"):
        queue._syncer.wait_for(interrupted)
    queue.push(following)
    queue._syncer.close()
    files.cut_power(random.Random(0))
    with FastQueue("q", config, files=files) as queue:
        assert drain(queue) == [b"leader", b"next"]


def test_control_c_between_the_writes_of_a_batch_leaves_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, chunk_size=200, write_buffer_size=100, meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    queue.push(b"before")
    written, writes = files.pwritev, iter(range(100))

    def interrupted(*arguments: Any) -> int:
        if next(writes) == 2:
            raise KeyboardInterrupt
        return written(*arguments)

    monkeypatch.setattr(files, "pwritev", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.push_many([b"never %d" % i * 9 for i in range(9)])
    monkeypatch.undo()
    queue.push(b"after")
    assert drain(queue) == [b"before", b"after"]
    queue.close()


class WatchedFiles(FakeFiles):
    """Knows of every handle that was closed whether the queue's lock was held at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FastQueue | None = None
        self.opened: dict[int, str] = {}
        self.closed: list[tuple[str, bool]] = []

    def open(self, path: str, *, create: bool = False) -> int:
        handle = super().open(path, create=create)
        self.opened[handle] = path
        return handle

    def close(self, handle: int) -> None:
        if self.queue is not None:
            self.closed.append((self.opened.pop(handle), self.queue._state._lock.locked()))
        super().close(handle)


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_a_deleted_chunk_is_closed_without_the_lock(durability: Durability) -> None:
    files = WatchedFiles()
    config = FastQueueConfig(durability=durability, chunk_size=100, compression="none", meta_sync_interval=3600)
    queue = FastQueue("q", config, files=files)
    for i in range(4):
        queue.push(b"%d" % i * 60)
    files.queue = queue
    queue.ack(queue.lease(3))
    queue.flush()
    chunks = [(path, was_locked) for path, was_locked in files.closed if len(path) == len("q/") + 16]
    assert [was_locked for _, was_locked in chunks] == [False] * 3
    assert queue.stats().chunks == 1
    files.queue = None
    queue.close()


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_what_is_acked_while_the_meta_is_written_waits_for_the_next_one(durability: Durability) -> None:
    files = RenamingFiles()
    config = FastQueueConfig(durability=durability, chunk_size=1000, compression="none", meta_sync_interval=3600)
    FastQueue("q", config, files=files)
    files.kill()
    queue = FastQueue("q", config, files=files)  # its sequences begin behind those that the kill skipped
    blocks = [bytes([number]) * 700 for number in range(10)]
    for block in blocks:
        queue.push(block)
    files.then = lambda: queue.ack(queue.lease(5))
    queue._syncer.run_once()
    assert queue.stats().chunks == 10  # the meta on the disk does not say that they are done
    files.then = None
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert drain(queue) == blocks[5:]
    assert queue.stats().lost_blocks == 0
