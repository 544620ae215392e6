"""What is known of cumulative streams, kept over a restart: a file that is written at the end and gone at the start.

    intake closed, everybody answered ──write──► streams.arrow ──read, then deleted──► claimed as streams come again

The file is Arrow IPC, a row for each stream: whose it is (`family` is an index into the JSON of its metadata), what it
is called, how long it had been silent, and what its deltas keep. It holds exactly what was answered for, and it is
deleted before the first request is taken: after a `kill -9` there is none, since what was counted meanwhile is not in
it and would be counted twice.
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
from penstock.decode.deltas import Kept, States
from penstock.decode.otlp.walk import Family
from penstock.decode.series import Namespace, SeriesTable
from penstock.decode.stream_homes import Homes
from penstock.model.segment import sync_folder

log = logging.getLogger(__name__)
FORMAT = 1  # to be raised when streams are told apart, or get homes, in another way: an old file then says nothing
_ABOUT = b"penstock.streams"
_NUMBERS = ("last", "start", "value", "owed", "shape")
_LISTS = ("buckets", "owed_buckets")
SCHEMA = pa.schema(
    [
        ("family", pa.int32()),
        ("name", pa.string()),  # metric, kind and entity
        ("deltas", pa.int8()),  # which of them keep it
        ("silent", pa.float64()),  # seconds since it was seen
        *((name, pa.float64() if name in ("value", "owed") else pa.int64()) for name in _NUMBERS),
        *((name, pa.list_(pa.int64())) for name in _LISTS),
    ]
)


class Keeper(Protocol):
    """What keeps the state of streams: the deltas of numbers, of histograms, of exponential histograms."""

    def known(self, capacity: int) -> Ints:
        """The streams of which there is a state."""
        ...

    def states(self, streams: Ints) -> States: ...

    def put(self, stream: int, kept: Kept, capacity: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Streams as they were at `saved_at`; none that began after `horizon` was seen and is not among them."""

    rows: pa.Table
    families: list[Family | None]
    saved_at: float
    horizon: int
    settings: str
    types: dict[str, int]  # what the metadata of remote writes has said
    part: tuple[int, int] = (0, 1)  # of which process, of how many: those are all streams that it keeps


class Remembered:
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
        self._waiting: dict[Family | None, dict[str, int]] = {
            snapshot.families[int(family[places[first]])]: dict(zip(names[first:last], places[first:last]))
            for first, last in pairwise(bounds)
            if last > first
        }

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def claim(self, family: Family | None, name: str) -> tuple[int, Kept] | None:
        """Which deltas keep that stream and what; None if it was not known, or has come already."""
        row = self._waiting.get(family, {}).pop(name, None)
        if row is None:
            return None
        last, start, value, owed, shape = (column[row].item() for column in self._numbers)
        buckets, owed_buckets = (values[offsets[row] : offsets[row + 1]] for offsets, values in self._lists)
        return int(self._deltas[row]), Kept(last, start, value, owed, shape, buckets, owed_buckets)

    def unclaimed(self, now: float) -> tuple[pa.Table, list[Family | None]]:
        """The rows that nobody has claimed, older by what has passed."""
        places = sorted(row for rows in self._waiting.values() for row in rows.values())
        rows = self._rows.take(pa.array(places, pa.int64()))
        silent = pc.add(rows["silent"], now - self.loaded_at)
        return rows.set_column(SCHEMA.get_field_index("silent"), SCHEMA.field("silent"), silent), self._families


def name_of(identity: tuple[str, str, str]) -> str:
    """Metric, kind and entity as one text: what tells the streams of one family apart."""
    return "\0".join(identity)


def rows_of(
    namespaces: Iterable[Namespace], table: SeriesTable, keepers: Sequence[Keeper], now: float
) -> tuple[pa.Table, list[Family | None]]:
    """All streams that have a state, and their families."""
    families: list[Family | None] = []
    family_of = np.zeros(table.capacity, np.int32)
    names = np.full(table.capacity, "", object)
    for number, namespace in enumerate(namespaces):
        families.append(namespace.family)
        streams = np.fromiter(namespace.streams.values(), np.int64, len(namespace.streams))
        family_of[streams] = number
        names[streams] = [name_of(identity) for identity in namespace.streams]
    pieces = [SCHEMA.empty_table()]
    for number, keeper in enumerate(keepers):
        streams = keeper.known(table.capacity)
        states = keeper.states(streams)
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


def together(parts: Sequence[tuple[pa.Table, list[Family | None]]]) -> tuple[pa.Table, list[Family | None]]:
    """One table of all rows, with one list of families."""
    families: dict[Family | None, int] = {}
    pieces = []
    for rows, own in parts:
        numbers = np.array([families.setdefault(family, len(families)) for family in own], np.int32)
        column = pa.array(numbers[rows["family"].to_numpy()], pa.int32()) if len(own) else rows["family"]
        pieces.append(rows.set_column(0, SCHEMA.field("family"), column))
    return pa.concat_tables(pieces), list(families)


def shared_out(snapshots: Sequence[Snapshot], count: int) -> list[Snapshot] | None:
    """What several processes knew as what `count` of them keep; None if some of it is missing.

    Then nobody could tell a stream that is missing from one that is new.
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
    rows, families = together(pieces)
    homes = _homes_of(rows, families, count)
    horizon = max(snapshot.horizon for snapshot in snapshots)
    types = {name: kind for snapshot in snapshots for name, kind in snapshot.types.items()}
    return [
        Snapshot(
            rows.filter(pa.array(homes == index)),
            families,
            saved_at,
            horizon,
            settings.copy().pop(),
            types,
            (index, count),
        )
        for index in range(count)
    ]


def _homes_of(rows: pa.Table, families: Sequence[Family | None], count: int) -> Ints:
    """The process that keeps each stream."""
    homes = Homes(0, count)
    by_family = np.array([-1 if family is None else homes.of_family(family) for family in families], np.int64)
    found = by_family[rows["family"].to_numpy()] if len(families) else np.zeros(0, np.int64)
    by_name = np.flatnonzero(found < 0)
    for row, name in zip(by_name.tolist(), rows["name"].take(pa.array(by_name)).to_pylist()):
        metric, _, entity = name.split("\0")
        found[row] = homes.of_series(metric, entity)
    return found


def write(path: Path, snapshot: Snapshot) -> None:
    """Put it at `path`, in place of what is there; OSError if that cannot be done."""
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
    sync_folder(path.parent)


def read(path: Path) -> Snapshot:
    """What `write` was given; ValueError if it is damaged or of another format, OSError if it cannot be read."""
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


def _family(given: list[int] | None, texts: Sequence[bytes]) -> Family | None:
    return None if given is None else Family(*(texts[number] for number in given[:3]), *given[3:])  # type: ignore[arg-type]


def take(path: Path) -> Snapshot | None:
    """Read the file and delete it, so that it is used once; None if there is none, or none that can be read.

    A damaged one is set aside beside it. OSError if it cannot be deleted: it would be used again.
    """
    try:
        snapshot = read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        aside = path.with_name(f"{path.name}.damaged")
        os.replace(path, aside)
        log.warning("What was known of streams cannot be read and is set aside. path=%s reason=%s", aside, error)
        return None
    path.unlink()
    sync_folder(path.parent)
    return snapshot
