"""What each task reads of a batch: a stretch of time, or where minutes are too few for that, a share of the series.

    stretches    a b c │ d e f      each segment is read once; only the minute at the cut is merged by two tasks
    shares       a b c   a b c      both tasks read all of it, one keeps these series, the other those

A row that two tasks have is two rows to Spark, which costs it far more than reading a segment costs a task. So when
all of a batch lies in a few minutes, as it does while the job keeps up, each task takes a share of the series; by the
entity, if most segments keep such shares apart, so that there is nothing to pick.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from penstock.model.segment import Outline, Segment, Span
from penstock.model.share import ALL, BY_ENTITY, BY_SERIES, Share

MOST_SHARES = 4  # every task of a stretch reads all of it: beyond that, reading would cost more than it saves
CUT = 4  # minutes that there must be for each cut between stretches: at most a quarter of the rows is then there twice


class SparkReadPiece(InputPartition):
    """The segments that one task reads, which share of their series it keeps, and what its batch covers."""

    def __init__(self, names: list[str], share: Share = ALL, coverage: str = "") -> None:
        self.names = names
        self.share = share
        self.coverage = coverage


def spark_read_pieces(segments: Mapping[Segment, Outline], tasks: int) -> list[SparkReadPiece]:
    """As much for each task, and what is side by side in time for the same one: there it merges."""
    tasks = min(len(segments), tasks)
    if not tasks:
        return []
    spans = [outline.span for outline in segments.values()]
    shares = min(MOST_SHARES, -(-tasks // (1 + _minutes(spans) // CUT)))
    by = BY_ENTITY if 2 * sum(outline.in_shares for outline in segments.values()) >= len(segments) else BY_SERIES
    names, stretches = _in_time(list(segments)), tasks // shares
    cuts = [len(names) * stretch // stretches for stretch in range(stretches + 1)]
    return [
        SparkReadPiece(names[start:end], Share(number, shares, by))
        for start, end in pairwise(cuts)
        for number in range(shares)
    ]


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
