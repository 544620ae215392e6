"""OTLP over HTTP: batches that are serialised export requests already are compressed and posted, not decoded."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import cramjam

from penstock.errors import ConfigError
from penstock.export.exporter import PartialSuccess, Prepared
from penstock.export.http_client import HttpClient, HttpClientConfig
from penstock.export.http_connection import HttpResponse
from penstock.protobuf import get_bytes, get_varint, halve

Signal = Literal["metrics", "traces", "logs"]
Encoding = Literal["none", "gzip", "zstd"]

_GZIP_LEVEL = 1  # five times as fast as level 6, for a tenth more bytes
_ZSTD_LEVEL = 1
_MAY_PASS = (502, 503, 504)  # of the 5xx; the specification says that no other one must be sent again
_DATA_OF_METRIC = (5, 7, 9, 10, 11)  # gauge, sum, histogram, exponential histogram, summary
# Request: resources = 1; of these, scopes = 2; of these, metrics, spans or records = 2; of a metric, its points.
_PATHS = {
    "metrics": ((1,), (2,), (2,), _DATA_OF_METRIC, (1,)),
    "traces": ((1,), (2,), (2,)),
    "logs": ((1,), (2,), (2,)),
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # headers may be secret
class OtlpHttpConfig(HttpClientConfig):
    """`url`: the receiver's base, as `http://127.0.0.1:4318`; `/v1/metrics` (or the other signal) is appended."""

    signal: Signal = "metrics"
    compression: Encoding = "gzip"

    def __post_init__(self) -> None:
        HttpClientConfig.__post_init__(self)
        if self.signal not in _PATHS:
            raise ConfigError(f"must be one of {', '.join(_PATHS)}, got {self.signal!r}", field="signal")
        if self.compression not in ("none", "gzip", "zstd"):
            raise ConfigError(f"must be one of none, gzip, zstd, got {self.compression!r}", field="compression")


class OtlpHttpExporter:
    """Sends `Export…ServiceRequest`s to an OTLP/HTTP receiver.

    Threads: every method may be called from any thread.
    """

    in_order = False

    def __init__(self, config: OtlpHttpConfig) -> None:
        suffix = f"/v1/{config.signal}"
        path = "" if urlsplit(config.url).path.rstrip("/").endswith(suffix) else suffix
        self._client = HttpClient(config, path, may_pass=_MAY_PASS)
        self.destination = self._client.address
        self._compression = config.compression
        self._path = _PATHS[config.signal]
        self._headers = {"Content-Type": "application/x-protobuf"}
        if config.compression != "none":
            self._headers["Content-Encoding"] = config.compression

    def prepare(self, batch: bytes) -> Prepared:
        if self._compression == "gzip":
            batch = bytes(cramjam.gzip.compress(batch, level=_GZIP_LEVEL))
        elif self._compression == "zstd":
            batch = bytes(cramjam.zstd.compress(batch, level=_ZSTD_LEVEL))
        return Prepared(batch, self._headers)

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        return export_partial_success(self._client.post(prepared.body, prepared.headers))

    def split(self, batch: bytes) -> list[bytes] | None:
        """By resource; if there is one only, by scope; then by metric, span or record; then by point."""
        try:
            halves = halve(batch, self._path)
        except ValueError:
            return None
        return list(halves) if halves else None

    def close(self) -> None:
        self._client.close()


def export_partial_success(response: HttpResponse) -> PartialSuccess | None:
    """The `partial_success` of an answer, the same for all signals; None if everything was taken."""
    try:
        partial = get_bytes(response.body, 1)
        if partial is None:
            return None
        rejected, message = get_varint(partial, 1), get_bytes(partial, 2) or b""
    except ValueError:
        # The status is what counts. But a page of HTML is what a proxy or a wrong address says to everything.
        kind = response.headers.get("content-type", "nothing").partition(";")[0]
        return None if "json" in kind else PartialSuccess(0, f"the answer was no OTLP but {kind}: check the url")
    if rejected >= 1 << 63:
        rejected = 0  # a negative number: nothing that a count could be
    if not rejected and not message:
        return None
    return PartialSuccess(rejected, message.decode("utf-8", "replace"))
