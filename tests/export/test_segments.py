"""From the durable queue to segments: in order, exactly once, also after a crash in between."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, PermanentExportError, QueueLocked
from penstock.export import SendQueue
from penstock.export.exporters.segments import SegmentExporter
from penstock.export.segments import SegmentWriter
from penstock.model.partial import of_points
from penstock.model.point import chunk_type
from penstock.model.segment import encode, read, sealed
from penstock.spool import Durability, FastQueue, FastQueueConfig, Lease
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.export.quick import quick

CONFIG = FastQueueConfig(durability=Durability.DISK)
KILLED_BETWEEN = """
import os, signal, sys
from pathlib import Path
from penstock.export.segments import SegmentWriter
from penstock.spool import FastQueue, FastQueueConfig, Durability

queue = FastQueue(Path(sys.argv[1]) / "queue", FastQueueConfig(durability=Durability.DISK))
queue.ack = lambda leases: os.kill(os.getpid(), signal.SIGKILL)
writer = SegmentWriter(queue, Path(sys.argv[1]) / "segments", max_blocks=int(sys.argv[2]))
writer.seal(queue.lease(int(sys.argv[2])))
"""


def block(number: int) -> bytes:
    return encode(of_points([chunk_type("cpu").of([f"e{number}"], [0], [float(number)])]))


def entities(folder: Path) -> list[str]:
    tables = [read(folder / segment.name) for segment in sealed(folder)]
    return pa.concat_tables(tables)["entity"].to_pylist() if tables else []


def test_everything_in_the_queue_is_sealed_in_order_and_acknowledged(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        writer = SegmentWriter(queue, tmp_path / "segments", max_blocks=7)
        writer.start()
        for number in range(50):
            queue.push(block(number))
        writer.close()

        assert entities(tmp_path / "segments") == [f"e{n}" for n in range(50)]
        assert len(queue) == 0
        telemetry = Telemetry()
        telemetry.watch(writer.samples)
        assert "penstock_segment_rows_total 50.0" in telemetry.render().decode()
        assert f"penstock_segments_sealed_total {len(sealed(tmp_path / 'segments'))}.0" in telemetry.render().decode()


@pytest.mark.parametrize("second_size", [1, 3, 100])
def test_no_block_is_in_two_segments_after_kill_9_between_seal_and_ack(tmp_path: Path, second_size: int) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        for number in range(20):
            queue.push(block(number))
    ran = subprocess.run([sys.executable, "-c", KILLED_BETWEEN, str(tmp_path), "5"], check=False)
    assert ran.returncode == -signal.SIGKILL
    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(5)]

    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        writer = SegmentWriter(queue, tmp_path / "segments", max_blocks=second_size)
        writer.start()
        writer.close()
        assert len(queue) == 0

    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(20)]


def test_a_segment_that_cannot_be_written_is_reported_and_its_blocks_stay_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with FastQueue(tmp_path / "queue") as queue:
        queue.push(block(1))
        writer = SegmentWriter(queue, tmp_path / "segments")
        monkeypatch.setattr(os, "fsync", full)
        writer.start()
        with pytest.raises(OSError, match="No space left"):
            writer.close()
        monkeypatch.undo()
        assert len(queue) == 1
        assert entities(tmp_path / "segments") == []


def test_through_a_send_queue_a_full_disk_only_delays_and_a_bad_block_is_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([OSError(28, "No space left on device")] * 3)
    sync = os.fsync

    def full_for_a_while(handle: int) -> None:
        error = next(refusals, None)
        if error is not None:
            raise error
        sync(handle)

    exporter = SegmentExporter(tmp_path / "segments", max_blocks=7)
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        for number in range(30):
            queue.push(block(number))
        queue.push(b"not a block of partials")
        sender = SendQueue(queue, exporter, quick())
        with monkeypatch.context() as patch:
            patch.setattr("penstock.model.segment.os.fsync", full_for_a_while)
            with sender:
                wait_until(lambda: not len(queue))
                stats = sender.stats()
    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(30)]
    assert stats.queue.dead_lettered == 1
    assert sum(stats.errors.values()) == 3


def test_a_block_that_cannot_be_read_is_a_dead_letter_also_after_a_crash_before_that(tmp_path: Path) -> None:
    exporter = SegmentExporter(tmp_path / "segments")
    exporter.begin("q")
    leases = [Lease(0, 1, block(0), 0.0), Lease(1, 1, b"nonsense", 0.0), Lease(2, 1, block(2), 0.0)]
    assert [lease.sequence for lease, _ in exporter.send_group(leases)] == [1]
    exporter.close()
    again = SegmentExporter(tmp_path / "segments")
    again.begin("q")
    assert [lease.sequence for lease, _ in again.send_group(leases)] == [1]
    assert entities(tmp_path / "segments") == ["e0", "e2"]


def drained(queue: FastQueue, folder: Path) -> None:
    writer = SegmentWriter(queue, folder)
    writer.start()
    writer.close()


def test_another_queue_cannot_write_under_a_name_that_has_segments(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        queue.push(block(1))
        drained(queue, tmp_path / "segments")
    with FastQueue(tmp_path / "new", CONFIG) as queue:
        queue.push(block(2))
        with pytest.raises(ConfigError, match="another queue"):
            SegmentWriter(queue, tmp_path / "segments")
        assert len(queue) == 1

    with FastQueue(tmp_path / "queue", CONFIG) as queue:  # its own queue goes on
        queue.push(block(3))
        drained(queue, tmp_path / "segments")
    assert entities(tmp_path / "segments") == ["e1", "e3"]


def test_two_writers_of_one_name_do_not_work_at_once(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "a", CONFIG) as a, FastQueue(tmp_path / "b", CONFIG) as b:
        first = SegmentWriter(a, tmp_path / "segments")
        with pytest.raises(QueueLocked, match="edge"):
            SegmentWriter(b, tmp_path / "segments")
        SegmentWriter(b, tmp_path / "segments", writer="other").close()
        first.close()


def test_a_block_that_comes_out_of_order_is_not_acknowledged(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        for number in range(3):
            queue.push(block(number))
        writer = SegmentWriter(queue, tmp_path / "segments")
        early, *later = queue.lease(3)
        writer.seal(later)
        with pytest.raises(PermanentExportError, match="not in order"):
            writer.seal([early])
        assert len(queue) == 1


def test_a_queue_keeps_its_id_and_has_one_of_its_own(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "a", CONFIG) as a, FastQueue(tmp_path / "b", CONFIG) as b:
        assert a.id == a.id != b.id
        known = a.id
    with FastQueue(tmp_path / "a", CONFIG) as a:
        assert a.id == known
    (tmp_path / "a" / "fastqueue.id").write_text("torn")
    with FastQueue(tmp_path / "a", CONFIG) as a:
        assert len(a.id) == 32
