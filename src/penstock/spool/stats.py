"""A queue's state as a frozen snapshot, and as samples for `/metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.spool.backlog import Backlog
from penstock.spool.capacity_policy import CapacityPolicy
from penstock.telemetry import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """One look at a queue. Counters run since it was opened; those of the disk are 0 for one in memory."""

    size: int  # blocks that are not acked yet: waiting, on lease, nacked
    bytes: int
    max_size: int
    max_bytes: int
    leased: int
    delayed: int  # nacked, waiting for their turn
    inmemory_blocks: int
    only_in_memory: int = 0  # those and what is on lease from there: gone if the process died now
    disk_bytes: int = 0
    disk_available_bytes: int = 0
    chunks: int = 0
    pushed: int
    acked: int
    nacked: int
    redelivered: int
    dead_lettered: int
    dead_letters_dropped: int  # there was no room for more of them
    dropped: dict[str, int]  # by reason: oldest, newest, timeout, disk_full, disk_failed
    disk_full: int = 0
    disk_failures: int = 0
    meta_syncs: int = 0
    chunk_rotations: int = 0
    inmemory_flushes: int = 0
    damaged_regions: int = 0
    damaged_bytes: int = 0
    lost_blocks: int = 0  # to damage
    foreign_files: int = 0  # in the folder, left alone
    unclean_start: bool = False  # the queue was not closed properly the last time
    oldest_age: float  # seconds since the oldest ready block was pushed

    def samples(self) -> Iterator[Sample]:
        """The values under the names that `penstock.telemetry` declares."""
        yield Sample("penstock_queue_size", self.size)
        yield Sample("penstock_queue_bytes", self.bytes)
        yield Sample("penstock_queue_max_size", self.max_size)
        yield Sample("penstock_queue_max_bytes", self.max_bytes)
        yield Sample("penstock_queue_utilization_ratio", max(self.size / self.max_size, self.bytes / self.max_bytes))
        yield Sample("penstock_queue_disk_available_bytes", self.disk_available_bytes)
        yield Sample("penstock_queue_leased", self.leased)
        yield Sample("penstock_queue_oldest_age_seconds", self.oldest_age)
        yield Sample("penstock_queue_push_total", self.pushed)
        yield Sample("penstock_queue_ack_total", self.acked)
        yield Sample("penstock_queue_redelivered_total", self.redelivered)
        yield Sample("penstock_queue_dead_letter_total", self.dead_lettered)
        yield Sample("penstock_queue_dead_letter_dropped_total", self.dead_letters_dropped)
        for reason, count in self.dropped.items():
            yield Sample("penstock_queue_dropped_total", count, (reason,))
        yield Sample("penstock_queue_disk_full_total", self.disk_full)
        yield Sample("penstock_fastqueue_inmemory_blocks", self.inmemory_blocks)
        yield Sample("penstock_fastqueue_disk_bytes", self.disk_bytes)
        yield Sample("penstock_fastqueue_meta_sync_total", self.meta_syncs)
        yield Sample("penstock_fastqueue_chunk_rotations", self.chunk_rotations)
        yield Sample("penstock_fastqueue_chunk_rotations_total", self.chunk_rotations)
        yield Sample("penstock_fastqueue_inmemory_flushes", self.inmemory_flushes)
        yield Sample("penstock_fastqueue_inmemory_flushes_total", self.inmemory_flushes)
        yield Sample("penstock_fastqueue_damaged_regions_total", self.damaged_regions)
        yield Sample("penstock_fastqueue_damaged_bytes_total", self.damaged_bytes)
        yield Sample("penstock_fastqueue_lost_blocks_total", self.lost_blocks)


@dataclass(kw_only=True, slots=True)
class SpoolCounters:
    """What has gone through a queue since it was opened."""

    pushed: int = 0
    acked: int = 0
    nacked: int = 0
    redelivered: int = 0


def spool_snapshot(
    backlog: Backlog,
    capacity: CapacityPolicy,
    counters: SpoolCounters,
    oldest_age: float,
    *,
    disk_available_bytes: int,
    sync_failures: int,
    dead_lettered: int,
    dead_letters_dropped: int,
) -> QueueStats:
    """The state of a queue. The caller holds its lock."""
    store = backlog.store
    return QueueStats(
        size=backlog.count,
        bytes=max(0, backlog.bytes),
        max_size=capacity.max_size,
        max_bytes=capacity.max_bytes,
        leased=len(backlog.leased),
        delayed=len(backlog.returned.held),
        inmemory_blocks=len(backlog.memory),
        only_in_memory=len(backlog.memory) + len(backlog.taken_from_memory()),
        disk_bytes=store.chunks.size_bytes,
        disk_available_bytes=disk_available_bytes,
        chunks=len(store.chunks.chunks),
        pushed=counters.pushed,
        acked=counters.acked,
        nacked=counters.nacked,
        redelivered=counters.redelivered,
        dead_lettered=dead_lettered,
        dead_letters_dropped=dead_letters_dropped,
        dropped=dict(capacity.dropped),
        disk_full=capacity.disk_full,
        disk_failures=capacity.disk_failures + sync_failures,
        meta_syncs=store.meta_syncs,
        chunk_rotations=store.chunks.rotations,
        inmemory_flushes=backlog.flushes,
        damaged_regions=store.quarantine.regions,
        damaged_bytes=store.quarantine.bytes,
        lost_blocks=store.quarantine.lost_blocks,
        foreign_files=store.quarantine.foreign_files,
        unclean_start=store.unclean,
        oldest_age=oldest_age,
    )
