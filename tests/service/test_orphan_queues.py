"""Orphan queues: answered requests arrive all the same, once."""

import http.client
import json
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.service import queues as queues_module
from penstock.service.edge import Edge
from penstock.service.orphan_queues import OrphanQueues, find_orphan_queues
from penstock.service.receiver_set import ServiceReceivers
from penstock.spool import Durability, FastQueue, FastQueueConfig
from penstock.spool.meta import META_NAME
from penstock.telemetry import Telemetry
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.misbehaving import Misbehaving
from tests.service.running import HEADERS, Running, orders, sealed_sum
from tests.service.test_edge import FakeIntake

PATIENCE = 90.0


def config_of(folder: Path, text: str = "") -> ServiceConfig:
    return load(ServiceConfig, text=f"data_dir: {folder}\nspark: {{enabled: false}}\n{text}").config


def fill(folder: Path, *blocks: bytes) -> None:
    with FastQueue(folder, FastQueueConfig(durability=Durability.DISK)) as queue:
        for block in blocks:
            queue.push(block)


@pytest.mark.server
@pytest.mark.timeout(300)
def test_everything_that_three_processes_took_arrives_once_after_a_kill_and_a_start_with_one(
    tmp_path: Path,
) -> None:
    text = (
        "spark: {enabled: false}\nsegments: {interval: 1h}\n"
        "exporter: {type: otlp_http, url: 'http://127.0.0.1:%d', compression: none}\n"
    )
    destination = Misbehaving()
    with destination.running(), Running(tmp_path, text % 9, processes="3") as running:  # port 9: no server listens
        bodies = [orders(10, number) for number in range(60)]
        for body in bodies:
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
            connection.request("POST", "/v1/metrics", body, HEADERS)  # each by its own connection, to any process
            assert connection.getresponse().status == 200
            connection.close()
        assert running.process is not None
        processes = psutil.Process(running.process.pid).children(recursive=True)
        running.signal(signal.SIGSTOP)  # so that no process sees another die and drains its queue first
        for one in processes:
            one.kill()
        running.kill()
        psutil.wait_procs(processes, PATIENCE)
        left = [(one.name, one.index) for one in find_orphan_queues(config_of(tmp_path, "exporter: {type: console}"))]
        assert left == [("relay", 1), ("relay", 2), ("rollup", 1), ("rollup", 2)]  # none was spared

        running.file.write_text(text % destination.port)
        running.settings["processes"] = "1"
        running.start()
        wait_until(lambda: running.events().count("A left queue is drained") == 4, PATIENCE)
        assert json.loads(running.ask("/readyz")[1])["notes"] == []
        assert running.stop() == 0, running.text()

    assert sealed_sum(tmp_path / "segments", "orders") == 600
    assert sorted(request.body for request in destination.requests) == sorted(bodies)


def started(config: ServiceConfig, telemetry: Telemetry | None = None) -> OrphanQueues:
    one = OrphanQueues(config, telemetry or Telemetry())
    one.start()
    return one


def soon() -> float:
    return time.monotonic() + 10.0


def test_what_is_being_drained_is_shown_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, telemetry = MemoryExporter(), Telemetry()
    exporter.hold()
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: exporter)
    fill(tmp_path / "queue.7", b"a", b"b")
    left = started(config_of(tmp_path, "exporter: {type: console}\npipelines: {rollup: false}"), telemetry)

    (note,) = left.notes()
    assert note.startswith("queue relay of process 7, which is not started any more, is being drained: 2 of 2 blocks")
    assert b'penstock_queue_size{process="7",queue="relay"} 2.0' in telemetry.render()

    exporter.release()
    wait_until(lambda: not left.notes())
    assert sorted(exporter.batches) == [b"a", b"b"]
    assert b'penstock_queue_size{process="7",queue="relay"} 0.0' in telemetry.render()
    assert left.close(soon()) == []


def test_a_destination_that_is_down_keeps_nobody_from_stopping_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = FailingExporter()
    down.fail_with(ConnectionRefusedError("down"))
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: down)
    fill(tmp_path / "queue.1", b"a")
    config = config_of(tmp_path, "exporter: {type: console, queue: {circuit_breaker: {threshold: 1}}}")
    left = started(config)

    assert left.close(time.monotonic() + 600.0) == []  # no test lasts as long

    assert [(one.name, one.index, one.blocks) for one in find_orphan_queues(config)] == [("relay", 1, 1)]


def test_a_queue_that_was_killed_before_it_wrote_its_state_is_found(tmp_path: Path) -> None:
    fill(tmp_path / "rollup-queue.1", b"a")
    (tmp_path / "rollup-queue.1" / META_NAME).unlink()

    assert [one.blocks for one in find_orphan_queues(config_of(tmp_path))] == [1]


