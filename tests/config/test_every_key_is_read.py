"""No key does nothing: every key of the tree is set to another value, and code that is assembled from it reads that.

The classes of the tree are watched while the stages are made, started and used once. What counts as reading a key:

- The code names it, `config.max_bytes`. A loop over all fields says nothing about one of them.
- It is not the tree itself: checking, comparing, showing and loading a value do nothing with it.
- It sees the other value, not the default.
"""

import dis
import http.client
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import click
import cramjam
import grpc
import pytest

from penstock.cli.run_command import _run
from penstock.config.destinations import DESTINATIONS
from penstock.config.load import LoadedConfig, load
from penstock.config.schema import NAME, KeyPath, flag_of_key, schema_of
from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError, DiskFull
from penstock.export.config import ExportQueueConfig
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.receive.intake import Intake
from penstock.service import queues, spark_process
from penstock.service.current_definitions import CurrentDefinitions, read_service_definitions
from penstock.service.exit_codes import LATE
from penstock.service.orphan_queues import find_orphan_queues
from penstock.service.receiver_set import RECEIVERS, make_service_receivers
from penstock.service.service import Service
from penstock.spool import FastQueue
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.config.test_config import example
from tests.receive.support import KeepingSink, gauge, request

TOKEN = "a-token-that-is-long-enough"
KEYS = list(schema_of(ServiceConfig).walk())
# Functions of the tree that look at values without doing anything with them.
_LOOKING = {"__post_init__", "__eq__", "__repr__", "__hash__", "notes", "problems"}
_TREE = ("penstock.config.load", "penstock.config.show", "penstock.config.schema", "dataclasses")


