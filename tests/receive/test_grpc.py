"""The gRPC receiver as its clients meet it."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from penstock.receive.answers import grpc_error_answer
from penstock.receive.config import GrpcLimits
from penstock.receive.intake import Intake
from tests.receive.support import EXPORT, KeepingSink, gauge, request, serving


@pytest.fixture
def channel(intake: Intake) -> Iterator[grpc.Channel]:
    with (
        serving(intake, limits=GrpcLimits(max_body=100_000)) as receiver,
        grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel,
    ):
        yield channel


def stub(channel: grpc.Channel) -> Any:
    return MetricsServiceStub(channel)  # type: ignore[no-untyped-call]  # generated


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_points_reach_the_sink(channel: grpc.Channel, sink: KeepingSink, compression: grpc.Compression) -> None:
    answer = stub(channel).Export(request(gauge("cpu", 0.5, 1.5)), timeout=10, compression=compression)

    assert answer == ExportMetricsServiceResponse()
    assert sink.values("cpu") == [0.5, 1.5]


def test_points_that_are_not_taken_are_a_partial_success(channel: grpc.Channel, sink: KeepingSink) -> None:
    made = request(gauge("cpu", 0.5), gauge("cpu", 1.0, time=0))

    answer = stub(channel).Export(made, timeout=10)

    assert answer.partial_success.rejected_data_points == 1
    assert "time" in answer.partial_success.error_message
    assert sink.values("cpu") == [0.5]


def failed(channel: grpc.Channel, body: bytes) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(EXPORT)(body, timeout=10)
    return error.value


def test_what_can_never_be_read_is_an_invalid_argument(channel: grpc.Channel) -> None:
    assert failed(channel, b"nonsense").code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary("/some.Service/Method")(b"", timeout=10)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_request_beyond_the_limit_is_refused(channel: grpc.Channel) -> None:
    assert failed(channel, bytes(100_001)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("compressed", [False, True])
def test_a_bomb_is_refused(channel: grpc.Channel, compressed: bool) -> None:
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(EXPORT)(
            bytes(20_000_000), timeout=10, compression=grpc.Compression.Gzip if compressed else None
        )
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("fails", "code"),
    [(None, grpc.StatusCode.RESOURCE_EXHAUSTED), (OSError("no space"), grpc.StatusCode.UNAVAILABLE)],
)
def test_what_may_work_later_says_when(
    channel: grpc.Channel, sink: KeepingSink, fails: OSError | None, code: grpc.StatusCode
) -> None:
    sink.fails = fails
    sink.refuses = fails is None

    error = failed(channel, request(gauge("cpu", 0.5)).SerializeToString())

    assert error.code() is code
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert details == grpc_error_answer(code.value[0], error.details(), retry_after=1)
    assert b"google.rpc.RetryInfo" in details


def test_our_status_is_what_google_defines() -> None:
    status_pb2 = pytest.importorskip("google.rpc.status_pb2")
    error_details_pb2 = pytest.importorskip("google.rpc.error_details_pb2")

    status = status_pb2.Status.FromString(grpc_error_answer(14, "later", retry_after=7))
    retry = error_details_pb2.RetryInfo()

    assert (status.code, status.message) == (14, "later")
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 7


def test_an_empty_request_is_fine(channel: grpc.Channel) -> None:
    answer = stub(channel).Export(ExportMetricsServiceRequest(), timeout=10)

    assert answer == ExportMetricsServiceResponse()
