"""Runs: leases with consecutive sequences, which one frame or one journal record can hold."""

from collections.abc import Iterator
from itertools import pairwise

from penstock.spool.lease import Lease

_LARGEST_HOLE = 64  # acked blocks inside a run that is spilled: holes are cheaper than another frame, up to a point
_LONGEST_RUN = 30 * 86400.0  # seconds from its first block to its last; a frame counts their milliseconds in 32 bits


def split_leases_for_spill(leases: list[Lease]) -> Iterator[list[Lease]]:
    """Split leases in order of sequence where a gap is too large for holes, and where the clock was set."""
    start = 0
    for index, (lease, following) in enumerate(pairwise(leases), 1):
        since_first = following.enqueued_at - leases[start].enqueued_at
        if following.sequence - lease.sequence > _LARGEST_HOLE or not 0 <= since_first < _LONGEST_RUN:
            yield leases[start:index]
            start = index
    yield leases[start:]


def group_leases_by_attempts(leases: list[Lease]) -> list[tuple[int, int, int]]:
    """(first, count, attempts) of neighbours that were handed out equally often."""
    runs: list[tuple[int, int, int]] = []
    first, count, attempts = leases[0].sequence, 0, leases[0].attempts
    for lease in leases:
        if lease.sequence != first + count or lease.attempts != attempts:
            runs.append((first, count, attempts))
            first, count, attempts = lease.sequence, 0, lease.attempts
        count += 1
    return [*runs, (first, count, attempts)]


def group_leases_with_bytes(leases: list[Lease]) -> list[tuple[int, int, int]]:
    """(first, count, bytes) of neighbours, whatever order they come in."""
    runs: list[tuple[int, int, int]] = []
    leases = sorted(leases)
    first, count, length = leases[0].sequence, 0, 0
    for sequence, _, data, _ in leases:
        if sequence != first + count:
            runs.append((first, count, length))
            first, count, length = sequence, 0, 0
        count += 1
        length += len(data)
    return [*runs, (first, count, length)]
