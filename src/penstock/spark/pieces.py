"""What each task reads of a batch: a stretch of time, or where minutes are too few for that, a share of the series.

    stretches    a b c │ d e f      each segment is read once; only the minute at the cut is merged by two tasks
    shares       a b c   a b c      both tasks read all of it, one keeps these series, the other those

A row that two tasks have is two rows to Spark, which costs it far more than reading a segment costs a task. So when
all of a batch lies in a few minutes, as it does while the job keeps up, each task takes a share of the series.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import InputPartition

from penstock.model.segment import Segment, Span

MOST_SHARES = 4  # every task of a stretch reads all of it: beyond that, reading would cost more than it saves
CUT = 4  # minutes that there must be for each cut between stretches: at most a quarter of the rows is then there twice


class Piece(InputPartition):
    """The segments that one task reads, and which share of their series it keeps."""

    def __init__(self, names: list[str], share: int = 0, shares: int = 1) -> None:
        self.names = names
        self.share = share
        self.shares = shares

    def of(self, partials: pa.Table) -> pa.Table:
        """Those of these rows, their texts encoded, that belong to the piece."""
        if self.shares == 1 or not partials.num_rows:
            return partials
        owners = (_numbers(partials["metric"]) + _numbers(partials["entity"])) % self.shares
        return partials.filter(pa.array(owners == self.share))


def _numbers(column: Any) -> NDArray[np.uint8]:
    """A number for each row that depends on its text alone, in every process: the sum of its bytes."""
    return np.concatenate([_sums(part.dictionary)[part.indices.to_numpy()] for part in column.chunks])


def _sums(texts: pa.StringArray) -> NDArray[np.uint8]:
    """Texts are many where series are, so all of them at once: one by one they took as long as reading them."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    found = np.zeros(len(texts), np.uint8)
    held = np.flatnonzero(ends[1:] > ends[:-1])
    if len(held):
        found[held] = np.add.reduceat(np.frombuffer(data, np.uint8)[: ends[-1]], ends[held], dtype=np.uint8)
    return found


def pieces(segments: Mapping[Segment, Span | None], tasks: int) -> list[Piece]:
    """As much for each task, and what is side by side in time for the same one: there it merges."""
    tasks = min(len(segments), tasks)
    if not tasks:
        return []
    spans = list(segments.values())
    shares = min(MOST_SHARES, -(-tasks // (1 + _minutes(spans) // CUT)))
    names, stretches = _in_time(list(segments)), tasks // shares
    cuts = [len(names) * stretch // stretches for stretch in range(stretches + 1)]
    return [Piece(names[start:end], share, shares) for start, end in pairwise(cuts) for share in range(shares)]


def _minutes(spans: list[Span | None]) -> int:
    """How many minutes most rows of a batch are in; many if that is not known."""
    known = [span for span in spans if span]
    if len(known) < len(spans):
        return 1 << 32
    return 1 + (max(last for _, last in known) - min(first for first, _ in known)) // 60_000_000


def _in_time(segments: list[Segment]) -> list[str]:
    """Names in the order of time, as far as sequences tell: those of several writers side by side."""
    position, held = Counter[str](), Counter(segment.writer for segment in segments)
    places = {}
    for segment in sorted(segments):
        places[segment] = (position[segment.writer] / held[segment.writer], segment)
        position[segment.writer] += 1
    return [segment.name for segment in sorted(segments, key=places.__getitem__)]
