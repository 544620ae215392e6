"""Segments: sealed files of partials, the hand-over from the edge to Spark.

    <writer>-<first>-<last>.arrow     first and last: the queue sequences that it covers, 16 hex digits each

An Arrow IPC file of one or more batches in the schema `penstock.model.partial.PARTIALS`, lz4-compressed, its texts
dictionary-encoded (a group-by over codes is three times as fast). Its metadata holds the number of rows, the time span
of most of them, and the queue that they came from. Where many rows of many entities lie within a few minutes, its
batches are shares of the series (`penstock.model.share_batches`), and its metadata says where their texts end.

A segment is written under a name that starts with a dot, synced, then linked to its own name. A listing of the folder
shows it whole or not at all, and it never changes. The segments of one writer follow on each other without overlap and
without a gap: dropped sequences belong to the segment after them. So the last sequence is an offset, and a missing
segment leaves a hole. A segment that cannot be read is moved to `quarantine/` in the same folder.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.model.partial import ENCODED, PARTIALS, encoded_partials
from penstock.model.share import ALL, Share
from penstock.model.share_batches import partials_in_shares, partials_of_share

FORMAT = b"1"
QUARANTINE = "quarantine"
_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.]*)-([0-9a-f]{16})-([0-9a-f]{16})\.arrow")
_WRITER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", unify_dictionaries=True)
_ON_ONE_CORE = pa.ipc.IpcReadOptions(use_threads=False)  # Spark has a task for each; and threads take longer in all
_ROWS = b"penstock.rows"
_SPAN = b"penstock.span"
_ORIGIN = b"penstock.origin"
_REQUESTS = b"penstock.requests"
_SHARES = b"penstock.shares"
_FEW_MINUTES = 4 * 60_000_000  # batches of longer segments are cut by time, not into shares
_SAMPLE = 1000  # rows whose buckets say where most of them are

Origin = tuple[str, int]  # the id of the queue that the blocks came from, and the sequence of the first of them
Span = tuple[int, int]  # microseconds since the epoch: the buckets of the first and the last row, but for outliers


@dataclass(frozen=True, slots=True)
class Outline:
    """What a segment's header says: its rows, when most of them are, whether shares are kept apart, and the queue."""

    span: Span | None = None
    in_shares: bool = False
    rows: int = 0
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One sealed file, known by its name alone."""

    writer: str
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.first:016x}-{self.last:016x}.arrow"


def parse_segment_name(name: str) -> Segment | None:
    """The segment of that name; None for anything else that may lie in the folder."""
    match = _NAME.fullmatch(name)
    return Segment(match[1], int(match[2], 16), int(match[3], 16)) if match else None


def sealed(folder: Path) -> list[Segment]:
    """The segments in `folder`, those of one writer in the order of their sequences."""
    return sorted(segment for entry in os.scandir(folder) if (segment := parse_segment_name(entry.name)))


def check_segment_writer(name: str) -> str:
    """`name` if it can stand in a segment's name."""
    if not _WRITER.fullmatch(name):
        raise ConfigError(f"must be letters, digits, '_' and '.', got {name!r}", field="segments.writer")
    return name


def encode_partials_block(partials: pa.Table, requests: bytes = b"") -> bytes:
    """Partials, their texts encoded or not, as one block for the durable queue; with the digests of their requests."""
    sink = pa.BufferOutputStream()
    schema = ENCODED.with_metadata({_REQUESTS: requests}) if requests else ENCODED
    with pa.ipc.new_stream(sink, schema) as writer:  # not compressed: the queue does that, for many blocks at once
        writer.write_table(encoded_partials(partials.combine_chunks()))  # a stream has one dictionary for each column
    return bytes(sink.getvalue())


def decode_partials_block(block: bytes) -> pa.Table:
    """What `encode_partials_block` was given, in exactly the schema `PARTIALS`."""
    return decode_partials_block_encoded(block).cast(PARTIALS)


def decode_partials_block_encoded(block: bytes) -> pa.Table:
    """The partials of a block, their texts encoded; a block whose texts were written out is read as well."""
    return encoded_partials(pa.ipc.open_stream(block).read_all())


