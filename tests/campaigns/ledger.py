"""The oracle of every campaign: what was acknowledged = what the tables hold + dead letters + counted drops."""

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from penstock.model.level import Level
from penstock.model.segment import read_segment, sealed
from penstock.tables.port import Tables, read_level

MINUTE_US = 60_000_000


class Point(NamedTuple):
    """One point of a sender. Values are whole numbers, so that sums are exact in any order."""

    metric: str
    sender: str
    time_us: int
    value: float


@dataclass(frozen=True)
class Tally:
    """Points of one metric, sender and bucket."""

    count: int
    sum: float

    def plus(self, count: int, total: float) -> "Tally":
        return Tally(self.count + count, self.sum + total)


Key = tuple[str, str, int]  # metric, sender, where the bucket begins in microseconds
NOTHING = Tally(0, 0.0)


class Ledger:
    """Every point that a sender was answered for with success.

    Threads: every method may be called from any thread.
    """

    def __init__(self) -> None:
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._minutes: dict[Key, Tally] = defaultdict(lambda: NOTHING)
        self.answers: Counter[int] = Counter()  # by status; 0: the connection broke
        self.relayable: set[bytes] = set()  # digests of what every destination must get
        self.mistakes: list[str] = []  # answers that no sender should get

    def acknowledge(self, points: Iterable[Point], relayed: bytes | None = None) -> None:
        with self._lock:
            if relayed is not None:
                self.relayable.add(sha256(relayed).digest())
            for point in points:
                key = (point.metric, point.sender, point.time_us // MINUTE_US * MINUTE_US)
                self._minutes[key] = self._minutes[key].plus(1, point.value)

    def answered(self, status: int) -> None:
        with self._lock:
            self.answers[status] += 1

    @property
    def points(self) -> int:
        with self._lock:
            return sum(tally.count for tally in self._minutes.values())

    @property
    def requests(self) -> int:
        """Requests that were answered with success."""
        return self.answers[200] + self.answers[204]

    @property
    def attempts(self) -> int:
        with self._lock:
            return self.answers.total()

    @property
    def metrics(self) -> set[str]:
        with self._lock:
            return {key[0] for key in self._minutes}

    def expected(self, level: Level) -> dict[Key, Tally]:
        width = level.minutes * MINUTE_US
        found: dict[Key, Tally] = defaultdict(lambda: NOTHING)
        with self._lock:
            for (metric, sender, minute), tally in self._minutes.items():
                key = (metric, sender, minute // width * width)
                found[key] = found[key].plus(tally.count, tally.sum)
        return dict(found)

    def balance(self, held: Mapping[Key, Tally], level: Level = Level.MINUTE, lost_and_counted: int = 0) -> None:
        """Assert that every point is held once. Only so many may be missing as were dead-lettered or counted."""
        expected = self.expected(level)
        metrics = self.metrics
        ours = {key: tally for key, tally in held.items() if key[0] in metrics}
        twice = {key: (ours[key], expected.get(key)) for key in ours if ours[key].count > _count(expected, key)}
        assert not twice, f"counted twice, of {level.value}: {_some(twice)}"
        missing = {key: (ours.get(key), tally) for key, tally in expected.items() if _count(ours, key) < tally.count}
        short = sum(tally.count - _count(ours, key) for key, tally in expected.items())
        assert short == lost_and_counted, f"{short} points missing, {lost_and_counted} counted: {_some(missing)}"
        whole = {key: (ours[key], tally) for key, tally in expected.items() if _count(ours, key) == tally.count}
        wrong = {key: pair for key, pair in whole.items() if pair[0] != pair[1]}
        assert not wrong, f"sums differ, of {level.value}: {_some(wrong)}"


def _count(tallies: Mapping[Key, Tally], key: Key) -> int:
    return tallies.get(key, NOTHING).count


def _some(found: Mapping[Key, Any]) -> str:
    return f"{len(found)} of them, as {dict(list(found.items())[:5])}"


def held_by_tables(tables: Tables, level: Level = Level.MINUTE) -> dict[Key, Tally]:
    return _tallies(read_level(tables, level).select(["metric", "entity", "bucket", "count", "sum"]).to_pylist())


def held_by_segments(folder: Path) -> dict[Key, Tally]:
    """Where no Spark runs, what is sealed is what the tables would hold."""
    columns = ["metric", "entity", "bucket", "count", "sum"]
    return _tallies(
        row for one in sealed(folder) for row in read_segment(folder / one.name).select(columns).to_pylist()
    )


def _tallies(rows: Iterable[Mapping[str, Any]]) -> dict[Key, Tally]:
    found: dict[Key, Tally] = defaultdict(lambda: NOTHING)
    for row in rows:
        sender = json.loads(row["entity"]).get("sender", "")
        key = (row["metric"], sender, int(row["bucket"].timestamp()) * 1_000_000)
        found[key] = found[key].plus(row["count"], row["sum"])
    return dict(found)
