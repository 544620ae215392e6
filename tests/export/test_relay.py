"""`penstock relay`: a folder is emptied, mistakes are named, and what is left is still there."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.cli.relay_command import read_relay_options
from penstock.config.destinations import ExporterSection, RelayQueueSection
from penstock.export.exporter import PartialSuccess, Prepared
from penstock.export.http_client import TlsConfig
from penstock.spool import Durability, FastQueue, FastQueueConfig
from penstock.testing import MemoryExporter, wait_until
from tests.export.misbehaving import Misbehaving, answer
from tests.export.quick import numbered

RELAY = [sys.executable, "-m", "penstock", "relay"]


def filled(folder: Path, count: int) -> Path:
    with FastQueue(folder / "queue", FastQueueConfig(durability=Durability.DISK)) as queue:
        queue.push_many(numbered(count))
    return folder / "queue"


def relay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["relay", *map(str, arguments)])


def queue_config(file: Path | None, **flags: str) -> RelayQueueSection:
    return read_relay_options(file, {}, {f"--{name.replace('_', '-')}": text for name, text in flags.items()}).queue


def test_it_empties_a_folder_and_says_so(tmp_path: Path) -> None:
    command = [*RELAY, "--to", "console", "--queue-workers", "1", "--queue-path", str(filled(tmp_path, 2))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["batch 1: 12 bytes 'batch 000000'", "batch 2: 12 bytes 'batch 000001'"]
    assert "sent 2 batches, 24 bytes; 0 wait; 0 dead letters; 0 failed sends" in ran.stderr


def test_what_is_given_for_the_destination_reaches_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    server = Misbehaving()
    with server.running():
        ran = relay(
            "--to", "otlp-http", "--url", server.url, "--queue-path", filled(tmp_path, 1), "--signal", "traces",
            "--compression", "none", "--header", "X-Scope-OrgID: a", "--token-file", tmp_path / "token",
            "--send-timeout", "5s",
        )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    (request,) = server.requests
    assert (request.path, request.body) == ("/v1/traces", b"batch 000000")
    assert (request.headers["x-scope-orgid"], request.headers["authorization"]) == ("a", "Bearer secret")


@pytest.fixture
def destinations(monkeypatch: pytest.MonkeyPatch) -> list[ExporterSection]:
    """What destinations were made of; they take everything."""
    made: list[ExporterSection] = []

    def make_exporter(config: ExporterSection, signal: str) -> MemoryExporter:
        made.append(config)
        return MemoryExporter()

    monkeypatch.setattr("penstock.service.relay_pipeline.make_stage_exporter", make_exporter)
    return made


def test_a_bare_number_is_seconds_as_a_flag_and_in_a_file(tmp_path: Path, destinations: list[ExporterSection]) -> None:
    ran = relay(
        "--to", "otlp-http", "--url", "http://h", "--send-timeout", "5", "--queue-retry-interval", "0.5",
        "--queue-path", filled(tmp_path, 1),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert destinations[0].timeout == 5.0
    (tmp_path / "p.yaml").write_text('exporter: {queue: {retry_interval: "0.5", max_retry_delay: 7}}')
    config = queue_config(tmp_path / "p.yaml", queue_retry_interval="0.25")
    assert (config.retry_interval, config.max_retry_delay) == (0.25, 7.0)
    assert queue_config(tmp_path / "p.yaml").retry_interval == 0.5


def test_every_key_of_the_destination_is_a_flag(tmp_path: Path, destinations: list[ExporterSection]) -> None:
    (tmp_path / "p.yaml").write_text("exporter: {type: otlp_http, url: 'http://h', headers: {a: b}}")
    ran = relay(
        "-c", tmp_path / "p.yaml", "--exporter-type", "remote_write", "--exporter-url", "http://other",
        "--exporter-in-order", "false", "--exporter-queue-path", filled(tmp_path, 1),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    (config,) = destinations
    assert (config.type, config.url, config.in_order, config.headers) == ("remote_write", "http://other", False, {})


def test_what_is_given_for_a_broker_reaches_it(tmp_path: Path, destinations: list[ExporterSection]) -> None:
    (tmp_path / "password").write_text("secret")
    ran = relay(
        "--to", "amqp", "--url", "amqps://host", "--exchange", "telemetry", "--routing-key", "metrics",
        "--token-file", tmp_path / "password", "--ca-file", tmp_path / "password", "--queue-path", filled(tmp_path, 1),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    (config,) = destinations
    assert (config.type, config.url, config.exchange, config.routing_key) == (
        "amqp",
        "amqps://host",
        "telemetry",
        "metrics",
    )
    assert config.token_file == str(tmp_path / "password")
    assert config.tls == TlsConfig(ca_file=str(tmp_path / "password"))


def test_what_became_a_dead_letter_is_an_exit_code_of_1(tmp_path: Path) -> None:
    server = Misbehaving([answer(400, b"no")])
    with server.running():
        ran = relay("--to", "otlp-http", "--url", server.url, "--queue-path", filled(tmp_path, 2))
    assert ran.exit_code == 1
    assert "sent 1 batches" in ran.output
    assert "1 dead letters" in ran.output


def test_dead_letters_from_before_are_said_and_are_an_exit_code_of_1_until_they_are_gone(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    server = Misbehaving([answer(400, b"no"), answer(400, b"no")])
    with server.running():
        to = ["--to", "otlp-http", "--url", server.url, "--queue-workers", 1, "--queue-path", path]
        first, second = relay(*to), relay(*to)
        with FastQueue(path) as queue:
            queue.replay_dead_letters()
        third = relay(*to)
    assert (first.exit_code, second.exit_code, third.exit_code) == (1, 1, 0)
    assert "sent 1 batches, 12 bytes; 0 wait; 2 dead letters; 2 failed sends" in first.output
    assert "sent 0 batches, 0 bytes; 0 wait; 2 dead letters, 2 of them from before; 0 failed sends" in second.output
    assert f"penstock queue inspect {path} says why" in second.output
    assert "sent 2 batches, 24 bytes; 0 wait; 0 dead letters; 0 failed sends" in third.output
    assert "says why" not in third.output


def test_a_folder_of_dead_letters_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path, elsewhere = filled(tmp_path, 2), tmp_path / "letters"
    for config in (FastQueueConfig(), FastQueueConfig(dead_letter=elsewhere)):
        with FastQueue(path, config) as queue:
            queue.reject(queue.lease()[0], "400 no")

    for folder, advice in (
        (path / "dead-letters", f"penstock queue replay {path} --dead-letters"),
        (elsewhere, f"penstock queue replay QUEUE --dead-letters --from {elsewhere}"),
    ):
        ran = relay("--to", "console", "--queue-path", folder)
        assert ran.exit_code == 2
        assert f"{folder} holds dead letters" in ran.output
        assert advice in ran.output
        with FastQueue(folder) as letters:
            assert len(letters) == 1


def test_the_words_of_a_server_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    server = Misbehaving([answer(400, b"\x1b[2Jgone")])
    with server.running():
        command = [*RELAY, "--to", "otlp-http", "--url", server.url, "--queue-path", str(filled(tmp_path, 1))]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "reason=400 Bad Request: \\x1b[2Jgone" in ran.stderr


def test_a_broker_that_is_not_there_is_a_line_of_ours_and_none_of_its_clients(tmp_path: Path) -> None:
    command = [*RELAY, "--to", "amqp", "--url", "amqp://127.0.0.1:1", "--routing-key", "x", "--timeout", "1"]
    with subprocess.Popen(
        [*command, "--queue-path", str(filled(tmp_path, 1))], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        first = child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        said = child.stderr.readlines()
    assert "WARNING Export started failing." in first
    assert [line[:4] for line in said] == ["sent"]


def test_a_kill_makes_it_repeat_no_more_than_was_under_way(tmp_path: Path) -> None:
    path = filled(tmp_path, 1000)
    server = Misbehaving()
    with server.running():
        command = ["--to", "otlp-http", "--url", server.url, "--compression", "none", "--queue-path", str(path)]
        with subprocess.Popen([*RELAY, *command, "--queue-workers", "2"], stderr=subprocess.DEVNULL) as child:
            wait_until(lambda: len(server.requests) > 50)
            child.kill()
        assert relay(*command).exit_code == 0
    assert {request.body for request in server.requests} == set(numbered(1000))
    assert len(server.requests) <= 1000 + 2


def test_sigterm_ends_it_and_leaves_the_rest(tmp_path: Path) -> None:
    path = filled(tmp_path, 5)
    command = [*RELAY, "--to", "otlp-http", "--url", "http://127.0.0.1:1", "--queue-path", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert "Export started failing" in child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        said = child.stderr.read()
    assert child.returncode == 1
    assert "sent 0 batches, 0 bytes; 5 wait" in said
    with FastQueue(path) as queue:
        assert len(queue) == 5


def test_sigterm_ends_it_in_the_time_that_it_was_given(tmp_path: Path) -> None:
    path = filled(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        command = [*RELAY, "--to", "otlp-http", "--url", url, "--queue-path", str(path), "--timeout", "0"]
        with subprocess.Popen([*command, "--send-timeout", "10m"], stderr=subprocess.PIPE) as child:
            connection, _ = deaf.accept()
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=25) == 1  # with the 30 s that it has otherwise it would still wait
            connection.close()
    with FastQueue(path) as queue:
        assert len(queue) == 1


def test_a_reader_that_goes_away_ends_the_console_and_not_the_batches(tmp_path: Path) -> None:
    path = filled(tmp_path, 10_000)
    command = [*RELAY, "--to", "console", "--queue-path", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.stdout.close()
        child.wait(timeout=30)
    assert child.returncode == 1
    with FastQueue(path) as queue:
        assert len(queue) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to console --queue-path no/such", "there is no queue in no/such: name its folder with --queue-path"),
        ("--to console --queue-path .", "there is no queue in .: name its folder with --queue-path"),
        (f"--to console --queue-path {'x' * 300}", "File name too long"),
        ("--to console --queue-type memory", "type must be disk"),
        ("--to otlp-http", "--to: exporter.url must say where the otlp_http destination is"),
        ("--to otlp-http --url localhost:4318", "url must look like http://host:port/path"),
        ("--to otlp-http --url http://h:99999", "url cannot be read: Port out of range"),
        ("--to otlp-http --url http://h --signal smoke", "signal must be one of metrics, traces, logs, got 'smoke'"),
        ("--to otlp-http --url http://h --header nonsense", "--header must look like"),
        ("--to otlp-http --url http://h --send-timeout soon", "--send-timeout: exporter.timeout must be a duration"),
        ("--to otlp-http --url http://h --send-timeout 0", "--send-timeout: exporter.timeout must be > 0, got 0"),
        ("--to otlp-http --url http://h --token-file none", "'none' does not exist"),
        ("--to amqp --url amqp://h:x --routing-key q", "url must look like amqp://"),
        ("--to console --timeout -1", "--timeout"),
        ("--to otlp-http --url http://h --ca-file queue/fastqueue.meta", "tls is set, but the url says http://"),
        ("--to console --url http://h", "--url is for otlp-http, remote-write, amqp, not for console"),
        ("--to console --header a:b", "--header is for otlp-http, remote-write, not for console"),
        ("--to remote-write --url http://h --compression zstd", "--compression is for otlp-http, not for remote-write"),
        ("--to remote-write --url http://h --signal logs", "--signal is for otlp-http, not for remote-write"),
        ("--to otlp-http --url http://h --routing-key q", "--routing-key is for amqp, not for otlp-http"),
        ("--to otlp-http --url http://h --exchange x", "--exchange is for amqp, not for otlp-http"),
        ("--to amqp --url amqp://h --routing-key q --send-timeout 1s", "--send-timeout is for otlp-http, remote-write"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    filled(tmp_path, 1)
    ran = CliRunner().invoke(main, ["relay", *arguments.split()])
    assert ran.exit_code == 2, ran.output
    assert message in ran.output
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "p.yaml:1: the file must be a mapping of keys, got [1]"),
        ("exporter: {queue: ", "not YAML"),
        (
            "exporter:\n  queue:\n    max_byts: 1Gi",
            "p.yaml:3: exporter.queue.max_byts is not a setting; did you mean max_bytes?",
        ),
        ("exporter: {queue: {workers: -1}}", "p.yaml:1: exporter.queue.workers must be a whole number >= 0, got -1"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    arguments = ["relay", "--to", "console", "-c", str(tmp_path / "p.yaml"), "--queue-backoff-enabled", "false"]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 2, ran.output
    assert message in ran.output


def test_without_to_and_url_the_file_says_where_it_goes_and_how(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    server, other = Misbehaving(), Misbehaving()
    with server.running(), other.running():
        (tmp_path / "p.yaml").write_text(
            f"data_dir: {tmp_path}\n"
            f"exporter: {{type: otlp_http, url: '{server.url}', headers: {{X-A: a, X-B: b}}, compression: none,\n"
            f"  token_file: {tmp_path / 'token'}, queue: {{enabled: false}}}}\n"
        )
        filled(tmp_path, 1)
        ran = relay("-c", tmp_path / "p.yaml", "--header", "X-B: c", "--signal", "logs")
        assert ran.exit_code == 0, ran.output
        filled(tmp_path, 1)
        ran = relay("-c", tmp_path / "p.yaml", "--to", "otlp-http", "--url", other.url)
        assert ran.exit_code == 0, ran.output
    (request,), (elsewhere,) = server.requests, other.requests
    assert (request.path, request.body) == ("/v1/logs", b"batch 000000")
    assert [request.headers[name] for name in ("x-a", "x-b", "authorization")] == ["a", "c", "Bearer secret"]
    assert "authorization" not in elsewhere.headers  # that token is for the other one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--to must say what the destination speaks: otlp-http, remote-write, amqp, console; or a file that does"),
        (("-c", "p.yaml"), "p.yaml sets no exporter.type"),
        (("-c", "p.yaml", "--url", "http://h"), "--to must say what the destination speaks"),
    ],
)
def test_a_relay_without_a_destination_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(tmp_path, 1)
    Path("p.yaml").write_text("exporter: {queue: {path: queue}}")
    ran = relay(*words)
    assert ran.exit_code == 2
    assert message in ran.output


@pytest.mark.parametrize("text", ["", "exporter:\n", "exporter:\n  queue:\n    backoff:\n"])
def test_what_is_commented_out_is_the_default(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    assert queue_config(tmp_path / "p.yaml") == RelayQueueSection()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("data_dir: /var/lib/penstock", "/var/lib/penstock/queue"),
        ("data_dir: data\nexporter: {queue: {path: relay}}", "data/relay"),
        ("data_dir: data\nexporter: {queue: {path: /srv/relay}}", "/srv/relay"),
        ("exporter: {queue: {path: relay}}", "relay"),
    ],
)
def test_a_folder_that_the_file_names_is_taken_from_its_data_dir(tmp_path: Path, text: str, path: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    assert Path(queue_config(tmp_path / "p.yaml").path) == Path(path)
    assert queue_config(tmp_path / "p.yaml", queue_path="mine").path == "mine"


def test_the_file_wins_over_what_relay_would_do_and_a_flag_over_both(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("exporter: {queue: {durability: fsync}}")
    assert queue_config(tmp_path / "p.yaml").durability is Durability.FSYNC
    assert queue_config(None).durability is Durability.DISK
    assert queue_config(tmp_path / "p.yaml", queue_durability="memory").durability is Durability.MEMORY


def test_the_environment_wins_over_the_file_and_a_flag_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.yaml").write_text("exporter: {type: console, queue: {workers: 1}}")
    monkeypatch.setenv("PENSTOCK_EXPORTER_QUEUE_WORKERS", "2")
    monkeypatch.setenv("PENSTOCK_EXPORTER_TOKEN_FILE", "/no/business/of/another")
    assert queue_config(tmp_path / "p.yaml").workers == 2
    assert queue_config(tmp_path / "p.yaml", queue_workers="3").workers == 3
    assert read_relay_options(None, {"to": "otlp-http", "url": "http://h"}, {}).token_file is None


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_it_while_it_still_waits_for_a_send(
    tmp_path: Path, first: signal.Signals, second: signal.Signals
) -> None:
    path = filled(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        command = [*RELAY, "--to", "otlp-http", "--url", url, "--queue-path", str(path), "--timeout", "600"]
        with subprocess.Popen([*command, "--send-timeout", "10m"], stderr=subprocess.PIPE) as child:
            connection, _ = deaf.accept()
            try:
                child.send_signal(first)
                wait_until(lambda: not catches(child.pid, second))  # two that come at once are one
                assert child.poll() is None
                child.send_signal(second)
                assert child.wait(timeout=30) == -second
            finally:
                child.kill()
                connection.close()
    with FastQueue(path) as queue:
        assert len(queue) == 1


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for that signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


class Stubborn(MemoryExporter):
    """One that asks to be ended, as from outside, when it is first sent something, and whose send no `close` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        if not self.may_end.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        self.may_end.wait(60)
        return super().send(prepared)


@pytest.fixture
def handler() -> Iterator[Callable[..., None]]:
    """What SIGTERM and Ctrl-C call; a signal that reaches it fails the test."""

    def handle(number: int, _: object) -> None:
        raise AssertionError(f"no handler took signal {number}")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    yield handle
    for number, earlier in before.items():
        signal.signal(number, earlier)


def test_a_send_that_does_not_end_is_said_and_signals_are_afterwards_for_whom_they_were_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Callable[..., None]
) -> None:
    stubborn = Stubborn()
    monkeypatch.setattr("penstock.service.relay_pipeline.make_stage_exporter", lambda *_: stubborn)
    try:
        ran = relay("--to", "console", "--queue-workers", 1, "--timeout", 0, "--queue-path", filled(tmp_path, 1))
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == [handler, handler]
        assert ran.exit_code == 1, ran.output
        assert "sent 0 batches, 0 bytes; 1 wait" in ran.output
        (late,) = re.findall(r"^not ended in time, to be sent again: (.+)$", ran.output, re.MULTILINE)
        assert late in {thread.name for thread in threading.enumerate()}
    finally:
        stubborn.may_end.set()
    wait_until(lambda: late not in {thread.name for thread in threading.enumerate()})
