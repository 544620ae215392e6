"""The state of cumulative streams, kept over a restart: a file that is written at the end and deleted at the start.

    intake closed, all answered ──write──► streams.arrow ──read, then deleted──► claimed as streams come again

The file is Arrow IPC, a row for each stream: its family (an index into the JSON of the metadata), its name, how long it
had been silent, and its state. It holds exactly what was answered for. It is deleted before the first request is taken:
after a `kill -9` there is no file, because an old one would count again what was counted since.
"""

import base64
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.decode.column_scan import Ints
from penstock.decode.deltas import DeltaClocks, StreamState, StreamStates
from penstock.decode.otlp.walk import OtlpFamily
from penstock.decode.series import KnownSeries, SeriesNamespace
from penstock.decode.stream_owners import StreamOwners
from penstock.model.segment import sync_segment_folder

log = logging.getLogger(__name__)
FORMAT = 2  # raise it when streams are identified, or get owners, in another way: older files are then ignored
_ABOUT = b"penstock.streams"
_NUMBERS = ("last", "start", "value", "owed", "shape")
_LISTS = ("buckets", "owed_buckets")
SCHEMA = pa.schema(
    [
        ("family", pa.int32()),
        ("name", pa.string()),  # metric, kind and entity
        ("deltas", pa.int8()),  # the index of the memory that keeps it
        ("silent", pa.float64()),  # seconds since it was seen
        *((name, pa.float64() if name in ("value", "owed") else pa.int64()) for name in _NUMBERS),
        *((name, pa.list_(pa.int64())) for name in _LISTS),
    ]
)


