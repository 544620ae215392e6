"""Groups of bodies into chunks: from the wire to L1, in columns.

bodies ─ otlp reader ─► scanned points ─┬─► numbers ───────────► increments ─► rows ─► chunks, one for each metric
         remote_write, events           └─► histograms, summaries                      to L1
"""

import heapq
import json
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from penstock.clock import Clock
from penstock.decode.config import IntakeConfig
from penstock.decode.decode_context import DecodeContext, DecodeOutcomes
from penstock.decode.deltas import Deltas
from penstock.decode.events import EventReader
from penstock.decode.exponential_deltas import ExponentialDeltas
from penstock.decode.histogram_deltas import HistogramDeltas
from penstock.decode.otlp.exponential_histograms import exponential_histograms
from penstock.decode.otlp.histograms import explicit_histograms
from penstock.decode.otlp.json_request import otlp_json_as_protobuf
from penstock.decode.otlp.otlp_reader import OtlpReader
from penstock.decode.otlp.scanned_points import ScannedOtlpPoints
from penstock.decode.otlp.summaries import summary_numbers
from penstock.decode.otlp.walk import EXPONENTIAL, HISTOGRAM, SUMMARY
from penstock.decode.outcome import Format
from penstock.decode.remote_write import RemoteWriteReader
from penstock.decode.rows import DecodedNumbers, DecodedRows
from penstock.decode.seen_times import SeenTimes
from penstock.decode.series import KnownSeries, SeriesNamespace
from penstock.decode.stream_memory import (
    RestoredStreams,
    Snapshot,
    join_streams,
    stream_name_of,
    stream_rows_of,
    take_streams,
    write_streams,
)
from penstock.decode.stream_owners import HandoverBodies, StreamHandoverParts, StreamOwners
from penstock.model.point import Chunk
from penstock.telemetry import Sample

log = logging.getLogger(__name__)
_TOP = 10  # metrics that are named by their series


@dataclass(slots=True)
class Decoded:
    """A group as chunks, how each body fared, and how to take its increments back."""

    chunks: list[Chunk]
    outcomes: DecodeOutcomes
    raw: list[bytes]  # the bodies as protobuf, for the relay
    undos: list[Callable[[], None]]
    rows: list[DecodedRows]  # what the chunks are made of

    def points_of(self, places: Sequence[int]) -> list[int]:
        """Returns how many points each of these requests brings."""
        counts = np.zeros(len(self.raw), np.int64)
        for rows in self.rows:
            counts += np.bincount(rows.requests, minlength=len(counts))
        return [int(counts[place]) for place in places]

    def undo(self) -> None:
        """Takes the increments back: the same bodies give the same chunks again."""
        for undo in reversed(self.undos):
            undo()
        self.undos = []


HandOver = Callable[[HandoverBodies, Mapping[int, int]], None]
"""Called with the bodies for each of the other processes, and how many points they hold."""


