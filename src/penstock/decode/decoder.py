"""Groups of bodies into chunks: the way from the wire to L1, in columns."""

import json
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from penstock.clock import Clock
from penstock.decode.config import IntakeConfig
from penstock.decode.deltas import Deltas
from penstock.decode.events import EventReader
from penstock.decode.exponential_deltas import ExponentialDeltas
from penstock.decode.group import Account, Group, Rows
from penstock.decode.histogram_deltas import HistogramDeltas
from penstock.decode.numbers import all_of, increments, joined, otlp_numbers
from penstock.decode.otlp.exponential_histograms import exponential_histograms
from penstock.decode.otlp.histograms import explicit_histograms
from penstock.decode.otlp.json_request import as_protobuf
from penstock.decode.otlp.request import OtlpReader
from penstock.decode.otlp.summaries import summary_numbers
from penstock.decode.otlp.walk import EXPONENTIAL, HISTOGRAM, SUMMARY
from penstock.decode.outcome import Format
from penstock.decode.point_chunks import chunks_of
from penstock.decode.remote_write import RemoteWriteReader
from penstock.decode.scanned_points import Found
from penstock.decode.series import Namespace, SeriesTable
from penstock.decode.stream_homes import Bodies, Homes
from penstock.decode.stream_memory import Remembered, Snapshot, name_of, rows_of, take, together, write
from penstock.model.point import Chunk
from penstock.telemetry import Sample

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Decoded:
    """A group as chunks, how each body fared, and how to take its increments back."""

    chunks: list[Chunk]
    account: Account
    raw: list[bytes]  # the bodies as protobuf, for the relay
    undos: list[Callable[[], None]]
    rows: list[Rows]  # what the chunks are made of

    def undo(self) -> None:
        """Forget that it was ever here: the same bodies give the same chunks again."""
        for undo in reversed(self.undos):
            undo()
        self.undos = []


HandOn = Callable[[Bodies, Mapping[int, int]], None]
"""Told what each of the others keeps, and how many points that are."""


def _hand_on(group: Group, hand_on: HandOn | None) -> None:
    failed = group.account.errors
    if hand_on is not None and (bodies := group.elsewhere.bodies(failed)):
        hand_on(bodies, group.elsewhere.points(failed))


