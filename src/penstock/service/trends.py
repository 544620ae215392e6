"""What our own metrics say about the last minutes: notes for an operator, before an alarm rings."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from penstock.clock import Clock
from penstock.telemetry import Value

log = logging.getLogger(__name__)

_EVERY = 10.0  # seconds between two looks
_WINDOW = 600.0  # seconds that are looked back on
_SOON = 4 * 3600.0  # seconds: a disk that is full by then needs an operator now
_LAG = 60.0  # seconds that tables may be behind

_LAGS = "penstock_spark_lag_seconds"
_FREE = "penstock_queue_disk_available_bytes"
_GROWING = {
    "penstock_queue_dead_letter_total": "dead letters of queue {queue} grow: {more:.0f} more in {minutes:.0f} min; "
    "penstock queue inspect says why",
    "penstock_queue_dead_letter_dropped_total": "dead letters of queue {queue} are lost, there is no room for them: "
    "{more:.0f} in {minutes:.0f} min",
    "penstock_export_data_loss_total": "queue {queue} has lost {more:.0f} batches in {minutes:.0f} min",
    "penstock_spark_restarts_total": "the Spark job failed and was started again {more:.0f} times in {minutes:.0f} min",
    "penstock_tables_maintenance_failures_total": "maintenance of the tables fails at {step}: {more:.0f} times in "
    "{minutes:.0f} min",
}
_WATCHED = {_LAGS, _FREE, *_GROWING}

Key = tuple[str, tuple[tuple[str, str], ...]]  # a metric's name and labels


class QueueTrends:
    """Looks at the metrics every few seconds, and says what grows or runs out.

    Threads: one of its own from `start` to `close`; `notes` may be called from any.
    """

    def __init__(self, values: Callable[[], Iterable[Value]], clock: Clock) -> None:
        self._values = values
        self._clock = clock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-trends", daemon=True)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._seen: deque[tuple[float, dict[Key, float]]] = deque()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                log.exception("The metrics could not be looked at.")
            if self._closing.wait(_EVERY):
                return

    def look(self) -> None:
        """Remember what the metrics say now."""
        now = self._clock.monotonic()
        found = {(one.name, tuple(one.labels.items())): one.value for one in self._values() if one.name in _WATCHED}
        with self._lock:
            self._seen.append((now, found))
            while self._seen[0][0] < now - _WINDOW:
                self._seen.popleft()

    def notes(self) -> list[str]:
        """What needs an operator, as of the last look: no process is asked, since one that hangs would hold us up."""
        with self._lock:
            if not self._seen:
                return []
            (then, before), (now, after) = self._seen[0], self._seen[-1]
        return list(_notes(before, after, now - then))


def _notes(before: dict[Key, float], after: dict[Key, float], seconds: float) -> Iterator[str]:
    for (name, labels), value in after.items():
        if name == _LAGS and value > _LAG:
            yield f"Spark is {value / 60:.0f} min behind: the oldest segment that is not in the tables is so old"
        if (name, labels) not in before:
            continue
        more = value - before[name, labels]
        if name in _GROWING and more > 0:
            places = {"queue": "unknown", "step": "unknown", **dict(labels)}
            yield _GROWING[name].format(more=more, minutes=max(1.0, seconds / 60), **places)
        if name == _FREE and more < 0 and value * seconds < -more * _SOON:
            left = value * seconds / -more
            yield f"the disk of queue {dict(labels).get('queue', '')} is full in about {left / 60:.0f} min"
