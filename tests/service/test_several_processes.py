"""Several receiving processes count as one does, whichever of them a sender's next connection reaches."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cramjam
import grpc
import pika
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.otlp.walk import CUMULATIVE, SUM, OtlpFamily, walk_otlp_metrics
from penstock.decode.stream_owners import StreamOwners
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.model.segment import read_segment, sealed
from penstock.testing import wait_until
from tests.receive.support import attribute, counter
from tests.servers import RabbitMQ, free_port
from tests.service.running import Running

pytestmark = pytest.mark.server

PATIENCE = 90.0  # seconds: a machine that does many things at once takes its time to start Python twice
OTLP = {"Content-Type": "application/x-protobuf"}
REMOTE_WRITE = {**OTLP, "Content-Encoding": "snappy", "X-Prometheus-Remote-Write-Version": "0.1.0"}
WEIGHTS = (1, 4, 2)  # of the buckets of a histogram, for each order


class Program:
    """One instance of a service: its counters run on, and each report goes over a connection of its own."""

    def __init__(self, number: int, port: int) -> None:
        self.name = f"program-{number}"
        self._port = port
        self._began = self._last = time.time_ns()
        self.orders = 0

    def more(self, orders: int) -> "Program":
        self.orders += orders
        return self

    def otlp(self) -> ExportMetricsServiceRequest:
        """All that was counted since we began, in every way to say so; the delta is always 1."""
        self._last = now = max(time.time_ns(), self._last + 1)
        request = ExportMetricsServiceRequest()
        of_resource = request.resource_metrics.add()
        of_resource.resource.attributes.append(attribute("service.name", self.name))
        metrics = of_resource.scope_metrics.add().metrics
        metrics.append(counter("orders", (now, float(self.orders)), start=self._began))
        metrics.append(counter("reports", (now, 1.0), start=now - 1, temporality=1))
        self._add_histograms(metrics, now)
        summary = metrics.add(name="summary").summary.data_points.add(time_unix_nano=now, count=self.orders)
        summary.start_time_unix_nano, summary.sum = self._began, 2.0 * self.orders
        return request

    def _add_histograms(self, metrics: Any, now: int) -> None:
        stated = {"time_unix_nano": now, "start_time_unix_nano": self._began, "count": sum(WEIGHTS) * self.orders}
        explicit: Metric = metrics.add(name="histogram")
        explicit.histogram.aggregation_temporality = CUMULATIVE  # type: ignore[assignment]
        point = explicit.histogram.data_points.add(**stated, sum=9.0 * self.orders)
        point.bucket_counts.extend(weight * self.orders for weight in WEIGHTS)
        point.explicit_bounds.extend([1.0, 2.0])
        exponential: Metric = metrics.add(name="exponential")
        exponential.exponential_histogram.aggregation_temporality = CUMULATIVE  # type: ignore[assignment]
        scaled = exponential.exponential_histogram.data_points.add(**stated, sum=9.0 * self.orders, scale=2)
        scaled.positive.offset = 3
        scaled.positive.bucket_counts.extend(weight * self.orders for weight in WEIGHTS)

    def report(self) -> int:
        """Over HTTP; the status."""
        return self._post("/v1/metrics", self.otlp().SerializeToString(), OTLP)

    def write(self) -> int:
        """The orders as Prometheus writes them: in two series, which may have two owners."""
        self._last = now = max(time.time_ns(), self._last + 1_000_000)
        series = [
            (
                {"__name__": "written_total", "program": self.name, "half": half},
                [(now // 1_000_000, float(self.orders))],
            )
            for half in ("left", "right")
        ]
        return self._post("/api/v1/write", bytes(cramjam.snappy.compress_raw(write_request(series))), REMOTE_WRITE)

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0  # it was killed
        finally:
            connection.close()


def until_taken(act: Callable[[], int]) -> None:
    """As a sender that retries."""
    wait_until(lambda: act() in (200, 204), PATIENCE)


def totals(folder: Path, metric: str, column: str = "sum", label: str = "service.name") -> dict[str, float]:
    """What the segments say, by program."""
    found: dict[str, float] = {}
    for segment in sealed(folder / "segments"):
        for row in read_segment(folder / "segments" / segment.name).to_pylist():
            if row["metric"] == metric:
                name = json.loads(row["entity"])[label]
                found[name] = found.get(name, 0.0) + row[column]
    return found


def taken(running: Running) -> float:
    """Requests that all processes have answered for."""
    lines = running.ask("/metrics")[1].splitlines()
    ours = [line for line in lines if line.startswith("penstock_receive_requests_total") and 'status="taken"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in ours)


def said_by_all(running: Running, processes: int) -> str:
    """The metrics with every process in them: one that gets no turn for seconds is left out of a scrape."""
    texts: list[str] = []

    def is_whole() -> bool:
        texts.append(running.ask("/metrics")[1])
        return texts[-1].count("\npenstock_handover_points_total{") == processes * (processes - 1)

    wait_until(is_whole, PATIENCE)
    return texts[-1]


def run_all(programs: list[Program], act: Callable[[Program], None]) -> None:
    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(act, programs))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [2, 3])
def test_senders_that_change_connection_for_every_request_are_counted_exactly(tmp_path: Path, processes: int) -> None:
    grpc_port, reports = free_port(), 30
    settings = {"receivers-grpc-enabled": "true", "receivers-grpc-port": str(grpc_port)}
    with Running(tmp_path, processes=str(processes), **settings) as running:
        programs = [Program(number, running.port) for number in range(6)]

        def act(program: Program) -> None:
            for number in range(reports):
                program.more(number + 1)
                if number % 3:
                    assert program.report() == 200
                else:
                    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                        MetricsServiceStub(channel).Export(program.otlp(), timeout=30)  # type: ignore[no-untyped-call]
                assert program.write() == 204

        run_all(programs, act)
        text = said_by_all(running, processes)
        assert running.stop() == 0, running.text()

    orders = {program.name: float(program.orders) for program in programs}
    assert totals(tmp_path, "orders") == orders
    assert totals(tmp_path, "reports") == dict.fromkeys(orders, float(reports))
    assert totals(tmp_path, "summary_count") == orders
    assert totals(tmp_path, "summary_sum") == {name: 2 * count for name, count in orders.items()}
    for metric in ("histogram", "exponential"):
        assert totals(tmp_path, metric, "count") == {name: 7 * count for name, count in orders.items()}
        assert totals(tmp_path, metric) == pytest.approx({name: 9 * count for name, count in orders.items()})
    # Prometheus says no start: a counter's first value, 1, is only measured from, in both series.
    assert totals(tmp_path, "written_total", label="program") == {n: 2 * (count - 1) for n, count in orders.items()}
    handed = [line for line in text.splitlines() if line.startswith("penstock_handover_points_total")]
    assert all(float(line.split()[-1]) > 0 for line in handed)
    assert 'status="broken"' not in text.split("penstock_handover_requests_total", 1)[1].split("# ")[0]


def owner_of(program: Program, name: str, processes: int) -> int:
    """The process that keeps that counter of the program."""
    (resource, scope, _), _, _ = next(walk_otlp_metrics(program.otlp().SerializeToString()))
    return StreamOwners(0, processes).of_family(OtlpFamily(resource, scope, name.encode(), SUM, CUMULATIVE, 1))


@pytest.mark.timeout(300)
def test_a_process_that_is_killed_costs_its_streams_what_came_up_to_their_next_point_and_counts_nothing_twice(
    tmp_path: Path,
) -> None:
    with Running(tmp_path, processes="2") as running:
        programs = [Program(number, running.port) for number in range(8)]
        owners = {program.name: owner_of(program, "orders", 2) for program in programs}
        assert set(owners.values()) == {0, 1}
        reports = Counter[str]()

        def act(program: Program, orders: int) -> None:
            program.more(orders)
            reports[program.name] += 1
            until_taken(program.report)

        run_all(programs, lambda program: act(program, 100))
        running.workers()[1].kill()
        run_all(programs, lambda program: act(program, 10))
        run_all(programs, lambda program: act(program, 1))
        assert 'child_restarts_total{child="receiver-1"} 1.0' in running.ask("/metrics")[1]
        assert running.stop() == 0, running.text()

    assert totals(tmp_path, "orders") == {name: 101.0 if owner else 111.0 for name, owner in owners.items()}
    # What adds up by itself: a request that was refused, or whose process died, was not taken, or is sent again.
    for name, count in totals(tmp_path, "reports").items():
        assert reports[name] <= count <= reports[name] + 1


@pytest.mark.timeout(300)
def test_a_process_that_hangs_is_told_in_time_and_nothing_is_counted_twice_when_it_goes_on(tmp_path: Path) -> None:
    with Running(tmp_path, processes="2") as running:
        program = Program(0, running.port)
        until_taken(program.more(100).report)
        victim = running.workers()[owner_of(program, "orders", 2)]
        program.more(10)
        victim.suspend()
        try:
            # Connections that reach it hang with it; one that reaches the other is answered to retry. Chance says
            # which: of 40 one does, but for one time in a million millions.
            with ThreadPoolExecutor(40) as pool:
                asked = [pool.submit(program.report) for _ in range(40)]
                wait_until(lambda: any(one.done() and one.result() == 503 for one in asked), PATIENCE)
        finally:
            victim.resume()
        until_taken(program.more(1).report)
        assert running.stop() == 0, running.text()

    assert totals(tmp_path, "orders") == {program.name: 111.0}


@pytest.mark.timeout(300)
def test_a_restart_in_good_order_loses_nothing_of_a_stream_also_if_the_number_of_processes_changes(
    tmp_path: Path,
) -> None:
    running = Running(tmp_path)
    programs: list[Program] = []
    for processes in ("1", "3", "3", "2", "1"):
        running.settings["processes"] = processes
        with running:
            # After the first start: what a stream counted before we began is left out.
            programs = programs or [Program(number, running.port) for number in range(6)]
            for program in programs:
                until_taken(program.more(10).report)
                until_taken(program.write)
                until_taken(program.more(1).report)
            assert running.stop() == 0, running.text()
        for program in programs:
            program.more(5)  # while it is away

    assert totals(tmp_path, "orders") == {program.name: program.orders - 5.0 for program in programs}
    counted = totals(tmp_path, "written_total", label="program")
    assert counted == {program.name: 2 * (program.orders - 6.0 - 10) for program in programs}


@pytest.mark.timeout(300)
def test_sigterm_under_load_counts_what_was_answered_for_and_goes_on_there(tmp_path: Path) -> None:
    with Running(tmp_path, processes="3") as running:
        programs = [Program(number, running.port) for number in range(6)]
        enough = threading.Event()
        reports = Counter[str]()

        def act(program: Program) -> None:
            while not enough.is_set():
                reports[program.name] += program.more(1).report() == 200

        with ThreadPoolExecutor(len(programs)) as pool:
            for program in programs:
                pool.submit(act, program)
            wait_until(lambda: all(reports[program.name] > 20 for program in programs), PATIENCE)
            code = running.stop()
            enough.set()
        assert code == 0, running.text()
        running.start()
        for program in programs:
            until_taken(program.report)
        assert running.stop() == 0, running.text()

    assert totals(tmp_path, "orders") == {program.name: float(program.orders) for program in programs}
    for name, count in totals(tmp_path, "reports").items():
        assert count >= reports[name]


def test_the_sockets_are_nobody_elses_business_and_one_process_has_none(tmp_path: Path) -> None:
    with Running(tmp_path, processes="2") as running:
        folder = tmp_path / "peers"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {one.name for one in folder.iterdir()} == {"0", "1"}
        assert running.stop() == 0, running.text()
        assert not list(folder.iterdir())


@pytest.mark.timeout(300)
def test_messages_of_rabbitmq_are_counted_exactly_whichever_process_consumes_them(
    shared_rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    text = (
        "spark: {enabled: false}\n"
        f"receivers: {{amqp: {{enabled: true, url: '{shared_rabbitmq.url}', queue: cumulative, batch_size: 4}}}}\n"
    )
    connection = pika.BlockingConnection(pika.URLParameters(shared_rabbitmq.url))
    channel = connection.channel()
    channel.queue_declare("cumulative", durable=True)
    with Running(tmp_path, text, processes="2") as running:
        programs = [Program(number, running.port) for number in range(6)]
        for _ in range(20):
            for program in programs:
                properties = pika.BasicProperties(content_type="application/x-protobuf")
                channel.basic_publish("", "cumulative", program.more(1).otlp().SerializeToString(), properties)
        wait_until(lambda: taken(running) == 20 * len(programs), PATIENCE)
        assert running.stop() == 0, running.text()
        left = channel.queue_declare("cumulative", passive=True).method.message_count
        connection.close()

    assert left == 0
    assert totals(tmp_path, "orders") == {program.name: 20.0 for program in programs}
    assert totals(tmp_path, "reports") == {program.name: 20.0 for program in programs}


def test_a_port_that_somebody_shares_is_not_shared_with_them(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "penstock", "run", "--data-dir", str(tmp_path), "--processes", "2"]
        command += ["--admin-enabled", "false", "--spark-enabled", "false", "--receivers-http-port", port]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 1
        assert f"receivers.http cannot listen on 127.0.0.1:{port}: Address already in use" in ran.stderr
