"""What the service says of itself under pressure: readiness, notes, counters and log lines, through `penstock run`."""

import http.client
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.receive.intake import Intake
from penstock.service.service import Service
from penstock.service.trends import QueueTrends
from penstock.telemetry import Value
from penstock.testing import FakeClock, wait_until
from tests.servers import free_port
from tests.service.running import HEADERS, Running, orders

# A disk of its own, in a mount namespace of its own: it goes when the process does, whatever becomes of that.
MOUNT_AND_RUN = 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"'
EDGE_ONLY = "spark: {enabled: false}\n"


@pytest.fixture
def on_small_disk(tmp_path: Path) -> list[str]:
    """What to put before a command so that `data` is a disk of 16 MB for it."""
    (tmp_path / "data").mkdir()
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *as_root, "--mount", "sh", "-c", MOUNT_AND_RUN, str(tmp_path / "data")]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', '') or error}")
    return command


def post(port: int, path: str, body: bytes, kind: str = HEADERS["Content-Type"]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def event(metric: str, **labels: str) -> bytes:
    return json.dumps({"metric": metric, "value": 1, "labels": labels}).encode()


def post_orders(running: Running, count: int = 10) -> int:
    return post(running.port, "/v1/metrics", orders(count))[0]


def ready(running: Running) -> tuple[int, dict[str, Any]]:
    status, body = running.ask("/readyz")
    return status, json.loads(body)


def value(running: Running, name: str) -> float:
    """The sum of a metric's lines; `name` may have labels."""
    text = running.ask("/metrics")[1]
    lines = [line for line in text.splitlines() if line.startswith(name) and line[len(name)] in "{ "]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    yield
    filler.unlink()


def test_a_full_disk_is_not_ready_takes_nothing_and_logs_one_line(on_small_disk: list[str], tmp_path: Path) -> None:
    # The table of requests would take the whole of so small a disk.
    running = Running(tmp_path, f"{EDGE_ONLY}intake: {{repeat_window: 0}}\n", data_dir=str(tmp_path / "data"))
    running.before = on_small_disk
    with running:
        assert running.process is not None
        inside = Path(f"/proc/{running.process.pid}/root{tmp_path}/data")
        assert post_orders(running) == 200
        assert ready(running) == (200, {"ready": True, "reasons": [], "notes": []})
        with full(inside):
            wait_until(lambda: post_orders(running) == 503)  # the last page of a file may still have room
            taken = value(running, "penstock_receive_points_total")
            assert {post_orders(running, 500) for _ in range(50)} == {503}
            status, body = ready(running)
            assert status == 503
            assert body["reasons"] == ["the disk of queue rollup takes nothing: No space left on device"]
            assert json.loads(running.ask("/status.json")[1])["ready"] is False
            assert running.ask("/healthz")[0] == 200
            assert value(running, "penstock_receive_points_total") == taken
            assert value(running, 'penstock_receive_refused_total{reason="failed"}') == 51
            (line,) = [one for one in running.log() if one.get("reason") == "failed"]
            assert (line["event"], line["sender"]) == ("Requests or points are refused", "127.0.0.1")
            assert "No space left on device" in line["detail"]
            assert len([one for one in running.log() if "No space left" in one["message"]]) <= 3
        wait_until(lambda: ready(running)[0] == 200)  # before any request comes: a balancer sends none
        assert post_orders(running) == 200


def test_a_dead_destination_is_a_note_before_and_after_its_circuit_opens(tmp_path: Path) -> None:
    port = free_port()
    text = f"{EDGE_ONLY}pipelines: {{rollup: false, relay: true}}\n" + (
        f"exporter: {{type: otlp_http, url: 'http://127.0.0.1:{port}', queue: {{circuit_breaker: {{threshold: 3}}, "
        "retry_interval: 1s}}\n"
    )
    with Running(tmp_path, text) as running:
        assert post_orders(running) == 200
        wait_until(lambda: bool(ready(running)[1]["notes"]))
        status, body = ready(running)
        assert status == 200
        (note,) = body["notes"]
        assert re.search(rf"127\.0\.0\.1:{port}.* fails for \d+ s \(circuit closed\): .*; 1 batches wait", note), note
        wait_until(lambda: "(circuit open)" in ready(running)[1]["notes"][0], 30.0)
        assert str(port) in ready(running)[1]["notes"][0]


def test_a_limit_that_is_reached_is_counted_logged_and_noted_with_its_culprit(tmp_path: Path) -> None:
    with Running(tmp_path, f"{EDGE_ONLY}intake: {{max_streams: 2}}\n") as running:
        answers = [
            json.loads(post(running.port, "/v1/events", event("clicks", button=str(n)), "application/json")[1])
            for n in range(20)
        ]
        assert [answer["rejected"] for answer in answers] == [0, 0] + [1] * 18
        assert "'clicks'" in answers[-1]["errors"][0]
        assert value(running, 'penstock_receive_refused_total{reason="streams"}') == 18
        assert value(running, 'penstock_receive_requests_total{format="events",status="taken"}') == 2
        assert value(running, 'penstock_receive_requests_total{format="events",status="rejected"}') == 18
        assert value(running, "penstock_receive_points_total") == 2
        status, body = ready(running)
        assert status == 200
        (note,) = body["notes"]
        assert "reason streams" in note
        assert "'clicks'" in note
        assert "sender 127.0.0.1" in note
        (line,) = [one for one in running.log() if one.get("reason") == "streams"]
        assert line["sender"] == "127.0.0.1"
        assert "'clicks'" in line["detail"]


def test_metrics_do_not_grow_with_the_names_that_senders_choose(tmp_path: Path) -> None:
    definitions = tmp_path / "definitions.yaml"
    named = [f"  - {{name: made{n}, source: metric{n}, function: avg}}\n" for n in range(300)]
    definitions.write_text("metrics:\n" + "".join(named))
    with Running(tmp_path, f"{EDGE_ONLY}definitions: {definitions}\n") as running:
        few = running.ask("/metrics")[1].count("\n")
        events = b"[%s]" % b",".join(event(f"metric{n}") for n in range(600))
        assert post(running.port, "/v1/events", events, "application/json")[0] == 200
        text = running.ask("/metrics")[1]
        assert text.count("\n") - few < 120
        assert "QueuedChunk[" not in text
        assert value(running, "penstock_l1_points_total") == 600
        assert value(running, "penstock_points_received_total") == 600


def test_a_dead_thread_is_what_health_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "_run", lambda self: None)
    text = f"data_dir: {tmp_path}\n{EDGE_ONLY}receivers: {{http: {{port: 0}}, grpc: {{enabled: false}}}}\n"
    service = Service(load(ServiceConfig, text=f"{text}admin: {{enabled: false}}\n"))
    service.start()
    try:
        wait_until(lambda: bool(service.unhealthy()))
        assert service.unhealthy() == ["thread penstock-intake has died"]
    finally:
        service.close(timeout=5.0)


