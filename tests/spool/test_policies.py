"""A full queue: which blocks go, which stay, which pushes wait, and what is counted."""

import logging
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from penstock import Durability, FastQueue, FastQueueConfig, FullBehavior, Lease, QueueFull
from penstock.errors import ConfigError
from penstock.spool import dead_letters
from penstock.telemetry import DECLARATIONS, Telemetry
from penstock.testing import FakeClock, wait_until
from tests.spool.damage import drain

LEVELS = pytest.mark.parametrize("durability", list(Durability), ids=lambda level: str(level.value))


@LEVELS
@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_drop_oldest_makes_room_and_counts(tmp_path: Path, durability: Durability, order: str) -> None:
    config = FastQueueConfig(max_size=10, durability=durability, inmemory_blocks=4, order=order)  # type: ignore[arg-type]
    with FastQueue(tmp_path, config) as queue:
        for i in range(25):
            queue.push(b"%02d" % i)
            assert len(queue) <= 10
        queue.push_many([b"25", b"26", b"27"])
        assert queue.stats().dropped == {"oldest": 18, "newest": 0, "timeout": 0, "disk_full": 0, "disk_failed": 0}
        left = [b"%02d" % i for i in range(18, 28)]
        assert drain(queue) == (left if order == "fifo" else left[::-1])
        assert len(queue) == queue.size_bytes == 0


@LEVELS
def test_drop_oldest_by_bytes_drops_as_many_as_the_new_block_needs(tmp_path: Path, durability: Durability) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_bytes=1000, durability=durability)) as queue:
        queue.push_many([b"%d" % i * 100 for i in range(10)])
        queue.push(b"x" * 350)
        assert queue.stats().dropped["oldest"] == 4
        assert [len(block) for block in drain(queue)] == [100] * 6 + [350]


@LEVELS
@pytest.mark.parametrize("order", ["fifo", "freshest"])
def test_drop_oldest_spares_what_is_on_lease_as_long_as_anything_else_is_there(
    tmp_path: Path, durability: Durability, order: str
) -> None:
    config = FastQueueConfig(max_size=5, durability=durability, inmemory_blocks=3, order=order)  # type: ignore[arg-type]
    with FastQueue(tmp_path, config) as queue:
        queue.push_many([b"0", b"1", b"2"])
        leased = queue.lease(3)
        queue.push_many([b"3", b"4"])
        queue.push(b"5")
        queue.nack(leased[1], delay=3600)
        queue.push(b"6")  # the nacked one is the oldest that is not leased
        assert sorted(lease.data for lease in queue.lease(5)) == [b"4", b"5", b"6"]
        queue.push(b"7")  # everything is on lease now: the oldest of all goes
        queue.ack(leased)
        assert queue.stats().dropped["oldest"] == 3


@LEVELS
def test_drop_newest_refuses_the_new_block(tmp_path: Path, durability: Durability) -> None:
    config = FastQueueConfig(max_size=3, full_behavior=FullBehavior.DROP_NEWEST, durability=durability)
    with FastQueue(tmp_path, config) as queue:
        queue.push_many([b"0", b"1"])
        with pytest.raises(QueueFull):
            queue.push_many([b"2", b"3"])
        queue.push(b"2")
        with pytest.raises(QueueFull, match=r"no room in .*: 3 blocks, 3 bytes, with max_size = 3, max_bytes = "):
            queue.push(b"3")
        assert queue.stats().dropped["newest"] == 3
        assert drain(queue) == [b"0", b"1", b"2"]


@LEVELS
def test_block_waits_until_an_ack_makes_room(tmp_path: Path, durability: Durability) -> None:
    config = FastQueueConfig(max_size=2, full_behavior=FullBehavior.BLOCK, durability=durability)
    with FastQueue(tmp_path, config) as queue:
        queue.push_many([b"0", b"1"])
        lease = queue.lease()[0]
        thread = threading.Thread(target=lambda: queue.push(b"2"))
        thread.start()
        wait_until(lambda: queue._state._waiting_to_push)
        assert len(queue) == 2  # on lease is not gone
        queue.ack(lease)
        thread.join()
        assert drain(queue) == [b"1", b"2"]