class KeyProbe:
    """Knows which keys were read, and with which values, of the configurations that it watches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[object]] = {}
        self._paths: dict[int, KeyPath] = {}
        self._kept: list[object] = []  # an id is one object's for as long as that lives
        self._patch = patch
        self._watched: set[type[Any]] = set()

    def watch(self, config: object, path: KeyPath = ()) -> None:
        """Note from now on what is read of it and of the sections in it."""
        self._paths[id(config)] = path
        self._kept.append(config)
        self._watch_class(type(config))
        for one in fields(config):  # type: ignore[arg-type]
            value = getattr(config, one.name)
            if is_dataclass(value) and id(value) not in self._paths:
                self.watch(value, (*path, one.name))
            for inner in value.values() if one.name == "exporters" else ():
                self.watch(inner, (*path, one.name, NAME))

    def _watch_class(self, kind: type[Any]) -> None:
        for base in kind.__mro__[:-1]:
            if base in self._watched:
                continue
            self._watched.add(base)
            for name in (one.name for one in fields(base) if one.name in base.__dict__):
                self._patch.setattr(base, name, _Watched(base.__dict__[name], name, self._note))

    def follow(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose result is read in the place of its first argument."""

        def copied(config: Any, *args: Any, **more: Any) -> Any:
            made = copy(config, *args, **more)
            if id(config) in self._paths and is_dataclass(made):
                self.watch(made, self._paths[id(config)])
            return made

        return copied

    def follow_copies(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("penstock.") and getattr(module, "replace", None) is replace:
                self._patch.setattr(module, "replace", self.follow(replace))
        self._patch.setattr(ExportQueueConfig, "queue_config", self.follow(ExportQueueConfig.queue_config))
        self._patch.setattr(queues, "_send_queue_config", self.follow(queues._send_queue_config))

    def _note(self, config: object, name: str, value: object) -> None:
        reader = sys._getframe(2)
        if id(config) in self._paths and _names_the_key(reader) and not _only_looks(reader):
            self.seen.setdefault(".".join((*self._paths[id(config)], name)), []).append(value)


class _Watched:
    """A field of a class with slots that says when it is read."""

    def __init__(self, slot: Any, name: str, note: Callable[[object, str, object], None]) -> None:
        self._slot, self._name, self._note = slot, name, note

    def __get__(self, config: object, owner: type[Any] | None = None) -> Any:
        if config is None:
            return self
        value = self._slot.__get__(config, owner)
        self._note(config, self._name, value)
        return value

    def __set__(self, config: object, value: object) -> None:
        self._slot.__set__(config, value)


def _names_the_key(reader: FrameType) -> bool:
    return dis.opname[reader.f_code.co_code[reader.f_lasti]] in ("LOAD_ATTR", "LOAD_METHOD")


def _only_looks(reader: FrameType) -> bool:
    frame: FrameType | None = reader
    while frame is not None:
        if frame.f_code.co_name in _LOOKING or frame.f_globals.get("__name__") in _TREE:
            return True
        frame = frame.f_back
    return False


# -- what is assembled -------------------------------------------------------------------------------------------------

DESTINATION = ("exporter", "exporters.NAME")


class Files:
    """What keys name: a certificate that is its own authority, a token, definitions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate, self.key = str(folder / "certificate.pem"), str(folder / "key.pem")
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names]
        subprocess.run([*command, "-keyout", self.key, "-out", self.certificate], check=True, capture_output=True)
        self.token = str(folder / "token")
        Path(self.token).write_text(TOKEN)
        self.definitions = str(folder / "definitions.yaml")
        Path(self.definitions).write_text("metrics: []")

    def keys(self) -> dict[str, str]:
        """The keys that name files, and those that cannot be changed by themselves."""
        given = {"definitions": self.definitions, "receivers.amqp.url": "amqps://nowhere.invalid/"}
        for key in KEYS:
            given |= {key.name: self.certificate} if key.path[-1] in ("cert_file", "ca_file", "client_ca_file") else {}
            given |= {key.name: self.key} if key.path[-1] == "key_file" else {}
            given |= {key.name: self.token} if key.path[-1] in ("token_file", "password_file") else {}
            given |= {key.name: "300"} if key.path[-2:] == ("queue", "max_size") else {}  # room for what comes
        for name in ("otlp_path", "remote_write_path", "events_path"):
            given[f"receivers.http.{name}"] = f"/{name}"
        given |= {f"receivers.{name}.listen": "127.0.0.1:0" for name in ("http", "grpc")}
        given |= {f"receivers.{name}.auth.token_env": "PATH" for name in ("http", "grpc")}
        return given


def destination(**keys: str) -> dict[str, str]:
    return {f"{one}.{name.replace('__', '.')}": text for name, text in keys.items() for one in DESTINATION}


AS_IT_IS = ""  # the key keeps its default
RECEIVING = dict.fromkeys(("receivers.http.enabled", "receivers.grpc.enabled", "receivers.amqp.enabled"), AS_IT_IS)
# Each has every key changed, but for those that it names: what is switched off reads no other key.
RELAY_AND_ROLLUP = {
    **RECEIVING,
    "processes": AS_IT_IS,
    "pipelines.relay": AS_IT_IS,
    "pipelines.rollup": AS_IT_IS,
    "admin.enabled": AS_IT_IS,
    "admin.listen": "127.0.0.1:0",
    **destination(type="otlp_http", url="https://127.0.0.1:9", queue__enabled=AS_IT_IS, queue__type=AS_IT_IS),
    **destination(queue__adaptive_enabled=AS_IT_IS, queue__failover__enabled=AS_IT_IS),
    **destination(queue__failover__drain_interval="10ms", queue__max_size=AS_IT_IS),
}
RELAY_ONLY = {
    **RELAY_AND_ROLLUP,
    "pipelines.rollup": "false",
    "admin.enabled": "false",
    **destination(type="remote_write", url="https://127.0.0.1:9/write", queue__enabled="false", queue__order=AS_IT_IS),
    **destination(queue__pipeline_split__enabled=AS_IT_IS, queue__backoff__enabled=AS_IT_IS),
    "segments.queue.backoff.enabled": AS_IT_IS,
    **destination(queue__adaptive_enabled="false", queue__failover__enabled="false", queue__max_size="300"),
}
FROM_MEMORY = {
    **RELAY_ONLY,
    **destination(queue__type="memory", queue__enabled=AS_IT_IS, queue__adaptive_workers__enabled=AS_IT_IS),
}
URLS = {"amqp": "amqps://nowhere.invalid/"}  # of the kinds that are not reached over HTTP
SWITCHED_OFF = {
    **RELAY_ONLY,
    "processes": "2",
    "pipelines.relay": "false",
    "pipelines.rollup": AS_IT_IS,
    "receivers.http.enabled": "false",
    "receivers.grpc.enabled": "false",
    "receivers.amqp.enabled": "true",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The values that were read, by key."""
    files = Files(tmp_path_factory.mktemp("keys"))
    with pytest.MonkeyPatch.context() as patch:
        probe = KeyProbe(patch)
        probe.follow_copies()
        patch.setattr("penstock.service.logs.set_up_logs", lambda *_: None)
        patch.setattr("penstock.service.signals.call_on_signals", lambda handle, *_: handle(signal.SIGTERM))

        def loaded(given: Mapping[str, str]) -> LoadedConfig[ServiceConfig]:
            found = changed({**files.keys(), **given, "data_dir": str(tmp_path_factory.mktemp("data"))})
            probe.watch(found.config)
            return found

        whole, relay, off = map(loaded, (RELAY_AND_ROLLUP, RELAY_ONLY, SWITCHED_OFF))
        for one in (whole, whole, relay):  # the second finds what the first has left
            run_service(one, files, patch)
        make_every_receiver(whole.config)
        for kind in DESTINATIONS:
            url = URLS.get(kind, "https://127.0.0.1:9")
            config = loaded({**FROM_MEMORY, **destination(type=kind, url=url)}).config
            for name in config.relays():
                queues.open_stage_relay_queue(config, name).start().close(5.0)
        with_failover = loaded({**RELAY_AND_ROLLUP, **destination(queue__durability="memory")}).config
        for name in ("relay", "backup"):
            push_to_full_disk(with_failover, name, probe.seen, patch)
        for one in (whole, relay):
            fail_twice(one.config)
        Service(off)
        find_orphan_queues(off.config)
        make_service_receivers(off.config, None, None)
        run_spark_job(whole.config, patch)
    return probe.seen


def changed(given: Mapping[str, str]) -> LoadedConfig[ServiceConfig]:
    """Every key with another value than its default, but for those that are given."""
    texts = {key.name: f"./{key.name}" if key.path[-1] == "path" else example(key) for key in KEYS} | dict(given)
    flags = {name.replace(NAME, "backup"): text for name, text in texts.items() if text != AS_IT_IS}
    return load(ServiceConfig, flags={flag_of_key(tuple(name.split("."))): text for name, text in flags.items()})


def run_service(loaded: LoadedConfig[ServiceConfig], files: Files, patch: pytest.MonkeyPatch) -> None:
    """As `penstock run` does, from the start to SIGTERM, with a request of each kind in between."""
    start = Service.start

    def start_and_send(service: Service) -> None:
        start(service)
        send_one_of_each(service.ports(), files)

    with patch.context() as inner:
        inner.setattr(Service, "start", start_and_send)
        assert _run(click.Context(click.Command("run")), None, loaded) in (0, LATE)


def send_one_of_each(ports: Mapping[str, int], files: Files) -> None:
    context = ssl.create_default_context(cafile=files.certificate)
    context.load_cert_chain(files.certificate, files.key)
    otlp = request(gauge("queue.depth", 3.0, queue="mail")).SerializeToString()
    written = cramjam.snappy.compress_raw(write_request([({"__name__": "a"}, [(1, 1.0)])]))
    json_type, protobuf = "application/json", "application/x-protobuf"
    for path, body, kind in (
        ("/otlp_path", otlp, protobuf),
        ("/otlp_path", b"{}", json_type),
        ("/events_path", b'{"name": "a", "value": 1}', json_type),
        ("/remote_write_path", bytes(written), protobuf),
    ):
        client = http.client.HTTPSConnection("localhost", ports["http"], context=context, timeout=20)
        encoding = {"Content-Encoding": "snappy"} if "write" in path else {}
        client.request("POST", path, body, {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind, **encoding})
        client.getresponse().read()
        client.close()
    certificate, key = Path(files.certificate).read_bytes(), Path(files.key).read_bytes()
    with grpc.secure_channel(
        f"localhost:{ports['grpc']}", grpc.ssl_channel_credentials(certificate, key, certificate)
    ) as channel:
        call = channel.unary_unary("/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")
        with suppress(grpc.RpcError):
            call(otlp, timeout=20, metadata=[("authorization", f"Bearer {TOKEN}")])


def make_every_receiver(config: ServiceConfig) -> None:
    intake = Intake(KeepingSink(), None, config.intake).start()
    for name, kind in RECEIVERS.items():
        kind.make(getattr(config.receivers, name), intake)
    intake.close(5.0)


def push_to_full_disk(
    config: ServiceConfig, name: str, seen: Mapping[str, list[object]], patch: pytest.MonkeyPatch
) -> None:
    """What the disk refuses goes to the failover, which begins to send it."""

    def refuse(*_: object, **__: object) -> None:
        raise DiskFull("no room")

    sender = queues.open_stage_relay_queue(config, name).start()
    section = "exporter" if name == "relay" else "exporters.NAME"
    with patch.context() as inner:
        inner.setattr(FastQueue, "push", refuse)
        sender.push(b"a batch")
        wait_until(lambda: f"{section}.queue.failover.drain_batch" in seen)
    sender.close(5.0)


def fail_twice(config: ServiceConfig) -> None:
    """As a destination does: how long it is left alone then."""
    for queue in (config.exporter.queue, config.exporters["backup"].queue, config.segments.queue):
        backoff = queue.new_backoff()
        backoff.failed(0)
        backoff.failed(1)


def run_spark_job(config: ServiceConfig, patch: pytest.MonkeyPatch) -> None:
    """The process of Spark without Java: the session, the job and the tables are not there."""
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # else Spark's page is refused on a cluster
    for name in ("spark.session.start_session", "spark.supervisor.JobSupervisor", "tables.port.open_tables"):
        patch.setattr(f"penstock.{name}", MagicMock())
    stopping = threading.Event()
    spark_process._run(
        config, CurrentDefinitions(read_service_definitions(config)), Telemetry(), stopping, threading.Event()
    )
    stopping.set()


# -- what must hold ----------------------------------------------------------------------------------------------------

# Their effect is that the tree accepts an address: see `test_insecure_is_what_opens_a_receiver_to_the_network`.
PERMISSIONS = ("receivers.http.insecure", "receivers.grpc.insecure")


@pytest.mark.parametrize("key", [key.name for key in KEYS if key.name not in PERMISSIONS])
def test_the_other_value_of_a_key_is_read(key: str, seen: dict[str, list[object]]) -> None:
    assert [value for value in seen.get(key, ()) if value != default_of(key)], f"nothing reads {key}"


def default_of(key: str) -> object:
    """The default as a built tree holds it."""
    value: object = ServiceConfig()
    for word in key.replace("exporters.NAME", "exporter").split("."):
        value = getattr(value, word, None)
    return value


@pytest.mark.parametrize("key", PERMISSIONS)
def test_insecure_is_what_opens_a_receiver_to_the_network(key: str) -> None:
    host = {flag_of_key((*key.split(".")[:-1], "host")): "0.0.0.0"}
    with pytest.raises(ConfigError, match="is open to the network"):
        load(ServiceConfig, flags=host)
    load(ServiceConfig, flags={**host, flag_of_key(tuple(key.split("."))): "true"})


def test_a_key_that_is_only_checked_copied_or_compared_counts_as_not_read() -> None:
    with pytest.MonkeyPatch.context() as patch:
        probe = KeyProbe(patch)
        probe.follow_copies()
        config = ServiceConfig()
        probe.watch(config)
        copied = probe.follow(replace)(config.segments.queue, max_size=7)
        assert copied != config.segments.queue
        assert [getattr(copied, one.name) for one in fields(copied)]
        assert not any(key.startswith("segments.queue.") for key in probe.seen)

        assert copied.max_size == 7
        assert probe.seen["segments.queue.max_size"] == [7]
