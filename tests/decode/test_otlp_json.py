"""OTLP as JSON: the same as protobuf."""

import json
import logging

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock.decode.outcome import Format
from penstock.receive.config import HttpReceiverConfig
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from tests.receive.support import NOW, KeepingSink, counter, gauge, post, request

JSON = "application/json"


def test_a_request_in_json_is_read_as_the_same_in_protobuf(http: HttpReceiver, sink: KeepingSink) -> None:
    made = request(gauge("cpu", 0.5, 3, core="a", busy=True), counter("c", (NOW, 7.0), temporality=1))
    document = MessageToDict(made, use_integers_for_enums=True)
    document["unknown"] = {"ignored": 1}

    answered = post(http.port, "/v1/metrics", json.dumps(document).encode(), Content_Type=JSON)

    assert (answered.status, answered.headers["Content-Type"], json.loads(answered.body)) == (200, JSON, {})
    assert sink.values("cpu") == [0.5, 3.0]
    assert sink.points("cpu")[0]["labels"] == {"service.name": "shop", "core": "a", "busy": "true"}
    assert sink.values("c") == [7.0]


def test_rejected_points_are_counted_in_json(http: HttpReceiver) -> None:
    document = MessageToDict(request(gauge("cpu", 0.5, time=0)))

    answered = post(http.port, "/v1/metrics", json.dumps(document).encode(), Content_Type=JSON)

    partial = json.loads(answered.body)["partialSuccess"]
    assert partial["rejectedDataPoints"] == "1"
    assert "time" in partial["errorMessage"]


@pytest.mark.parametrize("body", [b"", b"[]", b'"a"', b"{", b'{"resourceMetrics": 7}', b'{"a":' * 5000, b"\xff"])
def test_what_is_no_request_is_400_with_a_status_in_json(http: HttpReceiver, body: bytes) -> None:
    answered = post(http.port, "/v1/metrics", body, Content_Type=JSON)

    assert answered.status == 400
    assert json.loads(answered.body)["code"] == 3


@pytest.mark.parametrize(
    "metric",
    [
        {"name": "\ud800"},
        {"gauge": {"dataPoints": [{"asDouble": "\ud800"}]}},
        {"gauge": {"dataPoints": [{"asDouble": "x" * 100_000}]}},
        {"gauge": {"dataPoints": [{"timeUnixNano": "x" * 100_000}]}},
        {"sum": {"aggregationTemporality": "\ud800"}},
    ],
    ids=["name", "half a number", "no number", "no time", "no enum"],
)
def test_texts_that_cannot_be_read_are_400_with_a_short_reason_and_no_error_of_ours(
    http: HttpReceiver, caplog: pytest.LogCaptureFixture, metric: object
) -> None:
    document = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}

    answered = post(http.port, "/v1/metrics", json.dumps(document).encode(), Content_Type=JSON)

    assert answered.status == 400
    assert len(answered.body) < 2000
    assert json.loads(answered.body)["message"].encode()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # one line, for the operator


def test_the_relay_gets_protobuf_with_the_ids_of_exemplars_intact() -> None:
    relay = KeepingSink()
    intake = Intake(None, relay).start()
    made = request(gauge("cpu", 0.5))
    exemplar = made.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0].exemplars.add(as_double=1.0)
    exemplar.trace_id, exemplar.span_id = bytes(range(16)), bytes(range(8))
    document = MessageToDict(made)
    sent = document["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"][0]["exemplars"][0]
    sent["traceId"], sent["spanId"] = exemplar.trace_id.hex(), exemplar.span_id.hex()
    receiver = HttpReceiver(HttpReceiverConfig(port=0), intake).start()
    try:
        assert post(receiver.port, "/v1/metrics", json.dumps(document).encode(), Content_Type=JSON).status == 200
    finally:
        receiver.close(1.0)
        assert intake.close(5.0)

    ((kind, body),) = relay.raw
    assert kind is Format.OTLP
    assert ExportMetricsServiceRequest.FromString(body) == made
