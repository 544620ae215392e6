"""Warns of definitions that do not fit what comes: they match nothing, or a label of their entity never comes."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from penstock.clock import Clock, SystemClock
from penstock.telemetry import Value

log = logging.getLogger(__name__)
_LOOK_EVERY = 30.0  # seconds; more often where the warning is due sooner
_LISTED = 10  # definitions that one warning names


class DefinitionWatch:
    """Reads what all processes count of each definition, and warns once of what stays 0 for `patience` seconds.

    `path` is the file of the definitions: a change of it begins the time anew.
    Threads: one of its own, from `start` to `close`. Every method may be called from any thread.
    """

    def __init__(
        self,
        values: Callable[[], Iterable[Value]],
        patience: float,
        path: Path | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._values = values
        self._patience = patience
        self._clock: Clock = clock or SystemClock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-definition-watch", daemon=True)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._since = self._clock.monotonic()
        self._content = _content_of(path)
        self._first_points: dict[str, float] = {}  # when a definition was first seen to have matched
        self._came: set[tuple[str, str]] = set()  # definitions and labels of their entities that points had
        self._warned: set[tuple[str, str]] = set()

    def start(self) -> None:
        if self._patience > 0:
            self._thread.start()

    def on_reload(self, path: Path | None) -> None:
        """Begin anew if the definitions changed: what came before says nothing about them."""
        content = _content_of(path)
        with self._lock:
            if content == self._content:
                return
            self._content = content
            self._since = self._clock.monotonic()
            for known in (self._first_points, self._came, self._warned):
                known.clear()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)  # it may wait for a process that does not answer

    def _watch(self) -> None:
        while not self._closing.wait(min(_LOOK_EVERY, self._patience / 2)):
            self.look()

    def look(self) -> None:
        """Warn of what has not come by now, and was not warned of before."""
        points: Counter[str] = Counter()
        seen: Counter[tuple[str, str]] = Counter()
        for name, _, labels, value in self._values():
            if name == "penstock_l1_definition_points_total":
                points[labels["definition"]] += int(value)
            elif name == "penstock_l1_definition_label_seen":
                seen[labels["definition"], labels["label"]] += int(value)
        with self._lock:
            unmatched, unseen = self._overdue_locked(points, seen)
        if unmatched:
            others = [f"and {len(unmatched) - _LISTED} more"] if len(unmatched) > _LISTED else []
            log.warning(
                "Definitions have matched nothing so far; `penstock definitions try` says why. "
                "seconds=%d definitions=%s",
                self._patience,
                ", ".join([*unmatched[:_LISTED], *others]),
            )
        for definition, label in unseen:
            log.warning(
                "No point has had this label of a definition's entity so far; `penstock definitions try` lists those "
                "that there are. seconds=%d definition=%s label=%s",
                self._patience,
                definition,
                label,
            )

    def _overdue_locked(
        self, points: Counter[str], seen: Counter[tuple[str, str]]
    ) -> tuple[list[str], list[tuple[str, str]]]:
        now = self._clock.monotonic()
        late = now - self._patience
        for name, count in points.items():
            if count:
                self._first_points.setdefault(name, now)
        self._came.update(key for key, count in seen.items() if count)
        unmatched = [name for name in points if name not in self._first_points and self._since <= late]
        unseen = [key for key in seen.keys() - self._came if self._first_points.get(key[0], now) <= late]
        fresh = [name for name in unmatched if (name, "") not in self._warned]
        fresh_labels = sorted(key for key in unseen if key not in self._warned)
        self._warned.update((name, "") for name in fresh)
        self._warned.update(fresh_labels)
        return fresh, fresh_labels


def _content_of(path: Path | None) -> bytes:
    with suppress(OSError):
        return b"" if path is None else path.read_bytes()
    return b""
