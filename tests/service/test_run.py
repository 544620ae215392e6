"""`penstock run` as a real process: what it answered for survives whatever becomes of it."""

import http.client
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from penstock.cli import run_command as run_commands
from penstock.cli.main import main
from penstock.errors import PenstockError
from penstock.testing import wait_until
from tests.receive.test_security import certified
from tests.servers import free_port
from tests.service.running import Running, Sender, sealed_sum

pytestmark = pytest.mark.server

PATIENCE = 90.0  # seconds: a machine that does many things at once takes its time to start Python twice


def test_the_service_began_when_its_process_did() -> None:
    assert run_commands.run_command_began() == pytest.approx(psutil.Process().create_time(), abs=2.0)


def under_load(running: Running, most: int = 4) -> list[Sender]:
    senders = [Sender(running.port, number) for number in range(most)]
    for sender in senders:
        sender.start()
    wait_until(lambda: sum(sender.answered for sender in senders) > 200, PATIENCE)
    return senders


def account(senders: list[Sender]) -> tuple[int, int]:
    for sender in senders:
        sender.stop()
    return sum(sender.answered for sender in senders), sum(sender.sent for sender in senders)


def test_sigterm_under_load_loses_nothing_that_was_answered_for(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        senders = under_load(running)
        assert running.stop() == 0, running.text()
        answered, sent = account(senders)

        assert answered <= sealed_sum(tmp_path / "segments", "orders") <= sent
        assert running.events()[-1] == "Penstock has ended"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_kill_9_under_load_loses_nothing_that_was_answered_for(tmp_path: Path, processes: int) -> None:
    with Running(tmp_path, processes=str(processes)) as running:
        senders = under_load(running)
        children = psutil.Process(running.process.pid).children(recursive=True) if running.process else []
        running.kill()
        for one in children:
            one.kill()  # workers have sessions of their own
        psutil.wait_procs(children, PATIENCE)
        answered, sent = account(senders)

        running.start()
        assert running.stop() == 0, running.text()

        assert answered <= sealed_sum(tmp_path / "segments", "orders") <= sent


@pytest.mark.timeout(300)
def test_a_worker_that_dies_is_there_again_and_the_others_go_on(tmp_path: Path) -> None:
    with Running(tmp_path, processes="2") as running:
        victim = running.workers()[0]
        senders = under_load(running)
        victim.kill()
        wait_until(lambda: 'child_restarts_total{child="receiver-0"} 1.0' in running.ask("/metrics")[1], PATIENCE)
        wait_until(lambda: running.ask("/readyz")[0] == 200, PATIENCE)

        assert running.stop() == 0, running.text()
        answered, sent = account(senders)
        assert answered <= sealed_sum(tmp_path / "segments", "orders") <= sent


def test_one_port_has_the_metrics_of_all_processes_which_end_when_the_service_is_killed(tmp_path: Path) -> None:
    with Running(tmp_path, processes="2") as running:
        assert running.process is not None
        workers = psutil.Process(running.process.pid).children(recursive=True)
        assert len(workers) == 2

        def all_have_spoken() -> bool:
            text, status = running.ask("/metrics")[1], json.loads(running.ask("/status.json")[1] or "{}")
            has_sizes = [f'penstock_queue_size{{process="{n}",queue="rollup"}} 0.0' in text for n in range(2)]
            return all(has_sizes) and status.get("ready") is True and "Queue rollup" in status["flow"]

        wait_until(all_have_spoken)  # one that gets no turn for seconds is left out of a scrape
        running.kill()

        assert psutil.wait_procs(workers, PATIENCE)[1] == []


class Shop:
    """A program whose counter runs on, whatever becomes of us; it reports how much there was since it began."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._began = time.time_ns()

    def report(self, orders: float) -> None:
        point = {"startTimeUnixNano": str(self._began), "timeUnixNano": str(time.time_ns()), "asDouble": orders}
        total = {"aggregationTemporality": 2, "isMonotonic": True, "dataPoints": [point]}
        body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "orders", "sum": total}]}]}]}
        connection = http.client.HTTPConnection("127.0.0.1", self._running.port, timeout=30)
        connection.request("POST", "/v1/metrics", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()


def test_a_restart_in_good_order_loses_nothing_of_a_cumulative_stream_and_a_kill_counts_nothing_twice(
    tmp_path: Path,
) -> None:
    with Running(tmp_path) as running:
        shop = Shop(running)
        shop.report(10)
        assert running.stop() == 0, running.text()
        running.start()
        shop.report(25)  # of which 15 came while we were away
        assert running.stop() == 0, running.text()
        assert sealed_sum(tmp_path / "segments", "orders") == 25

        running.start()
        shop.report(30)
        running.kill()
        running.start()
        shop.report(50)  # only measured from: what was counted before is unknown
        shop.report(51)
        assert running.stop() == 0, running.text()
        assert sealed_sum(tmp_path / "segments", "orders") == 30 + 1


def test_sighup_reloads_what_can_be_and_names_what_cannot(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-some-length\n")
    text = f"spark: {{enabled: false}}\nreceivers: {{http: {{auth: {{token_file: {tokens}}}}}}}\n"
    with Running(tmp_path, text) as running:
        running.file.write_text(text + "logging: {level: debug}\nl1: {flush_rows: 7}\n")
        running.signal(signal.SIGHUP)
        wait_until(lambda: "Reloaded, but for what needs a restart" in running.events(), PATIENCE)
        (line,) = [one for one in running.log() if one.get("event", "").startswith("Reloaded")]
        assert line["keys"] == "l1.flush_rows"

        tokens.unlink()
        running.signal(signal.SIGHUP)
        wait_until(lambda: len(refusals(running)) == 1, PATIENCE)
        assert f"auth.token_file {tokens}" in refusals(running)[0]

        running.file.write_text("nonsense: 1\n")
        running.signal(signal.SIGHUP)
        wait_until(lambda: len(refusals(running)) == 2, PATIENCE)
        assert running.ask("/readyz")[0] == 200


def refusals(running: Running) -> list[str]:
    return [one["reason"] for one in running.log() if one.get("event") == "Not reloaded, the old settings hold"]


DEFINED = "metrics: [{name: %s, source: orders, function: sum, entity: []}]\nundefined: drop\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_definitions_that_change_under_load_hold_for_new_points_and_no_point_is_lost_or_counted_twice(
    tmp_path: Path, processes: int
) -> None:
    definitions = tmp_path / "metrics.yaml"
    definitions.write_text(DEFINED % "before")
    text = f"spark: {{enabled: false}}\ndefinitions: {definitions}\n"
    with Running(tmp_path, text, processes=str(processes)) as running:
        senders = under_load(running)
        definitions.write_text(DEFINED % "after")
        running.signal(signal.SIGHUP)
        wait_until(lambda: "Reloaded" in running.events(), PATIENCE)
        known = sum(sender.answered for sender in senders)
        under_way = Sender.POINTS * len(senders)  # at most: may have been taken by the old definitions
        wait_until(lambda: sum(sender.answered for sender in senders) > known + under_way + 200, PATIENCE)

        definitions.write_text("metrics: [{name: nothing}]")
        running.signal(signal.SIGHUP)
        wait_until(lambda: refusals(running), PATIENCE)
        assert f"{definitions}: metrics[0] (nothing).source: a text is expected, got None" in refusals(running)[0]

        assert running.stop() == 0, running.text()
        answered, sent = account(senders)

    sums = [sealed_sum(tmp_path / "segments", name) for name in ("before", "after", "orders")]
    assert answered <= sum(sums) <= sent
    assert sums[0] > 0
    assert sums[1] > 200
    assert sums[2] == 0


def test_a_reload_that_a_worker_cannot_do_is_no_reload(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-some-length\n")
    text = f"spark: {{enabled: false}}\nreceivers: {{http: {{auth: {{token_file: {tokens}}}}}}}\n"
    with Running(tmp_path, text, processes="2") as running:
        running.signal(signal.SIGHUP)
        wait_until(lambda: "Reloaded" in running.events(), PATIENCE)  # shared ports are no change
        tokens.unlink()
        running.signal(signal.SIGHUP)
        wait_until(lambda: refusals(running), PATIENCE)
        assert f"auth.token_file {tokens}: No such file" in refusals(running)[0]


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """A destination that takes and never answers holds the drain up; a second signal ends it at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = {"exporter_type": "otlp_http", "exporter_url": url, "pipelines_rollup": "false"}
        with Running(tmp_path, **settings) as running:
            senders = under_load(running)
            running.signal(signal.SIGTERM)
            wait_until(lambda: "Stopping" in running.events(), PATIENCE)
            threading.Event().wait(1.5 * run_commands.SAME_SIGNAL)
            running.signal(signal.SIGTERM)

            assert running.wait(20) == 4  # well within shutdown.timeout, which the drain would take
            assert "Stopped at once" in running.text()
            account(senders)  # or they would go on, and send to the next process on that port


class SlowService:
    """Starts when the test says so; `killed` is set when the service was ended at once."""

    def __init__(self) -> None:
        self.go_on, self.killed = threading.Event(), threading.Event()

    def start(self) -> None:
        assert self.go_on.wait(PATIENCE)

    def kill(self) -> None:
        self.killed.set()
        self.go_on.set()


def test_a_signal_while_it_starts_is_heard_when_it_has_started() -> None:
    service, signals = SlowService(), queue.SimpleQueue[int]()
    wishes = run_commands._StopRequests(service, signals)
    signals.put(signal.SIGHUP)
    signals.put(signal.SIGTERM)

    def go_on() -> None:
        wait_until(signals.empty, PATIENCE)
        service.go_on.set()

    threading.Thread(target=go_on).start()
    wishes.run_while_listening(service.start, "starting")
    assert [wishes.next(), wishes.next()] == [signal.SIGHUP, signal.SIGTERM]
    assert not service.killed.is_set()


def test_a_second_signal_while_it_starts_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(run_commands, "SAME_SIGNAL", -1.0)
    monkeypatch.setattr("penstock.cli.run_command.os._exit", codes.append)
    monkeypatch.setattr("penstock.cli.run_command.logging.shutdown", lambda: None)
    service, signals = SlowService(), queue.SimpleQueue[int]()
    signals.put(signal.SIGINT)
    signals.put(signal.SIGINT)
    run_commands._StopRequests(service, signals).run_while_listening(service.start, "starting")
    assert service.killed.is_set()
    assert codes == [4]


def test_what_fails_while_it_starts_is_raised() -> None:
    def fail() -> None:
        raise PenstockError("no room")

    with pytest.raises(PenstockError, match="no room"):
        run_commands._StopRequests(SlowService(), queue.SimpleQueue[int]()).run_while_listening(fail, "starting")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_drain_that_runs_out_of_time_is_an_exit_code_of_4(tmp_path: Path, processes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = {"exporter_type": "otlp_http", "exporter_url": url, "pipelines_rollup": "false"}
        settings |= {"shutdown_timeout": "2s", "processes": str(processes)}
        with Running(tmp_path, **settings) as running:
            senders = under_load(running)
            account(senders)

            assert running.stop() == 4
            said = " ".join(one.get("what", "") for one in running.log())
            assert "holds" in said or "was killed" in said, running.text()  # as a busy machine has it


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes", "0"], "--processes: processes must be >= 1, got 0"),
        (["--receivers-http-host", "0.0.0.0"], "is open to the network"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused_before_anything_starts(flags: list[str], message: str) -> None:
    ran = CliRunner().invoke(main, ["run", *flags])
    assert ran.exit_code == 2
    assert message in ran.output


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        other = tmp_path / "other"
        other.mkdir()
        command = [sys.executable, "-m", "penstock", "run", "--spark-enabled", "false", "--admin-enabled", "false"]
        command += ["--receivers-http-port", str(running.port), "--receivers-grpc-enabled", "false"]
        ran = subprocess.run(command, cwd=other, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 1
        assert f"cannot listen on 127.0.0.1:{running.port}" in ran.stderr


def test_nonsense_at_any_port_leaves_one_line_in_the_log(tmp_path: Path) -> None:
    tls = certified(tmp_path)
    grpc_port = free_port()
    files = f"{{cert_file: {tls.cert_file}, key_file: {tls.key_file}}}"
    text = f"spark: {{enabled: false}}\nreceivers: {{grpc: {{listen: '127.0.0.1:{grpc_port}', tls: {files}}}}}\n"
    with Running(tmp_path, text, receivers_grpc_enabled="true") as running:
        for port in (running.port, grpc_port, running.admin):
            for sent in (b"", b"GET", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\xff" * 1000):
                with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                    client.sendall(sent)
                    client.shutdown(socket.SHUT_WR)
                    with suppress(OSError):
                        while client.recv(1000):
                            pass
        assert running.ask("/readyz")[0] == 200
        assert running.stop() == 0
        (line,) = [line for line in running.log() if line["level"] not in ("info", "debug")]
        assert (line["event"], line["reason"]) == ("Requests or points are refused", "malformed")
