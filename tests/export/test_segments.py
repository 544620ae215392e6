"""From the durable queue to segments: in order, exactly once, also after a crash in between."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, PermanentExportError, QueueLocked, TransientExportError
from penstock.export import SendQueue
from penstock.export.exporters.segment_exporter import SegmentExporter
from penstock.model.chunk_partials import partials_of_chunks
from penstock.model.point import chunk_type
from penstock.model.segment import QUARANTINE, encode_partials_block, read_segment, sealed
from penstock.spool import Durability, FastQueue, FastQueueConfig, Lease
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.export.quick import quick

CONFIG = FastQueueConfig(durability=Durability.DISK)
KILLED_BETWEEN = """
import os, signal, sys
from collections.abc import Callable
from pathlib import Path
from penstock import Durability, FastQueue, FastQueueConfig, SegmentExporter, SendQueue

queue = FastQueue(Path(sys.argv[1]) / "queue", FastQueueConfig(durability=Durability.DISK))
queue.ack = lambda leases: os.kill(os.getpid(), signal.SIGKILL)
SendQueue(queue, SegmentExporter(Path(sys.argv[1]) / "segments", max_blocks=int(sys.argv[2]))).start().flush()
"""


def block(number: int) -> bytes:
    return encode_partials_block(partials_of_chunks([chunk_type("cpu").of([f"e{number}"], [0], [float(number)])]))


def entities(folder: Path) -> list[str]:
    tables = [read_segment(folder / segment.name) for segment in sealed(folder)]
    return pa.concat_tables(tables)["entity"].to_pylist() if tables else []


def drained(queue: FastQueue, folder: Path, **options: Any) -> SegmentExporter:
    """Everything that the queue holds, in segments."""
    exporter = SegmentExporter(folder, **options)
    with SendQueue(queue, exporter, quick()) as sender:
        assert sender.flush()
    return exporter


def test_everything_in_the_queue_is_sealed_in_order_and_acknowledged(tmp_path: Path) -> None:
    exporter = SegmentExporter(tmp_path / "segments", max_blocks=7)
    with FastQueue(tmp_path / "queue", CONFIG) as queue, SendQueue(queue, exporter, quick()) as sender:
        for number in range(50):
            sender.push(block(number))
        assert sender.flush()

        assert entities(tmp_path / "segments") == [f"e{n}" for n in range(50)]
        assert len(queue) == 0
        telemetry = Telemetry()
        telemetry.watch(exporter.samples)
        assert "penstock_segment_rows_total 50.0" in telemetry.render().decode()
        assert f"penstock_segments_sealed_total {len(sealed(tmp_path / 'segments'))}.0" in telemetry.render().decode()


def test_a_segment_is_bounded_by_bytes_as_well_as_by_blocks(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        queue.push_many(block(number) for number in range(10))
        exporter = drained(queue, tmp_path / "segments", max_bytes=3 * len(block(0)) + 100)
    assert exporter.segments == 4
    assert [s.last - s.first + 1 for s in sealed(tmp_path / "segments")] == [3, 3, 3, 1]
    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(10)]


@pytest.mark.parametrize("second_size", [1, 3, 100])
def test_no_block_is_in_two_segments_after_kill_9_between_seal_and_ack(tmp_path: Path, second_size: int) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        for number in range(20):
            queue.push(block(number))
    ran = subprocess.run([sys.executable, "-c", KILLED_BETWEEN, str(tmp_path), "5"], check=False)
    assert ran.returncode == -signal.SIGKILL
    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(5)]

    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        drained(queue, tmp_path / "segments", max_blocks=second_size)
        assert len(queue) == 0

    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(20)]


def test_a_full_disk_only_delays_and_a_bad_block_is_a_dead_letter(
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


def test_segments_of_a_writer_leave_no_sequence_between_them(tmp_path: Path) -> None:
    """So a reader of the folder sees that one is missing."""
    leases = [Lease(n, 1, block(n) if n % 3 else b"nonsense", 0.0) for n in range(12)]
    for begin, end in ((0, 5), (7, 9), (9, 12)):  # 5 and 6 were dropped by the queue
        exporter = SegmentExporter(tmp_path)
        exporter.begin("q")
        exporter.send_group(leases[begin:end])
        exporter.close()
    assert [(s.first, s.last) for s in sealed(tmp_path)] == [(0, 4), (5, 8), (9, 11)]


def test_blocks_of_a_segment_whose_seal_failed_at_the_end_are_not_in_the_next_however_they_are_grouped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, leases = SegmentExporter(tmp_path), [Lease(n, 1, block(n), 0.0) for n in range(5)]
    exporter.begin("q")

    def failing(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        for module in ("penstock.model.segment", "penstock.export.exporters.segment_exporter"):
            patch.setattr(f"{module}.sync_segment_folder", failing)
        for group in (leases[:3], leases[:4]):  # nothing is taken for safe before the folder is synced
            with pytest.raises(OSError, match="Input/output error"):
                exporter.send_group(group)
    exporter.send_group(leases)
    exporter.close()
    assert [(s.first, s.last) for s in sealed(tmp_path)] == [(0, 2), (3, 4)]
    assert entities(tmp_path) == [f"e{n}" for n in range(5)]


def test_what_a_damaged_segment_covered_is_not_covered_by_the_next(tmp_path: Path) -> None:
    exporter = SegmentExporter(tmp_path)
    exporter.begin("q")
    exporter.send_group([Lease(n, 1, block(n), 0.0) for n in range(3)])
    exporter.close()
    (tmp_path / QUARANTINE).mkdir()
    (damaged,) = sealed(tmp_path)
    (tmp_path / damaged.name).rename(tmp_path / QUARANTINE / damaged.name)

    other = SegmentExporter(tmp_path)
    with pytest.raises(ConfigError, match="another queue"):
        other.begin("other")
    exporter.begin("q")
    exporter.send_group([Lease(n, 1, block(n), 0.0) for n in range(1, 5)])
    exporter.close()
    assert [(s.first, s.last) for s in sealed(tmp_path)] == [(3, 4)]
    assert entities(tmp_path) == ["e3", "e4"]


def test_another_queue_cannot_write_under_a_name_that_has_segments(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "queue", CONFIG) as queue:
        queue.push(block(1))
        drained(queue, tmp_path / "segments")
    with FastQueue(tmp_path / "new", CONFIG) as queue:
        queue.push(block(2))
        with pytest.raises(ConfigError, match="another queue"):
            SendQueue(queue, SegmentExporter(tmp_path / "segments"), quick())
        assert len(queue) == 1

    with FastQueue(tmp_path / "queue", CONFIG) as queue:  # its own queue goes on
        queue.push(block(3))
        drained(queue, tmp_path / "segments")
    assert entities(tmp_path / "segments") == ["e1", "e3"]


def test_two_writers_of_one_name_do_not_work_at_once(tmp_path: Path) -> None:
    first, second, other = (
        SegmentExporter(tmp_path / "segments"),
        SegmentExporter(tmp_path / "segments"),
        SegmentExporter(tmp_path / "segments", writer="other"),
    )
    first.begin("a")
    with pytest.raises(QueueLocked, match="edge"):
        second.begin("b")
    other.begin("b")
    first.close()
    second.begin("b")
    second.close()
    other.close()


def test_a_block_that_comes_out_of_order_is_not_acknowledged(tmp_path: Path) -> None:
    exporter = SegmentExporter(tmp_path / "segments")
    exporter.begin("q")
    early, *later = [Lease(number, 1, block(number), 0.0) for number in range(3)]
    exporter.send_group(later)
    with pytest.raises(PermanentExportError, match="not in order"):
        exporter.send_group([early])
    exporter.close()


@pytest.mark.parametrize("settings", [{"max_blocks": 0}, {"max_bytes": 0}, {"max_bytes": "lots"}])
def test_a_segment_of_nothing_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="segments"):
        SegmentExporter(tmp_path, **settings)


def test_a_configuration_that_is_refused_leaves_the_queue_to_others(tmp_path: Path) -> None:
    config = quick(path=tmp_path / "queue", order="freshest")
    with pytest.raises(ConfigError, match="must be 'fifo'"):
        SendQueue.open(SegmentExporter(tmp_path / "segments"), config)
    FastQueue(tmp_path / "queue").close()


def test_a_queue_keeps_its_id_and_has_one_of_its_own(tmp_path: Path) -> None:
    with FastQueue(tmp_path / "a", CONFIG) as a, FastQueue(tmp_path / "b", CONFIG) as b:
        assert a.id == a.id != b.id
        known = a.id
    with FastQueue(tmp_path / "a", CONFIG) as a:
        assert a.id == known
    (tmp_path / "a" / "fastqueue.id").write_text("torn")
    with FastQueue(tmp_path / "a", CONFIG) as a:
        assert len(a.id) == 32


def test_a_segment_that_is_still_being_sealed_at_the_end_keeps_the_name_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, link = threading.Event(), threading.Event(), os.link

    def hang(*names: Any) -> None:
        begun.set()
        may_end.wait(30)
        link(*names)

    monkeypatch.setattr("penstock.model.segment.os.link", hang)
    queue = FastQueue(tmp_path / "queue", CONFIG)
    queue.push_many(block(number) for number in range(10))
    first = SegmentExporter(tmp_path / "segments", max_blocks=5)
    sender = SendQueue(queue, first, quick(), owns_queue=True).start()
    assert begun.wait(30)
    assert sender.close(timeout=0.0) == ["penstock-group-0"]
    with FastQueue(tmp_path / "queue", CONFIG) as again:
        with pytest.raises(QueueLocked):
            SendQueue(again, SegmentExporter(tmp_path / "segments"), quick())
        may_end.set()
        wait_until(lambda: first._owner is None)
        drained(again, tmp_path / "segments", max_blocks=3)
    assert entities(tmp_path / "segments") == [f"e{n}" for n in range(10)]
    assert [(s.first, s.last) for s in sealed(tmp_path / "segments")] == [(0, 4), (5, 5), (6, 8), (9, 9)]


def test_nothing_is_sealed_once_it_is_closed(tmp_path: Path) -> None:
    exporter = SegmentExporter(tmp_path / "segments")
    exporter.begin("queue")
    exporter.close()
    with pytest.raises(TransientExportError, match="closed"):
        exporter.send_group([Lease(0, 1, block(0), 0.0)])
    assert sealed(tmp_path / "segments") == []


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{")], ids=["deleted", "damaged"])
def test_what_comes_after_the_loss_of_the_meta_is_sealed_too(
    tmp_path: Path, durability: Durability, damage: Callable[[Path], object]
) -> None:
    config = FastQueueConfig(durability=durability, chunk_size=4096)
    for numbers in (range(20), range(20, 25), range(25, 30)):
        with FastQueue(tmp_path / "queue", config) as queue:
            with SendQueue(queue, SegmentExporter(tmp_path / "segments"), quick()) as sender:
                for number in numbers:
                    sender.push(block(number))
                assert sender.flush()
            assert len(queue) == 0
        assert entities(tmp_path / "segments") == [f"e{n}" for n in range(numbers.stop)]
        damage(tmp_path / "queue" / "fastqueue.meta")