class StreamMemory(Protocol):
    """Keeps the state of streams: the deltas of numbers, of histograms, of exponential histograms."""

    clocks: DeltaClocks

    def states(self, streams: Ints) -> StreamStates: ...

    def put(self, stream: int, state: StreamState, capacity: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Streams as they were at `saved_at`. It holds every stream that began after `horizon` and was seen."""

    rows: pa.Table
    families: list[OtlpFamily | None]
    saved_at: float
    horizon: int
    settings: str
    types: dict[str, int]  # stated by the metadata of remote writes
    part: tuple[int, int] = (0, 1)  # the process that owned these streams, and of how many


class RestoredStreams:
    """The streams of an earlier run that have not come again yet.

    Threads: one at a time.
    """

    def __init__(self, snapshot: Snapshot, loaded_at: float) -> None:
        self._rows = snapshot.rows.combine_chunks()
        self._families = snapshot.families
        self.loaded_at = loaded_at
        self._deltas = self._rows["deltas"].to_numpy()
        self._numbers = [self._rows[name].to_numpy() for name in _NUMBERS]
        lists = [self._rows[name].combine_chunks() for name in _LISTS]
        self._lists = [(one.offsets.to_numpy(), one.values.to_numpy()) for one in lists]
        family = self._rows["family"].to_numpy()
        order = np.argsort(family, kind="stable")
        names = self._rows["name"].take(pa.array(order)).to_pylist()
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(family[order])) + 1, [len(order)]]).tolist()
        places = order.tolist()
        self._waiting: dict[OtlpFamily | None, dict[str, int]] = {
            snapshot.families[int(family[places[first]])]: dict(zip(names[first:last], places[first:last]))
            for first, last in pairwise(bounds)
            if last > first
        }

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def claim(self, family: OtlpFamily | None, name: str) -> tuple[int, StreamState] | None:
        """Returns the index of the memory that keeps a stream, and its state; None if unknown or already claimed."""
        row = self._waiting.get(family, {}).pop(name, None)
        if row is None:
            return None
        last, start, value, owed, shape = (column[row].item() for column in self._numbers)
        buckets, owed_buckets = (values[offsets[row] : offsets[row + 1]] for offsets, values in self._lists)
        return int(self._deltas[row]), StreamState(last, start, value, owed, shape, buckets, owed_buckets)

    def unclaimed(self, now: float) -> tuple[pa.Table, list[OtlpFamily | None]]:
        """Returns the rows that were not claimed, older by the time that has passed."""
        places = sorted(row for rows in self._waiting.values() for row in rows.values())
        rows = self._rows.take(pa.array(places, pa.int64()))
        silent = pc.add(rows["silent"], now - self.loaded_at)
        return rows.set_column(SCHEMA.get_field_index("silent"), SCHEMA.field("silent"), silent), self._families


def stream_name_of(identity: tuple[str, str, str]) -> str:
    """Joins metric, kind and entity to the text that identifies a stream within its family."""
    return "\0".join(identity)


def stream_rows_of(
    namespaces: Iterable[SeriesNamespace], table: KnownSeries, memories: Sequence[StreamMemory], now: float
) -> tuple[pa.Table, list[OtlpFamily | None]]:
    """Returns all streams that have a state, and their families."""
    families: list[OtlpFamily | None] = []
    family_of = np.zeros(table.capacity, np.int32)
    names = np.full(table.capacity, "", object)
    for number, namespace in enumerate(namespaces):
        families.append(namespace.family)
        streams = np.fromiter(namespace.streams.values(), np.int64, len(namespace.streams))
        family_of[streams] = number
        names[streams] = [stream_name_of(identity) for identity in namespace.streams]
    pieces = [SCHEMA.empty_table()]
    for number, memory in enumerate(memories):
        streams = memory.clocks.known()
        states = memory.states(streams)
        columns = [
            pa.array(family_of[streams], pa.int32()),
            pa.array(names[streams].tolist(), pa.string()),
            pa.array(np.full(len(streams), number, np.int8)),
            pa.array(np.maximum(now - table.seen[streams], 0.0)),
            *(pa.array(column) for column in (states.last, states.start, states.value, states.owed, states.shape)),
            _lists(states.lengths, states.buckets),
            _lists(states.owed_lengths, states.owed_buckets),
        ]
        pieces.append(pa.Table.from_arrays(columns, schema=SCHEMA))
    return pa.concat_tables(pieces), families


def _lists(lengths: Ints, values: Ints) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int64()))


def join_streams(parts: Sequence[tuple[pa.Table, list[OtlpFamily | None]]]) -> tuple[pa.Table, list[OtlpFamily | None]]:
    """Returns one table of all rows, with one list of families."""
    families: dict[OtlpFamily | None, int] = {}
    pieces = []
    for rows, own in parts:
        numbers = np.array([families.setdefault(family, len(families)) for family in own], np.int32)
        column = pa.array(numbers[rows["family"].to_numpy()], pa.int32()) if len(own) else rows["family"]
        pieces.append(rows.set_column(0, SCHEMA.field("family"), column))
    return pa.concat_tables(pieces), list(families)


def divide_streams_among(snapshots: Sequence[Snapshot], count: int) -> list[Snapshot] | None:
    """Divides the streams of all earlier processes among `count` owners; None if a snapshot is missing.

    Without it a missing stream could not be told from a new one.
    """
    parts = sorted(snapshot.part for snapshot in snapshots)
    settings = {snapshot.settings for snapshot in snapshots}
    if not parts or parts != [(index, len(parts)) for index in range(len(parts))] or len(settings) > 1:
        return None
    saved_at = max(snapshot.saved_at for snapshot in snapshots)
    pieces = []
    for snapshot in snapshots:
        silent = pc.add(snapshot.rows["silent"], saved_at - snapshot.saved_at)
        place = SCHEMA.get_field_index("silent")
        pieces.append((snapshot.rows.set_column(place, SCHEMA.field("silent"), silent), snapshot.families))
    rows, families = join_streams(pieces)
    owners = _owners_of(rows, families, count)
    horizon = max(snapshot.horizon for snapshot in snapshots)
    types = {name: kind for snapshot in snapshots for name, kind in snapshot.types.items()}
    return [
        Snapshot(
            rows.filter(pa.array(owners == index)),
            families,
            saved_at,
            horizon,
            settings.copy().pop(),
            types,
            (index, count),
        )
        for index in range(count)
    ]


def _owners_of(rows: pa.Table, families: Sequence[OtlpFamily | None], count: int) -> Ints:
    """Returns the process that owns each stream."""
    owners = StreamOwners(0, count)
    by_family = np.array([0 if family is None else owners.of_family(family) for family in families], np.int64)
    has_family = np.array([family is not None for family in families], bool)
    numbers = rows["family"].to_numpy() if len(families) else np.zeros(0, np.int64)
    found: Ints = by_family[numbers]
    by_name = np.flatnonzero(~has_family[numbers])
    for row, name in zip(by_name.tolist(), rows["name"].take(pa.array(by_name)).to_pylist()):
        metric, _, entity = name.split("\0")
        found[row] = owners.of_series(metric, entity)
    return found


def write_streams(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file at `path`; OSError if that fails."""
    texts: dict[bytes, int] = {}
    families = [
        None if family is None else [*(texts.setdefault(text, len(texts)) for text in family[:3]), *family[3:]]
        for family in snapshot.families
    ]
    about = {
        "format": FORMAT,
        "saved_at": snapshot.saved_at,
        "horizon": snapshot.horizon,
        "settings": snapshot.settings,
        "part": snapshot.part,
        "types": snapshot.types,
        "families": families,
        "texts": [base64.b64encode(text).decode() for text in texts],
    }
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_name(f".{path.name}")
    schema = SCHEMA.with_metadata({_ABOUT: json.dumps(about).encode()})
    with open(scratch, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        with pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(snapshot.rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync_segment_folder(path.parent)


def read_streams(path: Path) -> Snapshot:
    """Returns what was written; ValueError if it is damaged or of another format, OSError if it cannot be read."""
    with pa.OSFile(str(path)) as file:
        rows = pa.ipc.open_file(file).read_all()
    about = json.loads((rows.schema.metadata or {}).get(_ABOUT, b"{}"))
    if about.get("format") != FORMAT or rows.schema.names != SCHEMA.names:
        raise ValueError(f"it is not of format {FORMAT}")
    texts = [base64.b64decode(text) for text in about["texts"]]
    families = [_family(given, texts) for given in about["families"]]
    saved_at, horizon, settings, types = (about[name] for name in ("saved_at", "horizon", "settings", "types"))
    index, count = about.get("part", (0, 1))
    return Snapshot(rows.cast(SCHEMA), families, saved_at, horizon, settings, types, (index, count))


def _family(given: list[int] | None, texts: Sequence[bytes]) -> OtlpFamily | None:
    return None if given is None else OtlpFamily(*(texts[number] for number in given[:3]), *given[3:])  # type: ignore[arg-type]


def take_streams(path: Path) -> Snapshot | None:
    """Reads the file and deletes it, so that it is used once; None if there is none, or none that can be read.

    A damaged file is renamed to `<name>.damaged`. OSError if it cannot be deleted: it would be used again.
    """
    try:
        snapshot = read_streams(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        aside = path.with_name(f"{path.name}.damaged")
        os.replace(path, aside)
        log.warning("What was known of streams cannot be read and is set aside. path=%s reason=%s", aside, error)
        return None
    path.unlink()
    sync_segment_folder(path.parent)
    return snapshot