def test_block_gives_up_after_its_timeout(tmp_path: Path) -> None:
    config = FastQueueConfig(max_size=1, full_behavior=FullBehavior.BLOCK, block_timeout=0.01)
    with FastQueue(tmp_path, config) as queue:
        queue.push(b"0")
        with pytest.raises(QueueFull):
            queue.push(b"1")
        with pytest.raises(QueueFull):
            queue.push(b"1", timeout=0.001)
        assert queue.stats().dropped["timeout"] == 2


@pytest.mark.parametrize("behavior", list(FullBehavior))
def test_a_batch_that_can_never_fit_is_refused_at_once(tmp_path: Path, behavior: FullBehavior) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_size=5, full_behavior=behavior)) as queue:
        queue.push(b"kept")
        with pytest.raises(QueueFull, match="never fit max_size = 5"):
            queue.push_many([b"x"] * 6)
        assert drain(queue) == [b"kept"]


def test_what_was_dropped_stays_dropped_after_a_restart(tmp_path: Path) -> None:
    config = FastQueueConfig(max_size=5, durability=Durability.DISK)
    with FastQueue(tmp_path, config) as queue:
        for i in range(12):
            queue.push(b"%02d" % i)
    with FastQueue(tmp_path, config) as queue:
        assert drain(queue) == [b"%02d" % i for i in range(7, 12)]