class Decoder:
    """Decodes groups, and keeps what must be known from one to the next.

    Threads: one at a time.
    """

    def __init__(
        self, config: IntakeConfig, clock: Clock, began: float | None = None, homes: Homes | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        since = int((clock.time() if began is None else began) * 1e9)  # streams that began later are new
        self._table = SeriesTable(config)
        self._deltas = Deltas(config.initial_value, since)
        self._histograms = HistogramDeltas(config.initial_value, since)
        self._exponentials = ExponentialDeltas(config.initial_value, since)
        self._otlp = OtlpReader(config, homes)
        self._remote_write = RemoteWriteReader(config.longest_name, homes)
        self._events = EventReader()
        self._part = (homes.own, homes.count) if homes is not None else (0, 1)
        self._expired = 0
        self._asked_again = clock.monotonic()
        self._horizon = since  # of streams that began later we know all, unless they are new
        self._remembered: Remembered | None = None

    def decode(
        self, kind: Format, bodies: list[bytes], settled: Container[int] = (), hand_on: HandOn | None = None
    ) -> Decoded:
        """All points of the bodies that can be read and that we keep.

        `hand_on` is called with what other processes keep, as soon as that is known; they can have read it when we are
        done. `settled` are the numbers of bodies that another process has handed to us: nothing of them is handed on.
        """
        now = self._clock.time()
        latest = int((now + float(self._config.max_future)) * 1e9)
        group = Group(self._table, Account(len(bodies)), self._clock.monotonic(), latest, settled=settled)
        try:
            return self._decoded(kind, bodies, group, now, hand_on)
        except BaseException:
            for undo in reversed(group.undos):  # nobody was told of these increments: they must come again
                undo()
            raise
        finally:
            self._otlp.forget_unused()

    def _decoded(self, kind: Format, bodies: list[bytes], group: Group, now: float, hand_on: HandOn | None) -> Decoded:
        points: list[Rows] = []
        distributions: list[Rows] = []
        if kind is Format.EVENTS:
            points.append(self._events.read(bodies, group, now))
        elif kind is Format.REMOTE_WRITE:
            numbers = self._remote_write.read(bodies, group)
            _hand_on(group, hand_on)
            points.append(increments(numbers, group, self._deltas))
        else:
            if kind is Format.OTLP_JSON:
                bodies = as_protobuf(bodies, group.account)
            found = self._otlp.read(bodies, group)
            _hand_on(group, hand_on)
            self._read_otlp(found, group, points, distributions)
        pieces = [joined(some) for some in (points, distributions) if some]
        chunks = [chunk for rows in pieces for chunk in chunks_of(rows, self._table)]
        return Decoded(chunks, group.account, bodies, group.undos, pieces)

    def without(self, requests: Collection[int], decoded: Decoded) -> Decoded:
        """What may be counted though those requests come again: of them only what is known by its time then."""
        pieces = []
        for rows in decoded.rows:
            is_kept = self._table.is_cumulative[rows.streams] | ~np.isin(rows.requests, list(requests))
            pieces.append(rows.take(is_kept))
        chunks = [chunk for rows in pieces for chunk in chunks_of(rows, self._table)]
        return replace(decoded, chunks=chunks, rows=pieces)

    def _read_otlp(
        self, by_layout: list[tuple[int, Found]], group: Group, points: list[Rows], distributions: list[Rows]
    ) -> None:
        numbers = []
        for layout, found in by_layout:
            if layout == HISTOGRAM:
                distributions.append(explicit_histograms(found, group, self._histograms))
            elif layout == EXPONENTIAL:
                distributions.append(exponential_histograms(found, group, self._exponentials))
            elif layout == SUMMARY:
                numbers.append(summary_numbers(found, group, self._otlp))
            else:
                numbers.append(otlp_numbers(found, group))
        if numbers:  # all at once: a summary whose shape is known is among the numbers, and its streams go on in order
            points.append(increments(all_of(numbers), group, self._deltas))

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
        self._otlp.forget(gone, self._table.capacity)
        for family in [family for family, namespace in self._otlp.namespaces.items() if not namespace.keys]:
            del self._otlp.namespaces[family]
        self._expired += len(gone)
        if self._clock.monotonic() - self._asked_again >= float(self._config.expiry):
            self._asked_again = self._clock.monotonic()
            self._remote_write.forget_away()
        if self._remembered is not None and self._remembered.loaded_at < before:
            self._remembered = self._table.on_cumulative = None
        self._look_back_to(self._horizon)
        return len(gone)

    def _look_back_to(self, horizon: int) -> None:
        """A stream that began before may have been counted; so may one that could have expired meanwhile."""
        expired = int((self._clock.time() - float(self._config.expiry)) * 1e9)
        self._horizon = max(horizon, expired)
        for deltas in self._all_deltas():
            deltas.since(self._horizon)

    # -- over a restart ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> int:
        """Keep at `path` what is known of cumulative streams; how many there are. OSError if that cannot be done.

        To be called when nothing is under way any more: all that was decoded was taken, or has been undone.
        """
        now = self._clock.monotonic()
        namespaces = [*self._otlp.namespaces.values(), *self._remote_write.namespaces.values()]
        parts = [rows_of(namespaces, self._table, self._all_deltas(), now)]
        if self._remembered is not None:
            parts.append(self._remembered.unclaimed(now))
        rows, families = together(parts)
        types = self._remote_write.types
        now = self._clock.time()
        write(path, Snapshot(rows, families, now, self._horizon, self._settings(), types, self._part))
        return int(rows.num_rows)

    def restore(self, path: Path) -> int:
        """Go on with what `save` kept at `path`, if it is young enough and of the same settings; how many streams.

        The file is gone then, whatever comes next. OSError if it cannot be deleted.
        """
        snapshot = take(path)
        if snapshot is None:
            return 0
        passed, expiry = self._clock.time() - snapshot.saved_at, float(self._config.expiry)
        is_ours = snapshot.settings == self._settings() and snapshot.part == self._part
        if not 0.0 <= passed <= expiry or not is_ours:
            log.info("What was known of streams is too old, or of other settings. age=%.0f", passed)
            return 0
        rows = snapshot.rows
        silent = pc.add(rows["silent"], passed)
        rows = rows.set_column(rows.schema.get_field_index("silent"), "silent", silent)
        rows = rows.filter(pc.less_equal(silent, expiry))
        self._remembered = Remembered(replace(snapshot, rows=rows), self._clock.monotonic())
        self._table.on_cumulative = self._claim
        self._remote_write.types.update(snapshot.types)
        self._look_back_to(snapshot.horizon)
        return len(self._remembered)

    def _claim(self, namespace: Namespace, identity: tuple[str, str, str], stream: int) -> None:
        assert self._remembered is not None
        if found := self._remembered.claim(namespace.family, name_of(identity)):
            keeper, kept = found
            self._all_deltas()[keeper].put(stream, kept, self._table.capacity)

    def _settings(self) -> str:
        """What decides how streams are told apart: under other settings the same names mean others."""
        return json.dumps([self._config.resource_attributes, self._config.max_nesting])

    def _all_deltas(self) -> tuple[Deltas, HistogramDeltas, ExponentialDeltas]:
        return self._deltas, self._histograms, self._exponentials

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        table, counts = self._table, [deltas.counts for deltas in self._all_deltas()]
        metrics = list(table.metrics)
        yield Sample("penstock_receive_streams", len(table))
        yield Sample("penstock_receive_metrics", table.metric_count)
        yield Sample("penstock_receive_series", sum(len(metric.entities) for metric in metrics))
        yield Sample("penstock_receive_shapes", len(self._otlp.shapes))
        yield Sample("penstock_receive_overflowed_total", table.overflowed)
        yield Sample("penstock_receive_expired_total", self._expired)
        yield Sample("penstock_receive_resets_total", sum(count.resets for count in counts))
        yield Sample("penstock_receive_out_of_order_total", sum(count.out_of_order for count in counts))
        yield Sample("penstock_receive_first_seen_total", sum(count.first_seen for count in counts))
