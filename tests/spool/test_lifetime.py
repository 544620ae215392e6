"""Opening, closing, ending, forking: whose queue it is, and when."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock import DiskFailed, DiskFull, Durability, FastQueue, FastQueueConfig, QueueClosed, QueueError, QueueLocked
from penstock.spool.dead_letters import DeadLetterQueue
from penstock.spool.files import OsSpoolFiles
from penstock.testing import FakeClock, wait_until
from tests.spool.damage import Open, drain, numbered


def test_close_wakes_waiting_leases(open_queue: Open) -> None:
    queue = open_queue()
    raised: list[Exception] = []

    def wait() -> None:
        try:
            queue.lease(timeout=30)
        except QueueClosed as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: queue._state._not_empty.waiting)
    queue.close()
    thread.join()
    assert len(raised) == 1


def test_a_closed_queue_refuses_everything_and_closes_twice(open_queue: Open) -> None:
    queue = open_queue()
    queue.push(b"kept")
    lease = queue.lease()[0]
    queue.close()
    queue.close()
    for call in (
        lambda: queue.push(b"x"),
        lambda: queue.push_many([b"x"]),
        lambda: queue.lease(),
        lambda: queue.ack(lease),
        lambda: queue.nack(lease),
        lambda: queue.peek(),
        lambda: queue.flush(),
    ):
        with pytest.raises(QueueClosed):
            call()


def test_close_leaves_no_thread_behind(open_queue: Open) -> None:
    before = threading.enumerate()
    queue = open_queue()
    ours = [thread for thread in threading.enumerate() if thread not in before]
    assert "penstock-spool-q" in [thread.name for thread in ours]
    queue.close()
    assert not any(thread.is_alive() for thread in ours)


def test_one_process_at_a_time_and_the_next_one_when_it_is_closed(open_queue: Open) -> None:
    queue = open_queue()
    with pytest.raises(QueueLocked, match="another process"):
        open_queue()
    queue.close()
    open_queue()


def test_the_folder_and_its_files_are_private(open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue()
    queue.push_many(numbered(30))
    queue.flush()
    assert stat.S_IMODE((tmp_path / "q").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "q").iterdir()} == {0o600}


def in_a_fork(work: object) -> str:
    """What `work()` returns, or the error that it raises, in a forked child."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = work()  # type: ignore[operator]
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, str(said).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def test_in_a_forked_child_the_queue_belongs_to_the_parent(open_queue: Open) -> None:
    queue = open_queue()
    queue.push_many(numbered(3))
    for call in (lambda: queue.push(b"x"), queue.lease, queue.peek, queue.flush):
        said = in_a_fork(call)
        assert f"QueueClosed: the queue in {queue.path} belongs to process {os.getpid()}" in said
        assert "open queues after forking" in said
    assert in_a_fork(queue.close) == "None"
    assert drain(queue) == numbered(3)


def test_a_fork_while_another_thread_is_inside_the_queue_does_not_hang_the_child(open_queue: Open) -> None:
    queue = open_queue()
    with queue._state._lock:
        said = in_a_fork(lambda: queue.push(b"x"))
    assert said.startswith("QueueClosed")


def test_a_child_that_outlives_its_parent_does_not_keep_the_folder(open_queue: Open) -> None:
    queue = open_queue()
    queue.push(b"kept")
    (read_end, write_end), (ready, tell_ready) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(tell_ready, b"!")
        os.read(read_end, 1)
        os._exit(0)
    os.read(ready, 1)  # the child has begun, and with that let go
    queue.close()
    try:
        assert drain(open_queue()) == [b"kept"]
    finally:
        for end in (write_end, read_end, ready, tell_ready):
            os.close(end)
        os.waitpid(child, 0)


def test_a_process_that_ends_without_closing_its_queue_loses_nothing(tmp_path: Path) -> None:
    program = f"from penstock import FastQueue; queue = FastQueue({str(tmp_path)!r}); queue.push(b'in memory')"
    subprocess.run([sys.executable, "-c", program], check=True)
    with FastQueue(tmp_path) as queue:
        assert drain(queue) == [b"in memory"]
        assert not queue.stats().unclean_start


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DiskFailed, match=r"cannot open a queue in .*file: "):
        FastQueue(tmp_path / "file")


def test_the_names_of_new_folders_are_on_the_disk_before_anything_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(OsSpoolFiles, "sync_folder", lambda self, path: synced.append(path))
    with FastQueue(tmp_path / "a" / "b", FastQueueConfig(durability=Durability.FSYNC)):
        assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]


def test_a_folder_is_free_again_when_the_system_has_no_thread_for_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError):
            FastQueue(tmp_path)
    with FastQueue(tmp_path) as queue:
        assert len(queue) == 0


def test_where_there_is_no_thread_for_dead_letters_their_blocks_stay(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    queue = open_queue(clock=clock)
    queue.push_many([b"one", b"two"])
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    queue.reject(queue.lease()[0], "bad")
    with pytest.raises(QueueError, match="can't start new thread"):
        queue.bury(b"three", "bad")
    monkeypatch.setattr(threading.Thread, "start", start)
    assert queue.stats().leased == 0
    clock.advance(1.0)
    (lease,) = queue.lease()
    assert lease.data == b"one"
    queue.reject(lease, "bad")
    assert queue.stats().dead_lettered == 1
    assert len(queue) == 1


def test_a_queue_whose_dead_letters_cannot_be_closed_stays_open_and_can_be_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = FastQueue(tmp_path)
    queue.push_many([b"bad", b"good"])
    queue.reject(queue.lease()[0], "400")
    close = DeadLetterQueue.close
    refusals = iter([DiskFull("no room on the disk")])

    def refuse_once(letters: DeadLetterQueue) -> None:
        for refusal in refusals:
            raise refusal
        close(letters)

    monkeypatch.setattr(DeadLetterQueue, "close", refuse_once)
    with pytest.raises(DiskFull):
        queue.close()
    assert queue.peek() == b"good"
    queue.close()
    with FastQueue(tmp_path) as again:
        assert len(again) == 1
        assert again.replay_dead_letters() == (1, 0)
