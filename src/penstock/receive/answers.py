"""Answers as the protocols want them. The few messages are encoded by hand: they have two fields each.

ExportMetricsServiceResponse { partial_success = 1 { int64 rejected_data_points = 1; string error_message = 2 } }
google.rpc.Status            { int32 code = 1; string message = 2; repeated Any details = 3 }
Any                          { string type_url = 1; bytes value = 2 }
google.rpc.RetryInfo         { Duration retry_delay = 1 { int64 seconds = 1 } }
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format
from penstock.protobuf import field_bytes, field_varint

RETRY_AFTER = 1  # seconds: L1 has pushed what it holds by then, unless the disk is slow
PROTOBUF, JSON, TEXT = "application/x-protobuf", "application/json", "text/plain; charset=utf-8"

_RETRY_INFO = b"type.googleapis.com/google.rpc.RetryInfo"
_HTTP = {DecodeStatus.BAD: 400, DecodeStatus.TOO_LARGE: 413, DecodeStatus.BUSY: 429, DecodeStatus.BROKEN: 503}
# google.rpc.Code, which gRPC's own codes are, too.
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE = 0, 3, 8, 14
GRPC = {
    DecodeStatus.TAKEN: OK,
    DecodeStatus.BAD: INVALID_ARGUMENT,
    DecodeStatus.TOO_LARGE: INVALID_ARGUMENT,  # RESOURCE_EXHAUSTED would invite the sender to try again
    DecodeStatus.BUSY: RESOURCE_EXHAUSTED,
    DecodeStatus.BROKEN: UNAVAILABLE,
}


class HttpReply(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]


def http_reply(kind: Format, answer: DecodeAnswer) -> HttpReply:
    """Returns the response to a request of that format."""
    if answer.status is not DecodeStatus.TAKEN:
        return error_reply(kind, _HTTP[answer.status], answer.message)
    match kind:
        case Format.OTLP:
            return HttpReply(200, otlp_answer(answer), PROTOBUF, {})
        case Format.OTLP_JSON:
            partial = {"rejectedDataPoints": str(answer.rejected), "errorMessage": answer.message}
            return HttpReply(200, json.dumps({"partialSuccess": partial} if answer.message else {}).encode(), JSON, {})
        case Format.REMOTE_WRITE:
            if answer.rejected:  # the others are taken; 400 is the protocol's way to say so, and it is not sent again
                text = f"{answer.rejected} samples not taken: {answer.message}\n"
                return HttpReply(400, text.encode(), TEXT, {})
            return HttpReply(204, b"", "", {})
        case Format.EVENTS:
            counts = {"rejected": answer.rejected, "errors": answer.reasons}
            return HttpReply(200, json.dumps(counts).encode(), JSON, {})


def error_reply(kind: Format | None, status: int, message: str, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Returns a response that says what went wrong; with `Retry-After` where trying again may help."""
    headers = dict(headers or {})
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER)
    match kind:
        case Format.OTLP:
            return HttpReply(status, grpc_error_answer(_rpc_code(status), message), PROTOBUF, headers)
        case Format.OTLP_JSON | Format.EVENTS:
            body = json.dumps({"code": _rpc_code(status), "message": message}).encode()
            return HttpReply(status, body, JSON, headers)
        case _:
            return HttpReply(status, message.encode() + b"\n", TEXT, headers)


def otlp_answer(answer: DecodeAnswer) -> bytes:
    """Returns a serialised `ExportMetricsServiceResponse`."""
    if not answer.message:
        return b""
    rejected = field_varint(1, answer.rejected) if answer.rejected else b""  # with none it is a warning
    return field_bytes(1, rejected + field_bytes(2, answer.message.encode()))


def grpc_error_answer(code: int, message: str, *, retry_after: int = 0) -> bytes:
    """Returns a serialised `google.rpc.Status`."""
    status = field_varint(1, code) + field_bytes(2, message.encode())
    if retry_after:
        retry_info = field_bytes(1, field_varint(1, retry_after))
        status += field_bytes(3, field_bytes(1, _RETRY_INFO) + field_bytes(2, retry_info))
    return status


def _rpc_code(status: int) -> int:
    return {429: RESOURCE_EXHAUSTED, 503: UNAVAILABLE, 401: 16}.get(status, INVALID_ARGUMENT)
