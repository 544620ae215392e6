"""How a task reads its piece of a batch: whole segments, merged in steps before Spark sees their rows.

A segment that cannot be read is moved to `quarantine/` and its batch goes on without it; it still counts.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from penstock.errors import SegmentVanished
from penstock.model.partial import PARTIALS, merged, merged_encoded
from penstock.model.segment import QUARANTINE, read_segment_encoded
from penstock.model.share import Share
from penstock.spark.pieces import SparkReadPiece

log = logging.getLogger(__name__)
STEP_ROWS = 1_000_000  # about 70 MB: what a task merges at a time, so that it works on the same memory all along
MERGE_ROWS = 4_000_000  # about 300 MB: as many as that where few merge, and half of it is what it holds of merged ones

Merge = Callable[[pa.Table], pa.Table]


def read_piece(folder: Path, piece: SparkReadPiece, merge: Merge = merged) -> Iterator[pa.RecordBatch]:
    """The partials of a piece, merged, in batches of exactly the schema that `merge` gives."""
    fresh: list[pa.Table] = []
    held: list[pa.Table] = []  # merged once
    step = STEP_ROWS if merge is merged else MERGE_ROWS
    for name in piece.names:
        table = _read(folder, name, piece.share)
        if table is not None:
            fresh.append(table)
        if _rows(fresh) < min(step, MERGE_ROWS // piece.share.among):  # all that it has read, texts too, is held
            continue
        if merge is not merged:  # what comes out of it cannot go in again
            yield from _batches(merge(pa.concat_tables(fresh)))
            fresh = []
            continue
        held.append(merged_encoded(pa.concat_tables(fresh)))
        fresh = []
        if held[-1].num_rows > step // 2:
            step = MERGE_ROWS  # hardly anything merges in so few rows
        if _rows(held) > MERGE_ROWS // 2 and len(held) > 1:
            held = [merged_encoded(pa.concat_tables(held))]
        if _rows(held) > MERGE_ROWS // 2:  # nor in many: pass it on rather than hold it
            yield from _batches(held.pop().cast(PARTIALS))
    if fresh or held:
        yield from _batches(merge(pa.concat_tables([*held, *fresh])))


def _read(folder: Path, name: str, share: Share) -> pa.Table | None:
    path = folder / name
    try:
        return read_segment_encoded(path, share)
    except FileNotFoundError:
        if (folder / QUARANTINE / name).exists():
            return None
        raise SegmentVanished(
            f"{path} is gone: put it back, or restore it from a copy. On a cluster the folder of the segments must be "
            "mounted under the same path on the driver and on every worker"
        ) from None
    except (ValueError, OSError) as error:  # pyarrow's own errors are of these kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's: says nothing about the segment, and another task may have read it
        aside = folder / QUARANTINE
        aside.mkdir(exist_ok=True, mode=0o700)
        try:
            path.rename(aside / name)
        except FileNotFoundError:
            pass  # another task that reads the same batch was first
        log.error("Segment is damaged and set aside. segment=%s quarantine=%s reason=%s", name, aside, error)
        return None


def _rows(tables: list[pa.Table]) -> int:
    return sum(table.num_rows for table in tables)


def _batches(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    return iter(rows.combine_chunks().to_batches())
