"""Groups of bodies into chunks: the way from the wire to L1, in columns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.model.point import Chunk
from penstock.receive.chunks import chunks_of
from penstock.receive.config import IntakeConfig
from penstock.receive.deltas import Deltas
from penstock.receive.events import EventReader
from penstock.receive.exponential_deltas import ExponentialDeltas
from penstock.receive.exponentials import exponential_histograms
from penstock.receive.group import Account, Group, Rows
from penstock.receive.histogram_deltas import HistogramDeltas
from penstock.receive.histograms import explicit_histograms
from penstock.receive.numbers import increments, joined, otlp_numbers
from penstock.receive.otlp import OtlpReader
from penstock.receive.otlp_json import as_protobuf
from penstock.receive.otlp_walk import EXPONENTIAL, HISTOGRAM, SUMMARY
from penstock.receive.remote_write import RemoteWriteReader
from penstock.receive.series import Namespace, SeriesTable
from penstock.receive.sink import Format
from penstock.receive.summaries import summary_numbers
from penstock.telemetry import Sample


@dataclass(slots=True)
class Decoded:
    """A group as chunks, how each body fared, and how to take its increments back."""

    chunks: list[Chunk]
    account: Account
    raw: list[bytes]  # the bodies as protobuf, for the relay
    undos: list[Callable[[], None]]

    def undo(self) -> None:
        """Forget that it was ever here: the same bodies give the same chunks again."""
        for undo in reversed(self.undos):
            undo()
        self.undos = []


class Decoder:
    """Decodes groups, and keeps what must be known from one to the next.

    Threads: one at a time.
    """

    def __init__(self, config: IntakeConfig, clock: Clock, began: float | None = None) -> None:
        self._config = config
        self._clock = clock
        since = int((clock.time() if began is None else began) * 1e9)  # streams that began later are new
        self._table = SeriesTable(config)
        self._deltas = Deltas(config.initial_value, since)
        self._histograms = HistogramDeltas(config.initial_value, since)
        self._exponentials = ExponentialDeltas(config.initial_value, since)
        self._otlp = OtlpReader(config)
        self._remote_write = RemoteWriteReader()
        self._events = EventReader()
        self._expired = 0

    def decode(self, kind: Format, bodies: list[bytes]) -> Decoded:
        """All points of the bodies that can be read."""
        now = self._clock.time()
        latest = int((now + float(self._config.max_future)) * 1e9)
        group = Group(self._table, Account(len(bodies)), self._clock.monotonic(), latest)
        try:
            return self._decoded(kind, bodies, group, now)
        except BaseException:
            for undo in reversed(group.undos):  # nobody was told of these increments: they must come again
                undo()
            raise
        finally:
            self._otlp.forget_unused()

    def _decoded(self, kind: Format, bodies: list[bytes], group: Group, now: float) -> Decoded:
        points: list[Rows] = []
        distributions: list[Rows] = []
        if kind is Format.EVENTS:
            points.append(self._events.read(bodies, group, now))
        elif kind is Format.REMOTE_WRITE:
            points.append(increments(self._remote_write.read(bodies, group), group, self._deltas))
        else:
            if kind is Format.OTLP_JSON:
                bodies = as_protobuf(bodies, group.account)
            self._read_otlp(bodies, group, points, distributions)
        pieces = [joined(some) for some in (points, distributions) if some]
        chunks = [chunk for rows in pieces for chunk in chunks_of(rows, self._table)]
        return Decoded(chunks, group.account, bodies, group.undos)

    def _read_otlp(self, bodies: list[bytes], group: Group, points: list[Rows], distributions: list[Rows]) -> None:
        for layout, found in self._otlp.read(bodies, group.account):
            if layout == HISTOGRAM:
                distributions.append(explicit_histograms(found, group, self._histograms))
            elif layout == EXPONENTIAL:
                distributions.append(exponential_histograms(found, group, self._exponentials))
            elif layout == SUMMARY:
                points.append(increments(summary_numbers(found, group, self._otlp), group, self._deltas))
            else:
                points.append(increments(otlp_numbers(found, group), group, self._deltas))

    def expire(self) -> int:
        """Forget what has been silent for too long; how many streams."""
        before = self._clock.monotonic() - float(self._config.expiry)
        namespaces: list[Namespace] = [
            *self._otlp.namespaces.values(),
            *self._remote_write.namespaces.values(),
            *self._events.namespaces.values(),
        ]
        gone = self._table.expire(namespaces, before)
        for deltas in self._all_deltas():
            deltas.forget(gone)
        for family in [family for family, namespace in self._otlp.namespaces.items() if not namespace.keys]:
            del self._otlp.namespaces[family]
        self._expired += len(gone)
        return len(gone)

    def _all_deltas(self) -> tuple[Deltas, HistogramDeltas, ExponentialDeltas]:
        return self._deltas, self._histograms, self._exponentials

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        table, counts = self._table, [deltas.counts for deltas in self._all_deltas()]
        metrics = list(table.metrics)
        yield Sample("penstock_receive_streams", len(table))
        yield Sample("penstock_receive_metrics", len(metrics))
        yield Sample("penstock_receive_series", sum(len(metric.entities) for metric in metrics))
        yield Sample("penstock_receive_overflowed_total", sum(metric.overflowed for metric in metrics))
        yield Sample("penstock_receive_expired_total", self._expired)
        yield Sample("penstock_receive_resets_total", sum(count.resets for count in counts))
        yield Sample("penstock_receive_out_of_order_total", sum(count.out_of_order for count in counts))
        yield Sample("penstock_receive_first_seen_total", sum(count.first_seen for count in counts))