def requests_of_partials_block(block: bytes) -> bytes:
    """The digests of the requests of a block."""
    return bytes((pa.ipc.open_stream(block).schema.metadata or {}).get(_REQUESTS, b""))


def requests_of_segment(path: Path) -> bytes:
    """The digests of the requests of a segment."""
    with pa.memory_map(str(path)) as file:
        return bytes((pa.ipc.open_file(file).schema.metadata or {}).get(_REQUESTS, b""))


def seal(
    folder: Path, segment: Segment, partials: pa.Table, origin: Origin | None = None, requests: bytes = b""
) -> Path:
    """Write `partials` as `segment`; when this returns, the segment survives a power cut.

    FileExistsError if there is one of that name: it never changes.
    """
    path, scratch = folder / segment.name, folder / f".{segment.name}"
    partials = encoded_partials(partials.combine_chunks())
    metadata = {b"penstock.segment": FORMAT, _ROWS: str(partials.num_rows).encode(), _SPAN: _span_of(partials)}
    batches = [partials]
    if shared := _shared(partials, metadata[_SPAN]):
        batches, ends = shared
        metadata[_SHARES] = " ".join(map(str, ends)).encode()
    if origin:
        metadata[_ORIGIN] = f"{origin[1]} {origin[0]}".encode()
    if requests:
        metadata[_REQUESTS] = requests
    with open(scratch, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        with pa.ipc.new_file(file, partials.schema.with_metadata(metadata), options=_OPTIONS) as writer:
            for batch in batches:
                writer.write(batch)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(scratch, path)  # unlike a rename, it does not replace
    finally:
        scratch.unlink()
    sync_segment_folder(folder)
    return path


def _shared(partials: pa.Table, span: bytes) -> tuple[list[pa.RecordBatch], list[int]] | None:
    """Its shares, if tasks are likely to want them and it pays."""
    first, last = map(int, span.split() or (0, _FEW_MINUTES))
    return partials_in_shares(partials) if last - first < _FEW_MINUTES else None


def _span_of(partials: pa.Table) -> bytes:
    """Without the tenth of the rows at either end: a point that comes a day late says nothing about the others."""
    buckets = partials["bucket"].cast(pa.int64()).to_numpy()[:: 1 + partials.num_rows // _SAMPLE]
    if not len(buckets):
        return b""
    ordered = sorted(buckets.tolist())
    return f"{ordered[len(ordered) // 10]} {ordered[-1 - len(ordered) // 10]}".encode()


def sync_segment_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_segment(path: Path) -> pa.Table:
    """The partials of a segment, in exactly the schema `PARTIALS`."""
    return read_segment_encoded(path).cast(PARTIALS)


def read_segment_encoded(path: Path, share: Share = ALL) -> pa.Table:
    """The rows of a share of a segment, their texts encoded; ValueError if the segment is damaged.

    All of it is read, whatever the share is. So the readers of all shares see damage, or none does.
    """
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file, options=_ON_ONE_CORE)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        schema = reader.schema
    if schema.names != PARTIALS.names:
        raise ValueError(f"{path.name} is no segment of this format: columns {schema.names}")
    ends = [int(end) for end in (schema.metadata or {}).get(_SHARES, b"").split()]
    return partials_of_share(batches, ends, share) if ends else share.of(pa.Table.from_batches(batches, schema))


def outline_of_segment(path: Path) -> Outline:
    """What is known of a segment from its header alone."""
    with pa.memory_map(str(path)) as file:
        metadata = pa.ipc.open_file(file).schema.metadata or {}
    span = metadata.get(_SPAN, b"").split()
    first, _, queue = metadata.get(_ORIGIN, b"").decode().partition(" ")
    return Outline(
        span=(int(span[0]), int(span[1])) if span else None,
        in_shares=_SHARES in metadata,
        rows=int(metadata.get(_ROWS, b"0")),
        origin=(queue, int(first)) if queue else None,
    )
