"""Prometheus remote write 1.0: serialised `WriteRequest`s, snappy-compressed as one block.

    WriteRequest { repeated TimeSeries timeseries = 1 }
    TimeSeries   { repeated Label labels = 1; repeated Sample samples = 2 }
    Label        { string name = 1; string value = 2 }
    Sample       { double value = 1; int64 timestamp = 2 }        milliseconds since the epoch

The message is encoded by hand: it has four fields that never change, and protobuf would be a requirement for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import cramjam

from penstock.export.exporter import PartialSuccess, Prepared
from penstock.export.http_client import HttpClient, HttpClientConfig
from penstock.protobuf import field_bytes, field_double, field_varint, halve

_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
_PATH = ((1,), (2,))  # the series of a request, the samples of a series


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # headers may be secret
class RemoteWriteConfig(HttpClientConfig):
    """`url`: the receiver, as `http://127.0.0.1:9090/api/v1/write`."""

    in_order: bool = True
    """A series' samples must come in order, unless the receiver is set up to take them otherwise
    (`out_of_order_time_window`, or a backend that does not mind): then say False and have more workers."""


class RemoteWriteExporter:
    """Sends `WriteRequest`s to a remote-write receiver.

    Threads: every method may be called from any thread.
    """

    def __init__(self, config: RemoteWriteConfig) -> None:
        self._client = HttpClient(config)
        self.in_order = config.in_order
        self.destination = self._client.address

    def prepare(self, batch: bytes) -> Prepared:
        return Prepared(bytes(cramjam.snappy.compress_raw(batch)), _HEADERS)

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        self._client.post(prepared.body, prepared.headers)
        return None

    def split(self, batch: bytes) -> list[bytes] | None:
        """By series; if there is one only, by sample."""
        try:
            halves = halve(batch, _PATH)
        except ValueError:
            return None
        return list(halves) if halves else None

    def close(self) -> None:
        self._client.close()


def write_request(series: Iterable[tuple[Mapping[str, str], Iterable[tuple[int, float]]]]) -> bytes:
    """A serialised `WriteRequest` of (labels, samples); a sample is (milliseconds since the epoch, value)."""
    out = []
    for labels, samples in series:
        encoded = [
            field_bytes(1, field_bytes(1, name.encode()) + field_bytes(2, labels[name].encode()))
            for name in sorted(labels)  # the receiver wants them in order
        ]
        encoded += [field_bytes(2, field_double(1, value) + field_varint(2, moment)) for moment, value in samples]
        out.append(field_bytes(1, b"".join(encoded)))
    return b"".join(out)
