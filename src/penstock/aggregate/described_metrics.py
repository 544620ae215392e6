"""Units and descriptions of metrics on their way to the tables: told with the points, when they are new.

What was told may be lost on the way (a queue that drops its oldest, a damaged segment), and tables may begin anew. So
everything is told again once in a while.
"""

import threading
from collections.abc import Iterable

from penstock.clock import Clock
from penstock.model.definition import Definition, Definitions
from penstock.model.metric_description import Descriptions, MetricDescription, joined

AGAIN = 3600.0  # seconds between two times that all is told
_MOST = 100_000  # metrics


class DescribedMetrics:
    """What is known of metrics, and what of it was not told yet. Only metrics with points are told of.

    Threads: every method may be called from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._known: dict[str, MetricDescription] = {}
        self._untold: set[str] = set()
        self._with_points: set[str] = set()
        self._told_at = clock.monotonic()

    def learn(self, metrics: Descriptions) -> None:
        with self._lock:
            if len(self._known) + len(metrics) > _MOST:
                self._known, self._with_points = {}, set()
            self._known = joined(self._known, metrics)
            self._untold.update(metrics)

    def has_points(self, metric: str) -> None:
        if metric not in self._with_points:
            with self._lock:
                self._with_points.add(metric)

    def tell_again(self, metrics: Iterable[str] | None = None) -> None:
        """Let these, or all, be told once more."""
        with self._lock:
            self._untold.update(self._known if metrics is None else self._known.keys() & set(metrics))

    def news(self, definitions: Definitions) -> dict[str, MetricDescription]:
        """What is to be told with the next points, of metrics as the tables know them; it counts as told."""
        if not self._untold and self._clock.monotonic() - self._told_at < AGAIN:
            return {}
        with self._lock:
            if self._clock.monotonic() - self._told_at >= AGAIN:
                self._untold.update(self._known)
                self._told_at = self._clock.monotonic()
            told = {metric for metric in self._untold & self._with_points if metric in self._known}
            self._untold -= told
            found = {metric: self._known[metric] for metric in told}
        made = {
            definition.name: _of_definition(definition, one)
            for source, one in found.items()
            for definition in definitions.of(source)
        }
        return found | made


def _of_definition(definition: Definition, source: MetricDescription) -> MetricDescription:
    """What holds of a metric that is made of another: a number of points, or a share of them, has no such unit."""
    spec = definition.function.spec
    counts = spec.is_per_minute or (spec.final is not None and spec.final.state == "count")
    keeps_unit = not (counts or spec.is_score or spec.counts_distinct)
    return MetricDescription(source.type, source.unit if keeps_unit else "", source.description)
