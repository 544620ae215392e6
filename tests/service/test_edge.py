"""One process of the edge: started back to front, closed front to back, nothing answered for is lost."""

import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.decode.outcome import Format
from penstock.errors import BlockTooLarge, ConfigError, PenstockError, PermanentExportError, QueueFull, QueueLocked
from penstock.export.config import SendQueueConfig
from penstock.export.send_queue import SendQueue
from penstock.model.point import chunk_type, entity_of
from penstock.model.segment import read_segment, sealed
from penstock.receive.answers import PROTOBUF
from penstock.service import queues as queues_module
from penstock.service.edge import Edge
from penstock.service.queues import config_for_process
from penstock.service.receiver_set import ServiceReceivers
from penstock.service.relay_pipeline import RelayPipeline
from penstock.service.service import Service
from penstock.spool import FastQueue
from penstock.telemetry import Sample, Telemetry
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.misbehaving import Misbehaving, answer
from tests.receive.support import gauge, post, request

LONG = 600.0  # seconds: no test lasts as long, unless it waits for nothing


class FakeIntake:
    """Records the order in which it is started and closed."""

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary

    def start(self) -> None:
        self.diary.append("intake started")

    def close(self, timeout: float) -> bool:
        self.diary.append("intake closed")
        return True

    def unready(self) -> list[str]:
        return []

    def notes(self) -> list[str]:
        return []

    def dead_threads(self) -> list[str]:
        return []

    def samples(self) -> Iterable[Sample]:
        return []


class FakeReceiver(FakeIntake):
    port = 4318

    def start(self) -> None:
        self.diary.append("receiver started")

    def stop_accepting(self) -> None:
        self.diary.append("receiver stopped accepting")

    def close(self, timeout: float) -> bool:
        self.diary.append("receiver closed")
        return True

    def check_secrets(self) -> None: ...

    def reload(self) -> None:
        self.diary.append("receiver reloaded")


class Rig:
    """An edge whose receivers the test drives."""

    def __init__(self, text: str, folder: Path) -> None:
        self.diary: list[str] = []
        self.telemetry = Telemetry()
        self.sink: Any = None
        self.relay: Any = None
        config = load(ServiceConfig, text=f"data_dir: {folder}\n{text}").config
        self.edge = Edge(config, self.telemetry, self.make_receivers)

    def make_receivers(self, config: ServiceConfig, sink: Any, relay: Any) -> ServiceReceivers:
        self.sink, self.relay = sink, relay
        return ServiceReceivers(FakeIntake(self.diary), {"http": FakeReceiver(self.diary)})

    def send(self, count: int) -> list[BaseException | None]:
        """Points of one metric; the answers, as they come."""
        answers: list[BaseException | None] = []
        chunk = chunk_type("cpu").of([entity_of({"host": "a"})] * count, [1_700_000_000_000_000] * count, [1.0] * count)
        assert self.sink.submit([chunk], answers.append)
        return answers


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []

    def make(text: str = "") -> Rig:
        made.append(Rig(text, tmp_path))
        made[-1].edge.start()
        return made[-1]

    yield make
    for one in made:
        if one.edge.state != "stopped":
            one.edge.close(time.monotonic() + 5)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_points_that_were_answered_for_are_sealed_when_it_has_closed(rig: Callable[..., Rig], tmp_path: Path) -> None:
    one = rig()
    answers = one.send(100)
    wait_until(lambda: answers == [None])

    assert one.edge.close(soon()) == []

    segments = tmp_path / "segments"
    rows = [read_segment(segments / segment.name) for segment in sealed(segments)]
    assert sum(sum(table["count"].to_pylist()) for table in rows) == 100


def test_it_starts_back_to_front_and_stops_front_to_back(rig: Callable[..., Rig]) -> None:
    one = rig()
    assert one.edge.unready() == []
    one.edge.close(soon())

    assert one.diary == [
        "intake started", "receiver started", "receiver stopped accepting", "intake closed", "receiver closed",
    ]  # fmt: skip
    assert one.edge.unready() == ["stopped"]


