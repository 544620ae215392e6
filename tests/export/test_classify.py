"""What a failure means is decided by status, code and type."""

import errno
import http.client
import socket
import ssl
from email.utils import formatdate

import pytest

from penstock.errors import ErrorClass, ExportError, PayloadTooLarge, PermanentExportError, TransientExportError
from penstock.export.classify import LONGEST_RETRY_AFTER, of_exception, of_grpc, of_status, parse_export_retry_after

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("status", "kind", "error_class"),
    [
        (301, TransientExportError, ErrorClass.CLIENT_ERROR),
        (400, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (401, TransientExportError, ErrorClass.AUTH),
        (403, TransientExportError, ErrorClass.AUTH),
        (404, TransientExportError, ErrorClass.CLIENT_ERROR),
        (405, TransientExportError, ErrorClass.CLIENT_ERROR),
        (407, TransientExportError, ErrorClass.AUTH),
        (408, TransientExportError, ErrorClass.TIMEOUT),
        (413, PayloadTooLarge, ErrorClass.CLIENT_ERROR),
        (421, TransientExportError, ErrorClass.CLIENT_ERROR),
        (422, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (429, TransientExportError, ErrorClass.RATE_LIMIT),
        (500, TransientExportError, ErrorClass.SERVER_ERROR),
        (503, TransientExportError, ErrorClass.SERVER_ERROR),
        (504, TransientExportError, ErrorClass.TIMEOUT),
    ],
)
def test_an_http_status_says_what_to_do(status: int, kind: type[ExportError], error_class: ErrorClass) -> None:
    error = of_status(status, "because")
    assert type(error) is kind
    assert error.error_class is error_class
    assert str(error).startswith(str(status))
    assert "because" in str(error)


@pytest.mark.parametrize(
    ("code", "kind", "error_class"),
    [
        (1, TransientExportError, ErrorClass.NETWORK),
        (3, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (4, TransientExportError, ErrorClass.TIMEOUT),
        (5, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (6, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (7, TransientExportError, ErrorClass.AUTH),
        (8, TransientExportError, ErrorClass.RATE_LIMIT),
        (9, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (10, TransientExportError, ErrorClass.SERVER_ERROR),
        (11, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (12, PermanentExportError, ErrorClass.CLIENT_ERROR),
        (13, TransientExportError, ErrorClass.SERVER_ERROR),
        (14, TransientExportError, ErrorClass.NETWORK),
        (15, TransientExportError, ErrorClass.SERVER_ERROR),
        (16, TransientExportError, ErrorClass.AUTH),
        (2, TransientExportError, ErrorClass.UNKNOWN),
    ],
)
def test_a_grpc_code_says_what_to_do(code: int, kind: type[ExportError], error_class: ErrorClass) -> None:
    error = of_grpc(code, "because")
    assert type(error) is kind
    assert error.error_class is error_class


@pytest.mark.parametrize(
    "error", [of_grpc(8, "", 7.0), of_grpc(14, "", 7.0), of_status(429, "", 7.0), of_status(503, "", 7.0)]
)
def test_when_to_come_again_is_kept(error: ExportError) -> None:
    assert isinstance(error, TransientExportError)
    assert error.retry_after == 7.0


@pytest.mark.parametrize(
    ("raised", "error_class"),
    [
        (TimeoutError("timed out"), ErrorClass.TIMEOUT),
        (OSError(errno.ETIMEDOUT, "x"), ErrorClass.TIMEOUT),
        (ConnectionRefusedError(), ErrorClass.NETWORK),
        (ConnectionResetError(), ErrorClass.NETWORK),
        (BrokenPipeError(), ErrorClass.NETWORK),
        (socket.gaierror(-2, "Name or service not known"), ErrorClass.NETWORK),
        (ssl.SSLCertVerificationError("bad"), ErrorClass.NETWORK),
        (http.client.IncompleteRead(b"half"), ErrorClass.NETWORK),
        (OSError(errno.ENETUNREACH, "x"), ErrorClass.NETWORK),
        (OSError(errno.EHOSTUNREACH, "x"), ErrorClass.NETWORK),
        (OSError(errno.ENETDOWN, "x"), ErrorClass.NETWORK),
        (OSError(errno.EHOSTDOWN, "x"), ErrorClass.NETWORK),
        (socket.herror(1, "Unknown host"), ErrorClass.NETWORK),
        (OSError(errno.EBADF, "x"), ErrorClass.UNKNOWN),
        (KeyError("surprise"), ErrorClass.UNKNOWN),
    ],
)
def test_what_was_raised_says_what_to_do_and_is_never_permanent(raised: Exception, error_class: ErrorClass) -> None:
    error = of_exception(raised)
    assert type(error) is TransientExportError
    assert error.error_class is error_class
    assert type(raised).__name__ in str(error)


def test_an_export_error_stays_what_it_is() -> None:
    error = PayloadTooLarge("large")
    assert of_exception(error) is error


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 0 ", 0.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        ("99999999", LONGEST_RETRY_AFTER),
        ("-3", None),
        ("soon", None),
        ("1.5", None),
        ("\u0663", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_export_retry_after(header, NOW) == seconds