def test_dropping_is_logged_when_it_starts_and_when_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), FastQueue(tmp_path, FastQueueConfig(max_size=10)) as queue:
        for _ in range(50):
            queue.push(b"x")
        drain(queue)
        queue.push(b"x")
    assert [r.message.split(".")[0] for r in caplog.records] == [
        "Queue started dropping",
        "Queue takes everything again",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_size": 0}, "max_size must be >= 1, got 0"),
        ({"max_bytes": "12 apples"}, "max_bytes must be a size"),
        ({"compression": "brotli"}, "compression must be one of none, snappy, lz4, zstd, got 'brotli'"),
        ({"order": "random"}, "order must be one of fifo, freshest, got 'random'"),
        ({"full_behavior": "panic"}, "full_behavior must be one of drop_oldest, drop_newest, block, got 'panic'"),
        ({"durability": "maybe"}, "durability must be one of memory, disk, fsync, got 'maybe'"),
        ({"max_attempts": 0}, "max_attempts must be >= 1 or None, got 0"),
        ({"meta_sync_interval": 0}, "meta_sync_interval must be > 0"),
        ({"stale_flush": -1}, "stale_flush must be a finite number"),
        ({"max_attempts": "3"}, "max_attempts must be >= 1 or None, got '3'"),
        ({"write_buffer_size": "8Gi"}, "write_buffer_size must be <= 1073741824"),
        ({"inmemory_blocks": True}, "inmemory_blocks must be >= 1, got True"),
    ],
)
def test_nonsense_is_refused_where_it_is_declared(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FastQueueConfig(**settings)  # type: ignore[arg-type]


def test_settings_may_be_written_as_a_configuration_file_has_them() -> None:
    config = FastQueueConfig(max_bytes="1Gi", stale_flush="30s", full_behavior="block", durability="fsync")
    assert (config.max_bytes, config.stale_flush) == (2**30, 30.0)
    assert (config.full_behavior, config.durability) == (FullBehavior.BLOCK, Durability.FSYNC)


@LEVELS
def test_a_block_that_keeps_crashing_its_worker_becomes_a_dead_letter(tmp_path: Path, durability: Durability) -> None:
    config = FastQueueConfig(max_attempts=2, durability=durability)
    with FastQueue(tmp_path / "q", config) as queue:
        queue.push_many([b"poison", b"good"])
    for _ in range(2):
        with FastQueue(tmp_path / "q", config) as queue:
            assert queue.lease()[0].data == b"poison"
    with FastQueue(tmp_path / "q", config) as queue:
        assert [lease.data for lease in queue.lease(5)] == [b"good"]
        assert (len(queue), queue.stats().dead_lettered) == (1, 1)
    with FastQueue(tmp_path / "q" / "dead-letters") as letters:
        letter = dead_letters.unpack_dead_letter(letters.lease()[0].data)
        assert (letter.data, letter.reason) == (b"poison", "too many attempts")


def test_a_rejected_block_keeps_its_reason_and_its_history(tmp_path: Path) -> None:
    clock = FakeClock(5000.0)
    with FastQueue(tmp_path / "q", FastQueueConfig(dead_letter=tmp_path / "dead"), clock=clock) as queue:
        sequence = queue.push(b"\x00bad\xff")
        clock.advance(10.0)
        queue.reject(queue.lease()[0], "400 Bad Request")
        queue.reject(Lease(99, 1, b"", 0.0), "it is not out")
        assert len(queue) == 0
    with FastQueue(tmp_path / "dead") as letters:
        assert dead_letters.unpack_dead_letter(letters.pop() or b"") == dead_letters.DeadLetter(
            sequence, 1, 5000.0, 5010.0, "400 Bad Request", b"\x00bad\xff"
        )
        assert letters.pop() is None


def test_every_metric_moves(tmp_path: Path) -> None:
    telemetry = Telemetry()
    config = FastQueueConfig(max_size=20, inmemory_blocks=4, chunk_size=300, max_attempts=1, compression="none")
    with FastQueue(tmp_path, config) as queue:
        telemetry.watch(lambda: queue.stats().samples())
        queue.push_many([b"%02d" % i * 40 for i in range(20)])
        queue.push(b"one too many")
        queue.ack(queue.lease())
        queue.nack(queue.lease()[0])
        queue.lease()
        queue.flush()
        values = {(sample.name, sample.labels): sample.value for sample in queue.stats().samples()}
        declared = {name for name in DECLARATIONS if name.startswith(("penstock_queue_", "penstock_fastqueue_"))}
        mine = {name for name, _ in values}
        assert mine <= declared
        still = {
            "penstock_queue_disk_full_total", "penstock_fastqueue_damaged_regions_total",
            "penstock_fastqueue_damaged_bytes_total", "penstock_fastqueue_lost_blocks_total",
            "penstock_fastqueue_inmemory_blocks", "penstock_queue_redelivered_total",
            "penstock_queue_dead_letter_dropped_total",
        }  # fmt: skip
        assert {name for name, labels in values if not labels and not values[name, labels]} <= still
        assert values["penstock_queue_dropped_total", ("oldest",)] == 1
        assert values["penstock_queue_push_total", ()] == 21
        assert values["penstock_queue_dead_letter_total", ()] == 1
        assert 0 < values["penstock_queue_utilization_ratio", ()] <= 1
        assert b"penstock_fastqueue_disk_bytes" in telemetry.render()


def test_dead_letters_that_had_to_go_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "_MOST", 2)
    with FastQueue(tmp_path, FastQueueConfig(max_size=2)) as queue:
        for number in range(5):
            queue.bury(b"%d" % number, "refused")
        assert queue.stats().dead_lettered == 5
        values = {sample.name: sample.value for sample in queue.stats().samples()}
        assert values["penstock_queue_dead_letter_dropped_total"] == 3


def test_drop_oldest_never_loops_whatever_the_counts_say(tmp_path: Path) -> None:
    with FastQueue(tmp_path, FastQueueConfig(max_bytes=1000)) as queue:
        queue._state.backlog.bytes = 10**9
        queue.push(b"taken in all the same")
        assert drain(queue) == [b"taken in all the same"]


def test_the_document_names_every_setting() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "durable-queue.md").read_text()
    settings = text.partition("## Settings")[2].partition("\n## ")[0]
    assert [field.name for field in fields(FastQueueConfig) if f"`{field.name}`" not in settings] == []
