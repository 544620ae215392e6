"""What single stages say of themselves, where the whole service cannot be brought to it at will."""

import errno
import threading
from pathlib import Path

import pytest

from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.batch import ThreadPolicy
from penstock.export.config import SendQueueConfig
from penstock.export.exporters.segment_exporter import SegmentExporter
from penstock.export.paced_exporter import PacedExporter
from penstock.export.send_queue import SendQueue
from penstock.model.point import chunk_type, entity_of
from penstock.service.stage_health import stage_notes_of_queues, stage_refusals_of_l1, stage_refusals_of_queues
from penstock.spool import Durability, FastQueue, FastQueueConfig
from penstock.testing import MemoryExporter, wait_until
from tests.spool.fake_files import FakeFiles


def test_a_full_l1_says_so_until_its_push_returns() -> None:
    may_push = threading.Event()
    config = L1Config(max_bytes=1, durability=Durability.DISK)
    l1 = L1.with_own_queue("l1-full", lambda blocks: may_push.wait(30), config, threads=ThreadPolicy.fixed(1))
    assert list(stage_refusals_of_l1(l1)) == []
    chunk = chunk_type("cpu").of([entity_of({"host": "a"})], [1_700_000_000_000_000], [1.0])
    assert l1.submit([chunk], lambda error: None)
    assert [reason.endswith("% of l1.max_bytes") for reason in stage_refusals_of_l1(l1)] == [True]
    may_push.set()
    wait_until(lambda: not list(stage_refusals_of_l1(l1)))
    l1.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
def test_a_disk_that_refuses_is_a_reason_unless_memory_still_takes_blocks(code: int, durability: Durability) -> None:
    files = FakeFiles()
    queue = FastQueue("/q", FastQueueConfig(durability=durability), files=files)
    with SendQueue(queue, MemoryExporter(), SendQueueConfig(durability=durability)) as sender:
        senders = {"relay": sender}
        assert list(stage_refusals_of_queues(senders)) == []
        files._fault = lambda call, number: code if call == "write" else None
        wait_until(lambda: bool([*stage_refusals_of_queues(senders), *stage_notes_of_queues(senders)]))
        assert bool(list(stage_refusals_of_queues(senders))) is (durability is Durability.DISK)
        files.heal()
    queue.close()


def test_a_drained_queue_frees_its_own_chunk_before_it_calls_the_disk_full() -> None:
    files = FakeFiles()
    with FastQueue("/q", FastQueueConfig(durability=Durability.DISK), files=files) as queue:
        queue.push(b"done")
        queue.ack(queue.lease())
        chunks = [name for name in files.names_now if len(name.rpartition("/")[2]) == 16]
        files.fail(0, errno.ENOSPC)
        assert queue.disk_fault() == ""
        assert [name for name in chunks if name in files.names_now] == []


def test_the_destination_of_paced_segments_is_their_folder(tmp_path: Path) -> None:
    assert PacedExporter(SegmentExporter(tmp_path), 1.0).destination == str(tmp_path)
