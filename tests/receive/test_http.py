"""The HTTP receiver as its clients meet it."""

import gzip

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from penstock.receive.http_receiver import HttpReceiver
from tests.receive.support import HEAD, KeepingSink, call, connected, gauge, post, request

PROTOBUF = "application/x-protobuf"


def test_otlp_points_reach_the_sink_and_are_answered_with_an_empty_response(
    http: HttpReceiver, sink: KeepingSink
) -> None:
    body = request(gauge("cpu", 0.5, 1.5, core="a")).SerializeToString()

    answered = post(http.port, "/v1/metrics", body, Content_Type=PROTOBUF)

    assert (answered.status, answered.headers["Content-Type"], answered.body) == (200, PROTOBUF, b"")
    assert sink.values("cpu") == [0.5, 1.5]
    assert sink.points("cpu")[0]["labels"] == {"service.name": "shop", "core": "a"}


def test_a_gzipped_body_is_read(http: HttpReceiver, sink: KeepingSink) -> None:
    body = gzip.compress(request(gauge("cpu", 0.5)).SerializeToString())

    assert post(http.port, "/v1/metrics", body, Content_Type=PROTOBUF, Content_Encoding="gzip").status == 200
    assert sink.values("cpu") == [0.5]


def test_points_that_are_not_taken_are_a_partial_success(http: HttpReceiver, sink: KeepingSink) -> None:
    body = request(gauge("cpu", 0.5), gauge("cpu", 1.0, time=0)).SerializeToString()

    answered = post(http.port, "/v1/metrics", body, Content_Type=PROTOBUF)

    partial = ExportMetricsServiceResponse.FromString(answered.body).partial_success
    assert (answered.status, partial.rejected_data_points) == (200, 1)
    assert "time" in partial.error_message
    assert sink.values("cpu") == [0.5]


@pytest.mark.parametrize(
    ("method", "path", "content_type", "encoding", "body", "status"),
    [
        ("POST", "/v1/traces", PROTOBUF, "", b"", 404),
        ("GET", "/v1/metrics", PROTOBUF, "", b"", 405),
        ("POST", "/v1/metrics", "text/html", "", b"", 415),
        ("POST", "/v1/metrics", PROTOBUF, "br", b"", 415),
        ("POST", "/v1/metrics", PROTOBUF, "", b"nonsense", 400),
        ("POST", "/v1/metrics", PROTOBUF, "gzip", b"nonsense", 400),
    ],
)
def test_what_can_never_work_is_refused_for_good(
    http: HttpReceiver, method: str, path: str, content_type: str, encoding: str, body: bytes, status: int
) -> None:
    headers = {"Content-Type": content_type, "Content-Encoding": encoding}

    answered = call(method, http.port, path, body, headers)

    assert answered.status == status
    assert "Retry-After" not in answered.headers


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("/v1/metrics", b"application/x-protobuf or application/json is"),
        ("/v1/events", b"application/json is"),
        ("/api/v1/write", b"application/x-protobuf (remote write 1.0) is"),
    ],
)
def test_a_content_type_that_is_not_taken_is_answered_with_one_that_is(
    http: HttpReceiver, path: str, taken: bytes
) -> None:
    answered = call("POST", http.port, path, b"{}", {"Content-Type": "application/x-www-form-urlencoded"})

    assert answered.status == 415
    assert taken in answered.body


def test_a_full_queue_is_429_with_a_time_to_come_back(http: HttpReceiver, sink: KeepingSink) -> None:
    sink.refuses = True

    answered = post(http.port, "/v1/metrics", request(gauge("cpu", 0.5)).SerializeToString(), Content_Type=PROTOBUF)

    assert answered.status == 429
    assert int(answered.headers["Retry-After"]) > 0


def test_a_client_that_asks_before_it_sends_much_is_asked_to_go_on(http: HttpReceiver, sink: KeepingSink) -> None:
    body = request(gauge("cpu", 0.5)).SerializeToString()
    with connected(http) as client:
        client.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    assert sink.values("cpu") == [0.5]
