"""What a failure means: by HTTP status, gRPC code or exception type, never by the words of a message.

| kind          | what                                  | the batch        | the breaker |
|---------------|---------------------------------------|------------------|-------------|
| auth          | 401, 403, 407                         | is sent again    | counts      |
| rate_limit    | 429                                   | is sent again    | counts, unless Retry-After says when |
| timeout       | 408, 504, no answer in time           | is sent again    | counts      |
| server_error  | other 5xx                             | is sent again    | counts      |
| server_error  | OTLP: 5xx other than 502, 503, 504    | is a dead letter | counts      |
| network       | refused, reset, TLS, half an answer   | is sent again    | counts      |
| client_error  | 404, 405, 421, redirects              | is sent again    | counts      |
| client_error  | 413                                   | is sent in halves| not counted |
| client_error  | other 4xx                             | is a dead letter | not counted |

Refused credentials and an address without a server say nothing about the batch: an expired token, a mistyped URL or
a route that a deployment took away for a minute must not turn a day's data into dead letters.
"""

import errno
import http.client
import socket
import ssl
from collections.abc import Container
from email.utils import parsedate_to_datetime

from penstock.errors import (
    ErrorClass,
    ExportError,
    PayloadTooLarge,
    PermanentExportError,
    TransientExportError,
)

LONGEST_RETRY_AFTER = 3600.0  # a clock that is wrong on the other side must not stop an export for a year

_STATUS = {
    401: ErrorClass.AUTH,
    403: ErrorClass.AUTH,
    407: ErrorClass.AUTH,
    404: ErrorClass.CLIENT_ERROR,
    405: ErrorClass.CLIENT_ERROR,
    408: ErrorClass.TIMEOUT,
    421: ErrorClass.CLIENT_ERROR,
    429: ErrorClass.RATE_LIMIT,
    504: ErrorClass.TIMEOUT,
}

_GRPC = {
    1: ErrorClass.NETWORK,  # CANCELLED
    4: ErrorClass.TIMEOUT,  # DEADLINE_EXCEEDED
    7: ErrorClass.AUTH,  # PERMISSION_DENIED
    8: ErrorClass.RATE_LIMIT,  # RESOURCE_EXHAUSTED
    10: ErrorClass.SERVER_ERROR,  # ABORTED
    13: ErrorClass.SERVER_ERROR,  # INTERNAL
    14: ErrorClass.NETWORK,  # UNAVAILABLE
    15: ErrorClass.SERVER_ERROR,  # DATA_LOSS
    16: ErrorClass.AUTH,  # UNAUTHENTICATED
}
_GRPC_PERMANENT = {3, 5, 6, 9, 11, 12}  # INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, ...


def of_status(
    status: int, message: str, retry_after: float | None = None, *, may_pass: Container[int] = range(500, 600)
) -> ExportError:
    """The error for an HTTP answer that is not a success. `may_pass`: the 5xx after which a batch is sent again."""
    text = f"{status} {http.client.responses.get(status, '')}".rstrip() + (f": {message}" if message else "")
    if status == 413:
        return PayloadTooLarge(text)
    if status >= 500 and status not in may_pass:
        return PermanentExportError(text, ErrorClass.SERVER_ERROR)
    if status in _STATUS:
        return TransientExportError(text, _STATUS[status], retry_after=retry_after)
    if status < 400:
        return TransientExportError(f"{text} (redirects are not followed)", ErrorClass.CLIENT_ERROR)
    if status >= 500:
        return TransientExportError(text, ErrorClass.SERVER_ERROR, retry_after=retry_after)
    return PermanentExportError(text)


def of_grpc(code: int, message: str, retry_after: float | None = None) -> ExportError:
    """The error for a gRPC status code that is not OK."""
    text = f"gRPC status {code}" + (f": {message}" if message else "")
    if code in _GRPC_PERMANENT:
        return PermanentExportError(text)
    return TransientExportError(text, _GRPC.get(code, ErrorClass.UNKNOWN), retry_after=retry_after)


def of_exception(error: BaseException) -> ExportError:
    """The error for what an exporter raised. An unknown error is transient: no batch is given up for it."""
    if isinstance(error, (TransientExportError, PermanentExportError)):
        return error
    if isinstance(error, ExportError):
        return TransientExportError(str(error), error.error_class)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return TransientExportError(text, _class_of(error))


def _class_of(error: BaseException) -> ErrorClass:
    if isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT):
        return ErrorClass.TIMEOUT
    if isinstance(error, (ConnectionError, socket.gaierror, socket.herror, ssl.SSLError, http.client.HTTPException)):
        return ErrorClass.NETWORK
    if isinstance(error, OSError):
        is_network = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
        return ErrorClass.NETWORK if is_network else ErrorClass.UNKNOWN
    return ErrorClass.UNKNOWN


def parse_export_retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait by a `Retry-After` header (seconds or a date); None if there is none that makes sense.

    `now`: seconds since the epoch.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), LONGEST_RETRY_AFTER)
    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, moment - now), LONGEST_RETRY_AFTER)
