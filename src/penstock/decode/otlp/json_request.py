"""OTLP as JSON, turned into the protobuf that it stands for: then there is one way to read it, and to relay it.

It is protobuf's own mapping but for ids, which are hexadecimal instead of base64.
"""

import base64
import binascii
import json
from typing import Any

from penstock.decode.group import Account

_IDS = ("traceId", "spanId")
_SIDE = 400  # characters


def as_protobuf(bodies: list[bytes], account: Account) -> list[bytes]:
    """The same requests as protobuf; an empty one in place of what cannot be read."""
    return [_one(body, request, account) for request, body in enumerate(bodies)]


def _one(body: bytes, request: int, account: Account) -> bytes:
    from google.protobuf.json_format import ParseDict, ParseError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    try:
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError(f"an object is expected, got {type(document).__name__}")
        if b'"exemplars"' in body:
            _mend_ids(document)
        made = ParseDict(document, ExportMetricsServiceRequest(), ignore_unknown_fields=True)
        return bytes(made.SerializeToString())
    except RecursionError:
        account.fail(request, "JSON that is nested too deep")
    except SystemError:  # protobuf's own mishap with such a text
        account.fail(request, "not an ExportMetricsServiceRequest in JSON: half a character where an enum belongs")
    except (ValueError, ParseError, TypeError, AttributeError) as error:
        told = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote what was sent
        account.fail(request, f"not an ExportMetricsServiceRequest in JSON: {_shortened(told)}")
    return b""


def _shortened(told: str) -> str:
    """Its beginning and its end, which says where: an answer must not be as long as what it answers."""
    return told if len(told) <= 2 * _SIDE else f"{told[:_SIDE]} … {told[-_SIDE:]}"


def _mend_ids(document: Any) -> None:
    """Write ids as protobuf's mapping wants them."""
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
