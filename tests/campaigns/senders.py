"""Honest senders: each sends the same bytes until they are answered, and writes into the ledger what was taken."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import cramjam

from penstock.export.exporters.remote_write_exporter import write_request
from tests.campaigns.ledger import Ledger, Point
from tests.receive.support import attribute, counter, request

PACE = 0.01  # seconds between two requests of a sender
AGAIN = 0.1  # seconds until a request is sent again
PATIENCE = 180.0  # seconds that a sender goes on with its last request
PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}
SNAPPY = {**PROTOBUF, "Content-Encoding": "snappy"}
WHOLE = (b"", b"{}", b'{"rejected": 0, "errors": []}')  # answers that refuse no point
DELTA = 1


@dataclass(frozen=True)
class Request:
    """One body and the points that are in it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    points: list[Point]
    relayed: bytes | None = None  # as a destination gets it; None: it is not relayed byte by byte


def otlp(points: list[Point]) -> Request:
    """Deltas of a counter, as protobuf."""
    metrics = []
    for point in points:
        moment = point.time_us * 1000
        metric = counter(point.metric, (moment, point.value), start=moment - 1, temporality=DELTA)
        metric.sum.data_points[0].attributes.append(attribute("sender", point.sender))
        metrics.append(metric)
    body = request(*metrics).SerializeToString()
    return Request("/v1/metrics", PROTOBUF, body, points, body)


def otlp_json(points: list[Point]) -> Request:
    """Gauges, as JSON."""
    metrics = [
        {
            "name": point.metric,
            "gauge": {
                "dataPoints": [
                    {
                        "timeUnixNano": str(point.time_us * 1000),
                        "asDouble": point.value,
                        "attributes": [{"key": "sender", "value": {"stringValue": point.sender}}],
                    }
                ]
            },
        }
        for point in points
    ]
    body = json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}).encode()
    return Request("/v1/metrics", JSON, body, points)


def remote_write(points: list[Point]) -> Request:
    """Gauges of Prometheus: its times are milliseconds."""
    series = [({"__name__": one.metric, "sender": one.sender}, [(one.time_us // 1000, one.value)]) for one in points]
    written = write_request(series)
    return Request("/api/v1/write", SNAPPY, bytes(cramjam.snappy.compress_raw(written)), points, written)


def events(points: list[Point]) -> Request:
    """Events with their times: without, the same bytes are two events."""
    listed = [
        {"metric": one.metric, "value": one.value, "time": one.time_us / 1e6, "labels": {"sender": one.sender}}
        for one in points
    ]
    return Request("/v1/events", JSON, json.dumps(listed).encode(), points)


FORMATS: dict[str, Callable[[list[Point]], Request]] = {
    "deltas": otlp,
    "gauges": otlp_json,
    "written": remote_write,
    "events": events,
}


class Sender(threading.Thread):
    """Sends points in all formats until it is stopped, each request over a connection of its own.

    `ahead`: seconds that its clock is ahead. Each value is the number of the point, so no two bodies are the same.
    """

    formats = tuple(FORMATS)

    def __init__(self, port: int, name: str, ledger: Ledger, seed: object, ahead: float = 0.0) -> None:
        super().__init__(name=f"sender-{name}", daemon=True)
        self._port = port
        self._sender = name
        self._ledger = ledger
        self._rng = Random(f"{seed}-{name}")
        self._ahead = ahead
        self._number = 0
        self._enough, self._never = threading.Event(), threading.Event()
        self._gives_up_at: float | None = None

    def ask_to_stop(self) -> None:
        """It ends when its last request is answered."""
        self._gives_up_at = time.monotonic() + PATIENCE
        self._enough.set()

    def give_up(self) -> None:
        """It ends at once."""
        self._gives_up_at = 0.0
        self._enough.set()

    def run(self) -> None:
        while not self._enough.wait(PACE):
            self._deliver(self.make())

    def make(self) -> Request:
        name = self._rng.choice(self.formats)
        points = []
        for _ in range(self._rng.randrange(1, 20)):
            self._number += 1
            now = int((time.time() + self._ahead) * 1000) - self._rng.randrange(90_000)
            points.append(Point(f"campaign.{name}", self._sender, now * 1000, float(self._number)))
        return FORMATS[name](points)

    def _deliver(self, sent: Request) -> None:
        while self._gives_up_at is None or time.monotonic() < self._gives_up_at:
            status, said = self._post(sent)
            if status in (200, 204):
                self._ledger.acknowledge(
                    sent.points, sent.relayed
                )  # before it counts: a fault waits for requests that are written
                if said not in WHOLE:
                    self._ledger.mistakes.append(f"{sent.path} was taken in part: {said[:300]!r}")
            self._ledger.answered(status)
            if status in (200, 204):
                return
            if status not in (0, 408, 429, 503):
                self._ledger.mistakes.append(f"{sent.path} was answered {status}: {said[:300]!r}")
                return
            self._never.wait(AGAIN)
        self._ledger.mistakes.append(f"{sent.path} of {self._sender} was not answered in {PATIENCE:.0f} s")

    def _post(self, sent: Request) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request("POST", sent.path, sent.body, dict(sent.headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()