def test_queue_folders_are_nobody_elses_business(rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig("exporter: {type: console}\nexporters: {b: {type: console}}")
    for name in ("queue", "queue-b", "rollup-queue", "segments"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700, name


def test_a_start_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    def refuse(*_: Any) -> ServiceReceivers:
        raise ConfigError("no port")

    config = load(ServiceConfig, text=f"data_dir: {tmp_path}").config
    before = threading.active_count()
    edge = Edge(config, Telemetry(), refuse)
    with pytest.raises(ConfigError, match="no port"):
        edge.start()

    wait_until(lambda: threading.active_count() <= before)
    FastQueue(tmp_path / "rollup-queue").close()  # its lock is free


def test_several_processes_have_queues_and_writers_of_their_own() -> None:
    text = "exporter: {type: console}\nexporters: {b: {type: console}}"
    config = load(ServiceConfig, text=text).config
    second = config_for_process(config, 2)

    assert config_for_process(config, 0) == config
    assert second.segments.writer == "edge.2"
    assert str(second.segments.queue.path) == "./rollup-queue.2"
    assert {str(second.queue_path(name)) for name in second.relays()} == {"queue.2", "queue-b.2"}


def test_a_relay_only_edge_needs_no_l1(rig: Callable[..., Rig], tmp_path: Path) -> None:
    one = rig("pipelines: {rollup: false}\nexporter: {type: console}")

    assert one.sink is None
    assert not (tmp_path / "rollup-queue").exists()


def test_a_queue_that_is_nearly_full_is_a_reason(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = MemoryExporter()
    exporter.hold()
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: exporter)
    one = rig(
        "pipelines: {rollup: false}\nexporter: {type: console, queue: {max_bytes: 1000, adaptive_enabled: false}}"
    )
    answers: list[BaseException | None] = []
    assert one.relay.submit_raw(Format.OTLP, [b"x" * 960], answers.append)

    (reason,) = one.edge.unready()
    assert reason.startswith("queue relay is 96% full")
    exporter.release()


def test_stopping_waits_for_a_queue_that_empties_and_not_for_a_destination_that_is_down(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = MemoryExporter(), FailingExporter()
    bad.fail_with(ConnectionRefusedError("down"))
    exporters = iter([good, bad])
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: next(exporters))
    one = rig(
        "pipelines: {rollup: false}\nexporter: {type: console, queue: {workers: 1}}\n"
        "exporters: {down: {type: console, queue: {workers: 1, circuit_breaker: {threshold: 1}}}}"
    )
    answers: list[BaseException | None] = []
    for number in range(50):
        assert one.relay.submit_raw(Format.OTLP, [b"request %d" % number], answers.append)

    assert one.edge.close(soon(LONG)) == []

    assert answers == [None] * 50
    assert len(good.batches) == 50


def test_a_queue_that_could_not_be_emptied_in_time_is_said(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = MemoryExporter()
    slow.hold()
    monkeypatch.setattr(queues_module, "make_stage_exporter", lambda _: slow)
    one = rig("pipelines: {rollup: false}\nexporter: {type: console, queue: {workers: 1}}")
    assert one.relay.submit_raw(Format.OTLP, [b"a", b"b"], lambda _: None)

    assert one.edge.close(soon(1.0)) == ["queue relay holds 2 batches, the next start goes on with them"]
    assert "Queue is closed. queue=relay left=2" in [record.getMessage() for record in caplog.records]


PushResult = BaseException | Mapping[int, BaseException] | None


def kinds(result: PushResult) -> dict[int, type[BaseException]]:
    assert isinstance(result, Mapping)
    return {place: type(error) for place, error in result.items()}


def senders(tmp_path: Path, *exporters: MemoryExporter, **settings: Any) -> list[SendQueue]:
    return [
        SendQueue.open(exporter, SendQueueConfig(path=tmp_path / f"q{n}", workers=1, **settings))
        for n, exporter in enumerate(exporters)
    ]


def test_a_request_goes_to_the_destinations_that_understand_it(tmp_path: Path) -> None:
    both, otlp = senders(tmp_path, MemoryExporter(), MemoryExporter())
    relay = RelayPipeline({"a": (both, ("otlp", "remote_write")), "b": (otlp, ("otlp",))})
    answers: list[PushResult] = []

    relay.submit_raw(Format.OTLP, [b"1", b"2"], answers.append)
    relay.submit_raw(Format.REMOTE_WRITE, [b"3"], answers.append)
    relay.submit_raw(Format.EVENTS, [b"4"], answers.append)

    assert answers == [None] * 3
    assert (len(both), len(otlp)) == (3, 2)
    assert [relay.takes(kind) for kind in Format] == [True, False, True, False]
    both.close()
    otlp.close()


def test_a_full_queue_refuses_before_anything_was_taken(tmp_path: Path) -> None:
    (full,) = senders(tmp_path, MemoryExporter(), max_bytes=1000, full_behavior="drop_newest", adaptive_enabled=False)
    relay = RelayPipeline({"a": (full, ("otlp",))})
    answers: list[PushResult] = []

    assert relay.submit_raw(Format.OTLP, [b"x" * 900], answers.append)
    assert not relay.submit_raw(Format.OTLP, [b"x" * 900], answers.append)
    assert relay.submit_raw(Format.OTLP, [b"x" * 50, b"x" * 2000, b"x" * 900, b"x"], answers.append)

    assert answers[0] is None
    assert kinds(answers[1]) == {1: BlockTooLarge, 2: QueueFull, 3: QueueFull}  # no later body passes an earlier one
    assert len(full) == 2
    full.close()


def test_without_a_queue_each_request_hears_what_the_destination_said_of_it(tmp_path: Path) -> None:
    never = PermanentExportError("400 Bad Request: no such tenant")
    (direct,) = senders(tmp_path, FailingExporter(poison=(b"poison", never)), enabled=False)
    relay = RelayPipeline({"a": (direct, ("otlp",))})
    answers: list[PushResult] = []

    assert relay.submit_raw(Format.OTLP, [b"a", b"poison", b"b"], answers.append)

    wait_until(answers.__len__)
    assert answers == [{1: never}]
    relay.close()
    direct.close()


def test_a_queue_that_syncs_is_waited_for_by_threads_of_its_own(tmp_path: Path) -> None:
    (safe,) = senders(tmp_path, MemoryExporter(), durability="fsync")
    relay = RelayPipeline({"a": (safe, ("otlp",))})
    answers: list[PushResult] = []
    for _ in range(10):
        assert relay.submit_raw(Format.OTLP, [b"1", b"2", b"3"], answers.append)

    relay.close()

    wait_until(lambda: len(answers) == 10)
    assert answers == [None] * 10
    assert len(safe) == 30
    safe.close()


def test_segments_are_few_however_many_requests_there_are(rig: Callable[..., Rig], tmp_path: Path) -> None:
    one = rig("segments: {interval: 600s}")
    for _ in range(20):
        wait_until(one.send(1).__len__)  # answered: one after the other, each is a block of its own
    assert one.edge.close(soon(LONG)) == []  # what gathers is not waited for at the end

    assert 1 <= len(sealed(tmp_path / "segments")) <= 3


def test_a_folder_that_another_penstock_has_is_said_with_what_to_do(rig: Callable[..., Rig]) -> None:
    rig("exporter: {type: console}")
    with pytest.raises(QueueLocked, match="if another penstock runs here, give this one its own --data-dir"):
        rig("exporter: {type: console}")
    with pytest.raises(QueueLocked, match=r"rollup-queue.*--data-dir"):
        rig()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("receivers: {http: {tls: {cert_file: /no/cert, key_file: /no/key}}}", "receivers.http.tls.cert_file must be"),
        ("receivers: {grpc: {tls: {cert_file: /no/cert, key_file: /no/key}}}", "receivers.grpc.tls.cert_file must be"),
        ("receivers: {http: {auth: {token_file: /no/tokens}}}", "receivers.http.auth.token_file /no/tokens: No such"),
        ("definitions: /no/metrics.yaml", "definitions /no/metrics.yaml: No such file"),
    ],
)
def test_what_is_missing_at_the_start_is_said_with_its_key(tmp_path: Path, section: str, message: str) -> None:
    settings = f"data_dir: {tmp_path}\nspark: {{enabled: false}}\nadmin: {{enabled: false}}\n{section}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        Service(load(ServiceConfig, text=settings)).start()


@pytest.mark.parametrize("receiver", ["http", "grpc"])
def test_a_port_that_is_taken_is_said_in_the_systems_words(tmp_path: Path, receiver: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        named = {"http": {"port": 0}, "grpc": {"port": 0}} | {receiver: {"port": port}}
        settings = f"data_dir: {tmp_path}\nspark: {{enabled: false}}\nadmin: {{enabled: false}}\nreceivers: {named}"
        with pytest.raises(
            PenstockError, match=rf"{receiver} cannot listen on \S+:{port}: Address already in use; rec"
        ):
            Service(load(ServiceConfig, text=settings)).start()


def test_a_folder_that_cannot_be_made_is_said_with_the_key_that_names_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = f"data_dir: {tmp_path}/file/data\nspark: {{enabled: false}}\nadmin: {{enabled: false}}"
    with pytest.raises(
        PenstockError, match=r"file/data\S*: Not a directory; name a folder that is yours with data_dir"
    ):
        Service(load(ServiceConfig, text=settings)).start()


def test_an_admin_port_that_is_taken_is_said_with_the_flag_that_chooses_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        settings = f"data_dir: {tmp_path}\nspark: {{enabled: false}}\nadmin: {{listen: '{address}'}}"
        with pytest.raises(PenstockError, match=f"admin.listen {re.escape(address)}: .* in use; .*--admin-listen"):
            Service(load(ServiceConfig, text=settings)).start()


def test_a_sender_hears_what_a_destination_without_a_queue_will_never_take(tmp_path: Path) -> None:
    body = request(gauge("cpu", 0.5))
    with Misbehaving([answer(400, b"no such tenant")] * 2).running() as destination:
        text = (
            f"data_dir: {tmp_path}\nspark: {{enabled: false}}\nadmin: {{enabled: false}}\n"
            "pipelines: {rollup: false}\nreceivers: {http: {port: 0}, grpc: {port: 0}}\n"
            f"exporter: {{type: otlp_http, url: '{destination.url}', queue: {{enabled: false}}}}\n"
        )
        service = Service(load(ServiceConfig, text=text))
        service.start()
        try:
            ports = service.ports()
            replied = post(ports["http"], "/v1/metrics", body.SerializeToString(), Content_Type=PROTOBUF)
            with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
                export: Any = MetricsServiceStub(channel).Export  # type: ignore[no-untyped-call]  # generated
                with pytest.raises(grpc.RpcError) as refused:
                    export(body, timeout=10)
        finally:
            assert service.close() == []
    assert replied.status == 400
    assert "Retry-After" not in replied.headers
    assert b"400 Bad Request: no such tenant" in replied.body
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no such tenant" in refused.value.details()
