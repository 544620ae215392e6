"""The meta file: where reading and writing stand, so that opening costs the same whatever lies in the chunks.

`fastqueue.meta` is JSON, replaced by an atomic rename. Version 1 and 2 are the seed's:

    {"name": "fastqueue", "reader_offset": 8, "writer_offset": 96, "version": 2, "entry_count": 2, "total_bytes": 60}

(version 1 has no counts). Version 3 has the same keys and adds

    reader_offset      the frame with the oldest block that is not acked begins here
    writer_offset      the log ended here; what lies behind it is counted at open
    entry_count        blocks in the log that are not acked, total_bytes their bytes
    log_end            the sequence after the last block in the log
    next_sequence      no block has this sequence or a higher one yet
    clean              closed properly: next_sequence is exact
    low, acked         every sequence below `low` is acked, and so are the ranges [first, end) in `acked`
    attempts           [first, end, n]: those blocks have been handed out n times
    seed_end           chunks below this offset are in the seed's format
    journal, journal_offset   acks that came later are in this journal behind this offset
    crc                CRC32C of the JSON text without this key
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import google_crc32c

from penstock.errors import QueueError
from penstock.spool.files import SpoolFiles, read_spool_file, write_all

META_NAME = "fastqueue.meta"
VERSION = 3


class DamagedSpoolMeta(Exception):
    """A meta file that cannot be believed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolMeta:
    """What the meta file says. `entry_count` is None where version 1 does not know it."""

    version: int = VERSION
    reader_offset: int = 0
    writer_offset: int = 0
    entry_count: int | None = 0
    total_bytes: int = 0
    log_end: int = 0
    next_sequence: int = 0
    clean: bool = True
    low: int = 0
    acked: list[tuple[int, int]] = field(default_factory=list)
    attempts: list[tuple[int, int, int]] = field(default_factory=list)
    seed_end: int = 0
    journal: int = 0
    journal_offset: int = 0


def load_spool_meta(files: SpoolFiles, folder: str) -> SpoolMeta | None:
    """The folder's meta, None if there is none; DamagedSpoolMeta if it is not whole, QueueError if it is newer."""
    try:
        text = read_spool_file(files, f"{folder}/{META_NAME}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedSpoolMeta(str(error)) from error
    return _parse(text)


def store_spool_meta(files: SpoolFiles, folder: str, meta: SpoolMeta) -> None:
    """Replace the folder's meta; after a crash there is the old one or the new one, on the disk, never half of one."""
    fields = {name: getattr(meta, name) for name in SpoolMeta.__slots__}
    text = json.dumps({"name": "fastqueue", **fields}).encode()
    text = text[:-1] + b', "crc": %d}' % google_crc32c.value(text)
    temporary = f"{folder}/{META_NAME}.tmp"
    handle = files.open(temporary, create=True)
    try:
        files.truncate(handle, 0)
        write_all(files, handle, [text], 0)
        files.sync(handle)
    except OSError:
        with suppress(OSError):  # a full disk needs every byte back
            files.truncate(handle, 0)
        raise
    finally:
        files.close(handle)
    files.rename(temporary, f"{folder}/{META_NAME}")
    files.sync_folder(folder)


def _parse(text: bytes) -> SpoolMeta:
    try:
        fields = json.loads(text)
        version = int(fields["version"])
        if version <= 2 and "crc" not in fields:  # with one, it is a newer meta whose version has been damaged
            return SpoolMeta(
                version=version,
                reader_offset=_offset(fields["reader_offset"]),
                writer_offset=_offset(fields["writer_offset"]),
                entry_count=_offset(fields["entry_count"]) if version == 2 else None,
                total_bytes=_offset(fields["total_bytes"]) if version == 2 else 0,
                clean=False,
            )
        body, _, _ = text.rpartition(b', "crc": ')
        if google_crc32c.value(body + b"}") != fields.pop("crc"):
            raise DamagedSpoolMeta("the checksum does not match")
        if version > VERSION:
            raise QueueError(f"a newer Penstock wrote this queue (meta version {version}, ours is {VERSION}): use that")
        fields.pop("name")
        fields["acked"] = [(first, end) for first, end in fields["acked"]]
        fields["attempts"] = [(first, end, count) for first, end, count in fields["attempts"]]
        return SpoolMeta(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedSpoolMeta(f"not a meta file: {error!r}") from error


def _offset(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"not a size or an offset: {value!r}")
    return value


def lease_attempt_ranges(attempts: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(sequence, attempts) pairs as [first, end, attempts], neighbours of one count together."""
    ranges: list[tuple[int, int, int]] = []
    for sequence, count in sorted(attempts):
        if ranges and ranges[-1][1] == sequence and ranges[-1][2] == count:
            ranges[-1] = (ranges[-1][0], sequence + 1, count)
        else:
            ranges.append((sequence, sequence + 1, count))
    return ranges
