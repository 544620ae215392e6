"""OTLP as JSON, turned into the protobuf that it stands for: then one path reads and relays both.

The JSON is protobuf's own mapping but for ids, which are hexadecimal instead of base64.
"""

import base64
import binascii
import json
from typing import Any

from penstock.decode.decode_context import DecodeOutcomes
from penstock.decode.outcome import TooMany

_IDS = ("traceId", "spanId")
_MAX_VALUES = 500_000  # of one request: each takes microseconds, in Python
_EXCERPT = 400  # characters of a message's beginning, and of its end


def otlp_json_as_protobuf(bodies: list[bytes], outcomes: DecodeOutcomes) -> list[bytes]:
    """Returns the same requests as protobuf; an empty one in place of what cannot be read. TooMany beyond a bound."""
    return [_one(body, request, outcomes) for request, body in enumerate(bodies)]


def _one(body: bytes, request: int, outcomes: DecodeOutcomes) -> bytes:
    from google.protobuf.json_format import ParseDict, ParseError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    refuse_many_otlp_json_values(body, _MAX_VALUES)
    try:
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError(f"an object is expected, got {type(document).__name__}")
        if b'"exemplars"' in body:
            _mend_ids(document)
        made = ParseDict(document, ExportMetricsServiceRequest(), ignore_unknown_fields=True)
        return bytes(made.SerializeToString())
    except RecursionError:
        outcomes.fail(request, "JSON that is nested too deep")
    except SystemError:  # protobuf's own bug with such a text
        outcomes.fail(request, "not an ExportMetricsServiceRequest in JSON: half a character where an enum belongs")
    except (ValueError, ParseError, TypeError, AttributeError) as error:
        message = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote what was sent
        outcomes.fail(request, f"not an ExportMetricsServiceRequest in JSON: {_shortened(message)}")
    return b""


def refuse_many_otlp_json_values(body: bytes, most: int) -> None:
    """TooMany beyond so many values of a JSON document. Counts separators: texts that hold some count as more."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > most:
        raise TooMany(f"more than {most} values")


def _shortened(message: str) -> str:
    """Keeps the beginning, and the end, which says where: an answer must not be as long as its request."""
    return message if len(message) <= 2 * _EXCERPT else f"{message[:_EXCERPT]} … {message[-_EXCERPT:]}"


def _mend_ids(document: Any) -> None:
    """Writes ids as protobuf's mapping has them."""
    if isinstance(document, list):
        for part in document:
            _mend_ids(part)
    elif isinstance(document, dict):
        for name, part in document.items():
            if name in _IDS and isinstance(part, str):
                try:
                    document[name] = base64.b64encode(bytes.fromhex(part)).decode()
                except (ValueError, binascii.Error):
                    document[name] = ""
            else:
                _mend_ids(part)
