"""Freshest first: the newest goes out first, and what has to go is still the oldest."""

from dataclasses import replace
from pathlib import Path

from penstock import FastQueue, FastQueueConfig
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles

FRESHEST = FastQueueConfig(order="freshest", compression="none", meta_sync_interval=3600)


def test_a_block_that_came_back_stays_while_older_ones_are_in_memory(tmp_path: Path) -> None:
    with FastQueue(tmp_path, replace(FRESHEST, max_size=3)) as queue:
        queue.push_many([b"0", b"1", b"2"])
        queue.nack(queue.lease()[0])
        queue.push(b"3")
        assert drain(queue) == [b"3", b"2", b"1"]


def test_what_was_acked_in_memory_before_a_kill_is_not_lost_when_newer_chunks_have_gone() -> None:
    config, files = replace(FRESHEST, chunk_size=1000, inmemory_blocks=1), FakeFiles()
    queue = FastQueue("q", config, files=files)
    for _ in range(3):
        queue.push(b"acked")
        assert queue.pop()
    for number in range(6):
        queue.push(bytes([number]) * 700)  # the last one is in memory
    files.kill()
    queue = FastQueue("q", config, files=files)
    queue.ack(queue.lease(5)[1:])
    queue._syncer.run_once()
    queue.close()
    queue = FastQueue("q", config, files=files)
    assert [len(queue), queue.pop(), len(queue)] == [1, bytes([4]) * 700, 0]
    assert queue.stats().lost_blocks == 0