class Decoder:
    """Decodes groups, and keeps the state that outlives a group.

    Threads: one at a time.
    """

    def __init__(
        self, config: IntakeConfig, clock: Clock, began: float | None = None, owners: StreamOwners | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        since = int((clock.time() if began is None else began) * 1e9)  # streams that began later are new
        self._owners = owners
        self._table = KnownSeries(config)
        self._deltas = Deltas(config.initial_value, since)
        self._histograms = HistogramDeltas(config.initial_value, since)
        self._exponentials = ExponentialDeltas(config.initial_value, since)
        self._otlp = OtlpReader(config)
        self._remote_write = RemoteWriteReader(config, owners)
        self._events = EventReader()
        self._part = (owners.own, owners.count) if owners is not None else (0, 1)
        self._expired = 0
        self._owners_forgotten = clock.monotonic()
        self._horizon = since  # every stream that began later is known, or is new
        self._restored: RestoredStreams | None = None
        self._seen: SeenTimes | None = None

    def decode(
        self,
        kind: Format,
        bodies: list[bytes],
        handed_over: Container[int] = (),
        hand_over: HandOver | None = None,
        senders: Sequence[str] = (),
    ) -> Decoded:
        """Returns all points of the readable bodies whose streams this process owns.

        `hand_over` is called with what other processes own as soon as that is known, so that they read their parts at
        the same time. `handed_over` are the numbers of bodies that came from another process: no part of them is
        handed over again. `senders` are the senders of the bodies, whose streams have a quota.
        """
        now = self._clock.time()
        for deltas in self._all_deltas():
            deltas.clocks.now = int(now * 1e9)
        latest = int((now + float(self._config.max_future)) * 1e9)
        parts = StreamHandoverParts(self._owners, handed_over) if self._owners is not None else None
        context = DecodeContext(
            self._table, DecodeOutcomes(len(bodies)), self._clock.monotonic(), latest, parts, senders
        )
        try:
            return self._decode(kind, bodies, context, now, hand_over)
        except BaseException:
            for undo in reversed(context.undos):  # these increments were not counted: they must come again
                undo()
            raise
        finally:
            self._otlp.forget_unused()

    def _decode(
        self, kind: Format, bodies: list[bytes], context: DecodeContext, now: float, hand_over: HandOver | None
    ) -> Decoded:
        if kind is Format.EVENTS:
            pieces = [self._events.read(bodies, context, now)]
        elif kind is Format.REMOTE_WRITE:
            written = self._remote_write.read(bodies, context)
            _hand_over_parts(context, hand_over)
            pieces = [written.numbers.increments(context, self._deltas), written.not_numbers]
            if len(written.buckets.times):
                histograms = self._remote_write.histograms
                pieces.append(histograms.rows(written.buckets, context, self._histograms, self._deltas))
        else:
            if kind is Format.OTLP_JSON:
                bodies = otlp_json_as_protobuf(bodies, context.outcomes)
            points = self._otlp.read(bodies, context)
            _hand_over_parts(context, hand_over)
            pieces = self._otlp_rows(points, context)
        if self._seen is not None:
            self._seen.note(max(deltas.clocks.latest for deltas in self._all_deltas()))
        chunks = [chunk for rows in pieces for chunk in rows.chunks(self._table)]
        return Decoded(chunks, context.outcomes, bodies, context.undos, pieces)

    def _otlp_rows(self, by_layout: list[tuple[int, ScannedOtlpPoints]], context: DecodeContext) -> list[DecodedRows]:
        """Returns all numbers as one piece and all distributions as another."""
        numbers, distributions = [], []
        for layout, points in by_layout:
            if layout == HISTOGRAM:
                distributions.append(explicit_histograms(points, context, self._histograms))
            elif layout == EXPONENTIAL:
                distributions.append(exponential_histograms(points, context, self._exponentials))
            elif layout == SUMMARY:
                numbers.append(summary_numbers(points, context, self._otlp))
            else:
                numbers.append(points.numbers(context))
        pieces = []
        if numbers:  # all at once: summaries of known shapes are among the numbers, and their streams stay in order
            pieces.append(DecodedNumbers.join(numbers).increments(context, self._deltas))
        if distributions:
            pieces.append(DecodedRows.join(distributions))
        return pieces

    def without(self, requests: Collection[int], decoded: Decoded) -> Decoded:
        """Returns what may be counted although those requests come again: of them only cumulative points."""
        pieces = []
        for rows in decoded.rows:
            is_kept = self._table.is_cumulative[rows.streams] | ~np.isin(rows.requests, list(requests))
            pieces.append(rows.take(is_kept))
        chunks = [chunk for rows in pieces for chunk in rows.chunks(self._table)]
        return replace(decoded, chunks=chunks, rows=pieces)

    def expire(self) -> int:
        """Forgets streams that have been silent for too long; returns how many."""
        before = self._clock.monotonic() - float(self._config.expiry)
        namespaces: list[SeriesNamespace] = [
            *self._otlp.namespaces.values(),
            *self._remote_write.namespaces.values(),
            *self._events.namespaces.values(),
        ]
        gone = self._table.expire(namespaces, before)
        for deltas in self._all_deltas():
            deltas.forget(gone)
        self._remote_write.histograms.forget(gone)
        self._otlp.forget(gone, self._table.capacity)
        for family in [family for family, namespace in self._otlp.namespaces.items() if not namespace.keys]:
            del self._otlp.namespaces[family]
        self._expired += len(gone)
        if self._clock.monotonic() - self._owners_forgotten >= float(self._config.expiry):
            self._owners_forgotten = self._clock.monotonic()
            self._remote_write.forget_owners()
        if self._restored is not None and self._restored.loaded_at < before:
            self._restored = self._table.on_cumulative = None
        self._set_horizon(self._horizon)
        return len(gone)

    def _set_horizon(self, horizon: int) -> None:
        """Streams that began before the horizon may have been counted: earlier, or before they expired."""
        expired = int((self._clock.time() - float(self._config.expiry)) * 1e9)
        self._horizon = max(horizon, expired)
        for deltas in self._all_deltas():
            deltas.clocks.since(self._horizon)

    # -- over a restart ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> int:
        """Saves the state of cumulative streams at `path`; returns how many there are. OSError if that fails.

        Only valid while no group is in flight: all that was decoded was taken, or has been undone.
        """
        now = self._clock.monotonic()
        namespaces = [*self._otlp.namespaces.values(), *self._remote_write.namespaces.values()]
        parts = [stream_rows_of(namespaces, self._table, self._all_deltas(), now)]
        if self._restored is not None:
            parts.append(self._restored.unclaimed(now))
        rows, families = join_streams(parts)
        types = self._remote_write.types
        now = self._clock.time()
        write_streams(path, Snapshot(rows, families, now, self._horizon, self._settings(), types, self._part))
        return int(rows.num_rows)

    def restore(self, path: Path) -> int:
        """Restores what `save` wrote, if it is young enough and of the same settings; returns how many streams.

        Deletes the file in any case. OSError if it cannot be deleted. From here on the times seen are kept beside it.
        """
        self._seen = SeenTimes(path.with_name(path.name.replace(path.suffixes[0], ".seen", 1)))
        for deltas in self._all_deltas():
            deltas.clocks.forgotten_until(self._seen.earlier)
        snapshot = take_streams(path)
        if snapshot is None:
            return 0
        passed, expiry = self._clock.time() - snapshot.saved_at, float(self._config.expiry)
        is_same = snapshot.settings == self._settings() and snapshot.part == self._part
        if not 0.0 <= passed <= expiry or not is_same:
            log.info("What was known of streams is too old, or of other settings. age=%.0f", passed)
            return 0
        rows = snapshot.rows
        silent = pc.add(rows["silent"], passed)
        rows = rows.set_column(rows.schema.get_field_index("silent"), "silent", silent)
        rows = rows.filter(pc.less_equal(silent, expiry))
        self._restored = RestoredStreams(replace(snapshot, rows=rows), self._clock.monotonic())
        self._table.on_cumulative = self._claim
        self._remote_write.types.update(snapshot.types)
        self._set_horizon(snapshot.horizon)
        return len(self._restored)

    def _claim(self, namespace: SeriesNamespace, identity: tuple[str, str, str], stream: int) -> None:
        assert self._restored is not None
        if found := self._restored.claim(namespace.family, stream_name_of(identity)):
            memory, state = found
            self._all_deltas()[memory].put(stream, state, self._table.capacity)

    def _settings(self) -> str:
        """Returns the settings that identify streams: under others the same names mean other streams."""
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
        for metric in heapq.nlargest(_TOP, metrics, key=lambda metric: len(metric.entities)):
            if metric.entities:
                yield Sample("penstock_receive_metric_series", len(metric.entities), (metric.name,))
        for rule in table.rules.rules:
            yield Sample("penstock_receive_rules_total", rule.applied, (rule.text,))
        yield Sample("penstock_receive_rule_dropped_total", table.rules.dropped)
        yield Sample("penstock_receive_expired_total", self._expired)
        yield Sample("penstock_receive_resets_total", sum(count.resets for count in counts))
        yield Sample("penstock_receive_out_of_order_total", sum(count.out_of_order for count in counts))
        yield Sample("penstock_receive_first_seen_total", sum(count.first_seen for count in counts))


def _hand_over_parts(context: DecodeContext, hand_over: HandOver | None) -> None:
    failed = context.outcomes.errors
    if hand_over is not None and context.parts is not None and (bodies := context.parts.bodies(failed)):
        hand_over(bodies, context.parts.points(failed))
