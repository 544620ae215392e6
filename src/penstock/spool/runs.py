"""Runs: leases in a row that one frame or one journal record can stand for."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

from penstock.spool.lease import Lease

_LARGEST_HOLE = 64  # acked blocks inside a run that is spilled: holes are cheaper than another frame, up to a point
_LONGEST_RUN = 30 * 86400.0  # seconds from its first block to its last; a frame counts their milliseconds in 32 bits
_sequence_of = itemgetter(0)
_attempts_of = itemgetter(1)
_time_of = itemgetter(3)


def to_spill(leases: list[Lease]) -> Iterator[list[Lease]]:
    """Cut leases in order of sequence where holes cannot fill the gap, and where somebody has set the clock."""
    start_time = leases[0].enqueued_at
    is_gapless = leases[-1].sequence - leases[0].sequence == len(leases) - 1
    if (
        is_gapless
        and max(map(_time_of, leases)) - start_time < _LONGEST_RUN
        and min(map(_time_of, leases)) >= start_time
    ):
        yield leases
        return
    start = 0
    for index, (lease, following) in enumerate(pairwise(leases), 1):
        since_first = following.enqueued_at - leases[start].enqueued_at
        if following.sequence - lease.sequence > _LARGEST_HOLE or not 0 <= since_first < _LONGEST_RUN:
            yield leases[start:index]
            start = index
    yield leases[start:]


def by_attempts(leases: list[Lease]) -> Iterator[tuple[int, int, int]]:
    """(first, count, attempts) of neighbours that were handed out equally often."""
    first, count = leases[0].sequence, len(leases)
    if leases[-1].sequence - first == count - 1 and max(map(_attempts_of, leases)) == 1:
        yield first, count, 1
        return
    run: list[Lease] = []
    for lease in leases:
        if run and (lease.sequence != run[-1].sequence + 1 or lease.attempts != run[0].attempts):
            yield run[0].sequence, len(run), run[0].attempts
            run = []
        run.append(lease)
    yield run[0].sequence, len(run), run[0].attempts


def with_bytes(leases: Sequence[Lease]) -> Iterator[tuple[int, int, int]]:
    """(first, count, bytes) of neighbours."""
    sequences = list(map(_sequence_of, leases))
    first, count = sequences[0], len(sequences)
    if count == 1 or sequences == list(range(first, first + count)):
        yield first, count, sum(len(lease.data) for lease in leases)
        return
    run: list[Lease] = []
    for lease in sorted(leases):
        if run and lease.sequence != run[-1].sequence + 1:
            yield run[0].sequence, len(run), sum(len(one.data) for one in run)
            run = []
        run.append(lease)
    yield run[0].sequence, len(run), sum(len(one.data) for one in run)
