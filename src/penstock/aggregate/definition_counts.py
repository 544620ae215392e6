"""What L1 counts of each definition: whether it fits the points that come."""

import threading
from collections.abc import Iterator

from penstock.model.definition import Definition, Definitions
from penstock.telemetry import Sample


class DefinitionCounts:
    """Rows of points that each definition took, and whether the labels of its entity came.

    Threads: every method may be called from any thread.
    """

    def __init__(self, definitions: Definitions) -> None:
        # _lock guards what follows.
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        self._definitions: dict[str, Definition] = {}
        self.redefine(definitions)

    def redefine(self, definitions: Definitions) -> None:
        """Count for these from now on, from 0."""
        with self._lock:
            self._definitions = {metric.name: metric for metric in definitions.metrics}
            self._taken = dict.fromkeys(self._definitions, 0)

    def add(self, definition: Definition, rows: int) -> None:
        with self._lock:
            if self._definitions.get(definition.name) is definition:  # else a reload replaced it
                self._taken[definition.name] += rows

    def samples(self) -> Iterator[Sample]:
        with self._lock:
            found = [(definition, self._taken[name]) for name, definition in self._definitions.items()]
        for definition, rows in found:
            yield Sample("penstock_l1_definition_points_total", rows, (definition.name,))
            for label, is_seen in definition.seen_labels.items():
                yield Sample("penstock_l1_definition_label_seen", is_seen, (definition.name, label))
