"""Sequences: a queue gives none of them twice, whatever becomes of its folder, since others go by them."""

from pathlib import Path

import pytest

from penstock import FastQueue
from penstock.spool import Durability, FastQueueConfig
from penstock.testing import FakeClock
from tests.spool.damage import drain


@pytest.mark.parametrize("durability", list(Durability))
def test_a_queue_whose_meta_is_lost_gives_no_sequence_twice(tmp_path: Path, durability: Durability) -> None:
    config, clock = FastQueueConfig(durability=durability, chunk_size=1000), FakeClock(1e9)
    given: list[int] = []
    for _ in range(3):
        with FastQueue(tmp_path, config, clock=clock) as queue:
            assert queue.id  # the segment exporter asks for it, and it stays in the folder
            given += queue.push_many([bytes(600)] * 5)
            assert len(drain(queue)) >= 5
            assert len(queue) == 0
            assert queue.stats().lost_blocks == 0
        (tmp_path / "fastqueue.meta").unlink()
        clock.advance(1.0)
    assert given == sorted(set(given))


def test_a_folder_that_had_no_queue_begins_with_sequence_0(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("the volume's own")
    with FastQueue(tmp_path, clock=FakeClock(1e9)) as queue:
        assert queue.push(b"first") == 0
