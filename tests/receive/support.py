"""What the tests of receiving and decoding share: a sink, a sender, builders of requests, HTTP without a library."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format
from penstock.model.point import Chunk, PointKind
from penstock.receive.bodies import Encoding
from penstock.receive.config import GrpcReceiverConfig, HttpReceiverConfig
from penstock.receive.grpc_receiver import GrpcReceiver
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from penstock.receive.request_group import ReceivedRequest
from penstock.receive.sink import Done, DoneByPlace
from penstock.telemetry import Sample
from penstock.testing import wait_until

NOW = 1_700_000_000_000_000_000  # nanoseconds since the epoch
SECOND = 1_000_000_000
EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
HEAD = b"POST /v1/metrics HTTP/1.1\r\nHost: a\r\nContent-Type: application/x-protobuf\r\n"


class KeepingSink:
    """Takes all chunks and says at once that they are safe, unless a test lets it hold, refuse or fail."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.refuses = False
        self.fails: BaseException | None = None
        self.failing: dict[int, BaseException] = {}  # of single bodies, by their places in a group
        self.before_submit: Callable[[], object] = lambda: None  # called in every submit, on the caller's thread
        self.raw: list[tuple[Format, bytes]] = []
        self._lock = threading.Lock()
        self._holds = False
        self._held: list[Done] = []

    def submit(self, chunks: Sequence[Chunk], done: Done, requests: bytes = b"") -> bool:
        return self._take(lambda: self.chunks.extend(chunks), done)

    def takes(self, kind: Format) -> bool:
        return kind is not Format.EVENTS

    def submit_raw(self, kind: Format, bodies: Sequence[bytes], done: DoneByPlace) -> bool:
        failing = {place: error for place, error in self.failing.items() if place < len(bodies)}
        keep = [(kind, body) for place, body in enumerate(bodies) if place not in failing]
        return self._take(lambda: self.raw.extend(keep), lambda error: done(error or failing or None))

    def _take(self, keep: Callable[[], None], done: Done) -> bool:
        self.before_submit()
        if self.refuses:
            return False
        if self.fails is None:
            keep()
        with self._lock:
            if self._holds:
                self._held.append(done)
                return True
        done(self.fails)
        return True

    def hold(self) -> None:
        self._holds = True

    @property
    def held(self) -> int:
        return len(self._held)

    def release(self) -> None:
        with self._lock:
            self._holds = False
            held, self._held = self._held, []
        for done in held:
            done(self.fails)

    def points(self, metric: str, kind: PointKind | None = None) -> list[dict[str, Any]]:
        """All rows of that metric, labels as a dict."""
        return [
            {**row, "labels": json.loads(row["entity"])}
            for chunk in self.chunks
            if chunk.metric == metric and kind in (None, chunk.kind)
            for row in chunk.points.to_pylist()
        ]

    def values(self, metric: str) -> list[float]:
        return [row["value"] for row in self.points(metric)]


class Sender:
    """Sends requests to an intake, and keeps the answers in the order in which they come."""

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.answers: list[tuple[Any, DecodeAnswer]] = []

    def send(
        self,
        body: bytes,
        token: object = None,
        kind: Format = Format.OTLP,
        encoding: Encoding = Encoding.IDENTITY,
    ) -> None:
        self.intake.submit(ReceivedRequest(kind, body, encoding, 1 << 20, token, self.answers.extend))

    def wait(self, count: int) -> list[DecodeStatus]:
        wait_until(lambda: len(self.answers) >= count)
        return [answer.status for _, answer in self.answers]

    def ask(self, body: bytes, kind: Format = Format.OTLP) -> DecodeAnswer:
        before = len(self.answers)
        self.send(body, kind=kind)
        self.wait(before + 1)
        return self.answers[before][1]


@contextmanager
def running(intake: Intake, **config: Any) -> Iterator[HttpReceiver]:
    """An HTTP receiver at a free port."""
    receiver = HttpReceiver(HttpReceiverConfig(port=0, **config), intake).start()
    try:
        yield receiver
    finally:
        receiver.close(1.0)


@contextmanager
def serving(intake: Intake, **config: Any) -> Iterator[GrpcReceiver]:
    """A gRPC receiver at a free port."""
    receiver = GrpcReceiver(GrpcReceiverConfig(port=0, **config), intake).start()
    try:
        yield receiver
    finally:
        receiver.close(1.0)


def connected(receiver: HttpReceiver) -> socket.socket:
    """A connection over which a test writes its own bytes."""
    return socket.create_connection(("127.0.0.1", receiver.port), timeout=60)


def read_all(client: socket.socket) -> bytes:
    """Returns everything that comes until the connection is closed."""
    received = b""
    with suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    return received


def count(source: Any, name: str, *labels: str) -> float:
    """Returns the value of that metric."""
    return sum(
        one.value for one in source.samples() if isinstance(one, Sample) and one.name == name and one.labels == labels
    )


class Answered(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def post(port: int, path: str, body: bytes, **headers: str) -> Answered:
    """POST with these headers, `_` in a name meaning `-`."""
    return call("POST", port, path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def call(method: str, port: int, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answered:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return Answered(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def attribute(name: str, value: Any) -> KeyValue:
    match value:
        case bool():
            return KeyValue(key=name, value=AnyValue(bool_value=value))
        case int():
            return KeyValue(key=name, value=AnyValue(int_value=value))
        case float():
            return KeyValue(key=name, value=AnyValue(double_value=value))
        case bytes():
            return KeyValue(key=name, value=AnyValue(bytes_value=value))
        case _:
            return KeyValue(key=name, value=AnyValue(string_value=value))


def request(
    *metrics: Metric, resource: Mapping[str, Any] | None = None, scope: str = "tests"
) -> ExportMetricsServiceRequest:
    """One resource, one scope, these metrics."""
    made = ExportMetricsServiceRequest()
    of_resource = made.resource_metrics.add()
    for name, value in ({"service.name": "shop"} if resource is None else resource).items():
        of_resource.resource.attributes.append(attribute(name, value))
    of_scope = of_resource.scope_metrics.add()
    of_scope.scope.name = scope
    of_scope.metrics.extend(metrics)
    return made


def gauge(name: str, *values: float, time: int = NOW, **labels: Any) -> Metric:
    metric = Metric(name=name)
    for value in values:
        point = metric.gauge.data_points.add(time_unix_nano=time)
        if isinstance(value, int):
            point.as_int = value
        else:
            point.as_double = value
        point.attributes.extend(attribute(*label) for label in labels.items())
    return metric


def counter(
    name: str,
    *points: tuple[int, float],
    start: int = 0,
    temporality: int = 2,
    is_monotonic: bool = True,
    **labels: Any,
) -> Metric:
    """A sum with points of (time, value)."""
    metric = Metric(name=name)
    metric.sum.aggregation_temporality = temporality  # type: ignore[assignment]
    metric.sum.is_monotonic = is_monotonic
    for time, value in points:
        point = metric.sum.data_points.add(time_unix_nano=time, start_time_unix_nano=start, as_double=value)
        point.attributes.extend(attribute(*label) for label in labels.items())
    return metric


BODY = bytes(request(gauge("cpu", 0.5)).SerializeToString())
