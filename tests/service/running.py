"""`penstock run` as a real process, and senders that remember what they were answered for."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA

from penstock.model.segment import read_segment, sealed
from penstock.testing import wait_until
from tests.servers import free_port

START = 60.0  # seconds: a busy machine takes its time
PACE = 0.005  # seconds between two requests: load enough, and the service still gets a core to start on


class Running:
    """One service in a folder of its own. `settings`: flags without their dashes."""

    def __init__(self, folder: Path, text: str = "", **settings: str) -> None:
        self.folder = folder
        self.file = folder / "penstock.yaml"
        self.file.write_text(text or "spark: {enabled: false}\n")
        self.admin = free_port()
        self.port = free_port()
        self.settings = {
            "admin-listen": f"127.0.0.1:{self.admin}",
            "receivers-http-listen": f"127.0.0.1:{self.port}",
            "receivers-grpc-enabled": "false",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.before: list[str] = []  # what the command is an argument of

    def start(self) -> Self:
        flags = [word for name, value in self.settings.items() for word in (f"--{name}", value)]
        command = [*self.before, sys.executable, "-m", "penstock", "run", "-c", str(self.file), *flags]
        with open(self.folder / "log.jsonl", "ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stderr=log, start_new_session=True)
        try:
            wait_until(self._is_ready, START)
        except BaseException:
            self.kill()
            raise
        return self

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"penstock run ended:\n{self.text()}"
        return self.ask("/readyz")[0] == 200

    def ask(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def text(self) -> str:
        return (self.folder / "log.jsonl").read_text()

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def events(self) -> list[str]:
        return [str(line.get("event", line["message"])) for line in self.log()]

    def workers(self) -> list[psutil.Process]:
        """In the order of their numbers: they were started one after the other. Their ids may begin anew in between."""
        assert self.process is not None
        return sorted(psutil.Process(self.process.pid).children(), key=lambda one: one.create_time())

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """As the kernel would: the whole group at once."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def sealed_sum(folder: Path, metric: str) -> float:
    """What the segments say of a metric, all of its series and minutes together."""
    total = 0.0
    for segment in sealed(folder):
        for row in read_segment(folder / segment.name).to_pylist():
            total += row["sum"] if row["metric"] == metric else 0.0
    return total


class Sender(threading.Thread):
    """Sends requests of ten orders each until it is stopped; repeats nothing, so that every sum is exact."""

    POINTS = 10

    def __init__(self, port: int, number: int = 0) -> None:
        super().__init__(name=f"sender-{number}", daemon=True)
        self._port = port
        self._number = number
        self._enough = threading.Event()
        self.sent = 0
        self.answered = 0  # orders that were answered as safe

    def stop(self) -> None:
        self._enough.set()
        self.join()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        while not self._enough.wait(PACE):
            self.sent += self.POINTS
            try:
                connection.request("POST", "/v1/metrics", orders(self.POINTS, self._number), HEADERS)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self._enough.wait(0.05)
                continue
            if answer.status == 200:
                self.answered += self.POINTS


HEADERS = {"Content-Type": "application/x-protobuf"}


def orders(count: int, number: int = 0) -> bytes:
    """A request with so many deltas of one."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="orders")
    metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_DELTA
    metric.sum.is_monotonic = True
    now = time.time_ns()
    for place in range(count):
        point = metric.sum.data_points.add(as_double=1.0, time_unix_nano=now, start_time_unix_nano=now - 1_000_000)
        point.attributes.add(key="sender").value.string_value = f"{number}-{place}"
    return bytes(request.SerializeToString())
