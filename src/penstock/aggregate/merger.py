"""A handler of L1: the points of a drained batch become partials, with one group-by for each metric."""

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.aggregate.pending import Held, Pending, Round
from penstock.model.definition import FEW, Definition, Definitions
from penstock.model.point import Chunk, Kind

log = logging.getLogger(__name__)


class Merger:
    """Merges what comes of one metric, or of the many that have no handler of their own.

    The queue never runs it on two threads at once, so it needs no lock.
    """

    def __init__(self, name: str, definitions: Definitions, pending: Pending) -> None:
        self.name = name
        self.points = 0
        self.not_numbers = 0
        self.failed_chunks = 0
        self._all_definitions = definitions
        self._pending = pending
        self._made_of: tuple[type[Chunk], Definitions, tuple[Definition, ...]] | None = None

    def redefine(self, definitions: Definitions) -> None:
        """Make what comes next by these. May be called from any thread: a batch looks at the definitions once."""
        self._all_definitions = definitions

    def consume(self, batch: list[Held]) -> None:
        groups: dict[tuple[Round | None, type[Chunk]], list[Held]] = {}
        for held in batch:
            groups.setdefault((held.round, type(held.chunk)), []).append(held)
        for (round_, kind), group in groups.items():
            try:
                partials = self._partials(kind, group)
            except Exception as error:  # noqa: BLE001 - whatever a definition makes of a chunk, the others go on
                self._apart(group, error)
                continue
            if partials is None:
                self._pending.gathered(group, round_)
            else:
                self._pending.merged(group, round_, partials)

    def _apart(self, group: list[Held], error: Exception) -> None:
        """One of the chunks cannot be merged: find out which, so that only its own sender suffers."""
        if len(group) > 1:
            for held in group:
                self.consume([held])
            return
        self.failed_chunks += 1
        log.error("A chunk cannot be merged. metric=%s", group[0].chunk.metric, exc_info=error)
        self._pending.failed(group[0], error)

    def _partials(self, kind: type[Chunk], group: Sequence[Held]) -> list[pa.Table] | None:
        """What the points become; None if they are plain and can wait for those of other metrics.

        Those with codes in place of texts always can: merging all of them at once costs next to nothing. So can a few
        of the others.
        """
        defined = self._all_definitions
        if defined.is_plain(kind.metric) and all(_is_coded(held.chunk) for held in group):
            self.points += sum(len(held.chunk) for held in group)
            return None
        points = pa.concat_tables([held.chunk.points for held in group])
        numbers = self._numbers(points)
        if numbers is points and points.num_rows <= FEW and self._is_plain(kind, defined):
            self.points += points.num_rows
            return None
        definitions = self._definitions(kind, defined) if numbers.num_rows else ()
        made = [definition.partials(numbers) for definition in definitions]
        self.points += points.num_rows
        self.not_numbers += points.num_rows - numbers.num_rows
        return [partials for partials in made if partials.num_rows]

    @staticmethod
    def _is_plain(kind: type[Chunk], defined: Definitions) -> bool:
        return kind.kind is not Kind.DISTRIBUTION and defined.is_plain(kind.metric)

    def _definitions(self, kind: type[Chunk], defined: Definitions) -> tuple[Definition, ...]:
        if self._made_of is None or self._made_of[0] is not kind or self._made_of[1] is not defined:
            self._made_of = (kind, defined, defined.of(kind.metric, kind.kind))
        return self._made_of[2]

    @staticmethod
    def _numbers(points: pa.Table) -> pa.Table:
        """Without NaN and infinities: one of them would make the sum of its series useless for good."""
        finite = pc.is_finite(points["value"])
        return points if pc.all(finite).as_py() else points.filter(finite)


def _is_coded(chunk: Chunk) -> bool:
    """Whether it has codes in place of texts, and only numbers."""
    return chunk.columns is not None and bool(np.isfinite(chunk.columns.values).all())