def test_a_requests_sender_and_reason_are_logged_again_after_a_minute_with_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from penstock.decode.outcome import PointRefusal
    from penstock.receive.refusal_log import RefusalLog

    clock = FakeClock()
    refusals = RefusalLog(clock)
    for sender in ("a", "b", "c"):
        refusals.add(PointRefusal.STREAMS, sender=sender, detail="too many")
    clock.advance(59.0)
    refusals.add(PointRefusal.STREAMS, sender="d")
    assert len(caplog.records) == 1
    assert "sender d" in refusals.notes()[0]
    clock.advance(61.0)
    assert refusals.notes() == []
    refusals.add(PointRefusal.STREAMS, sender="e", detail="too many")
    assert [record.getMessage().split(" detail")[0] for record in caplog.records] == [
        "Requests or points are refused. reason=streams count=1 sender=a",
        "Requests or points are refused. reason=streams count=4 sender=e",
    ]


@pytest.mark.parametrize(
    ("name", "labels", "before", "after", "note"),
    [
        ("penstock_queue_dead_letter_total", {"queue": "relay"}, 3, 5, "dead letters of queue relay grow: 2 more"),
        ("penstock_queue_disk_available_bytes", {"queue": "relay"}, 2e9, 1e9, "queue relay is full in about 1 min"),
        ("penstock_queue_disk_available_bytes", {"queue": "relay"}, 1e9, 2e9, ""),
        ("penstock_queue_disk_available_bytes", {"queue": "relay"}, 1e12, 1e12 - 1e6, ""),
        ("penstock_spark_lag_seconds", {}, 0, 300, "Spark is 5 min behind"),
        ("penstock_spark_lag_seconds", {}, 0, 50, ""),
        ("penstock_tables_maintenance_failures_total", {"step": "vacuum"}, 0, 1, "maintenance of the tables fails at"),
        ("penstock_spark_restarts_total", {}, 1, 3, "started again 2 times"),
    ],
)
def test_trends_note_what_grows_or_runs_out(
    name: str, labels: dict[str, str], before: float, after: float, note: str
) -> None:
    clock, values = FakeClock(), [Value(name, "", labels, before)]
    trends = QueueTrends(lambda: values, clock)
    trends.look()
    clock.advance(60.0)
    values[0] = values[0]._replace(value=after)
    trends.look()
    assert [note in one for one in trends.notes()] == ([True] if note else [])
    clock.advance(700.0)
    trends.look()
    is_a_state = name == "penstock_spark_lag_seconds"
    assert [note in one for one in trends.notes()] == ([True] if note and is_a_state else [])