def test_only_queues_with_blocks_that_no_process_has_are_left(tmp_path: Path) -> None:
    for name in ("queue", "queue.1", "queue.2", "queue.02", "queue.old", "rollup-queue.1"):
        fill(tmp_path / name, b"a")
    fill(tmp_path / "queue.3")
    (tmp_path / "queue.4").mkdir()
    (tmp_path / "queue.5").write_text("no folder")

    found = find_orphan_queues(config_of(tmp_path, "exporter: {type: console}\nprocesses: 2"))

    assert [(one.path.name, one.name, one.index) for one in found] == [("queue.2", "relay", 2)]


def test_a_folder_that_cannot_be_looked_into_has_nothing_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert find_orphan_queues(config_of(tmp_path / "file", "exporter: {type: console}")) == []
    assert find_orphan_queues(config_of(tmp_path / ("x" * 300), "exporter: {type: console}")) == []


def test_a_queue_whose_destination_was_taken_out_is_named_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "queue-gone", b"a")
    fill(tmp_path / "rollup-queue", b"a")
    config = config_of(tmp_path, "exporters: {here: {type: console}}\npipelines: {rollup: false}")
    left = started(config)

    assert [note.partition(": its destination is not in")[0] for note in left.notes()] == [
        f"1 blocks wait in {tmp_path / name}" for name in ("queue-gone", "rollup-queue")
    ]
    assert f"path={tmp_path / 'queue-gone'} blocks=1" in caplog.text
    left.close(soon())
    assert len(find_orphan_queues(config)) == 2


@pytest.mark.parametrize("off", ["enabled: false", "type: memory"])
def test_what_waits_in_a_queue_that_was_switched_off_is_sent_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, off: str
) -> None:
    exporter = MemoryExporter()
    exporter.hold()
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: exporter)
    fill(tmp_path / "queue", b"a")
    fill(tmp_path / "queue.1", b"b")
    text = f"exporter: {{type: console, queue: {{{off}}}}}\npipelines: {{rollup: false}}\nprocesses: 2"
    edge = Edge(config_of(tmp_path, text), Telemetry(), lambda *_: ServiceReceivers(FakeIntake([]), {}))
    left = started(config_of(tmp_path, text))
    edge.start()  # nothing of it is in the way of the folder

    first, second = left.notes()
    assert first.startswith("queue relay, which is switched off (queue.enabled, queue.type), is being drained: 1 of 1")
    assert second.startswith("queue relay of process 1, which is switched off (queue.enabled, queue.type), is being")
    exporter.release()
    wait_until(lambda: not left.notes())
    assert sorted(exporter.batches) == [b"a", b"b"]
    assert "not in the configuration any more" not in caplog.text
    assert edge.close(soon()) == left.close(soon()) == []
    assert find_orphan_queues(config_of(tmp_path, text)) == []


def test_a_queue_that_is_switched_off_keeps_nobody_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = FailingExporter()
    down.fail_with(ConnectionRefusedError("down"))
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: down)
    fill(tmp_path / "queue", b"a")
    queue = "{enabled: false, circuit_breaker: {threshold: 1}}"
    config = config_of(tmp_path, f"exporter: {{type: console, queue: {queue}}}\npipelines: {{rollup: false}}")
    edge = Edge(config, Telemetry(), lambda *_: ServiceReceivers(FakeIntake([]), {}))
    left = started(config)
    edge.start()

    assert edge.close(time.monotonic() + 600.0) == left.close(time.monotonic() + 600.0) == []  # no test lasts as long

    assert [(one.name, one.blocks) for one in find_orphan_queues(config)] == [("relay", 1)]


def test_a_queue_that_somebody_else_has_open_is_named_and_keeps_nobody_from_starting(tmp_path: Path) -> None:
    fill(tmp_path / "rollup-queue.1", b"a")
    with FastQueue(tmp_path / "rollup-queue.1"):
        left = started(config_of(tmp_path))

    (note,) = left.notes()
    assert note.startswith(f"1 blocks wait in {tmp_path / 'rollup-queue.1'}: ")
    assert left.close(soon()) == []


def test_new_samples_wait_for_old_ones_where_the_destination_wants_them_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = MemoryExporter()
    exporter.hold()
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: exporter)
    fill(tmp_path / "queue.1", b"old")
    left = started(config_of(tmp_path, "exporter: {type: remote_write, url: 'http://127.0.0.1:9/'}"))
    waiting = threading.Thread(target=left.wait_for_ordered_destinations)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()

    exporter.release()
    waiting.join(PATIENCE)

    assert exporter.batches == [b"old"]
    left.close(soon())
