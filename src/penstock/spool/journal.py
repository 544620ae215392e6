"""The journal: acks and leases since the last meta, so that `kill -9` forgets neither.

A file `acks-<generation, 8 hex digits>` of 1 MiB, reserved at once, with 32-byte records, little-endian; zeros follow:

     0  u8   kind: 1 acked, 2 leased, 3 one block acked and another leased (read, not written any more)
     2  u16  leased: how often, this time included (65535 stands for more)
     4  u32  how many blocks; of kind 3: bytes of the one that is acked
     8  u64  sequence of the first; of kind 3: of the one that is acked
    16  u64  acked: their bytes; of kind 3: sequence of the one that is leased
    28  u32  CRC32C of the 28 bytes before

The meta names the generation and the offset from which its reader has to replay. A meta that finds the journal
long enough begins the next generation, if that can be reserved; the one before is deleted when that meta is on the
disk, and all of them when it says that the queue was closed.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import google_crc32c

from penstock.spool.files import SpoolFiles

ACKED, LEASED, EXCHANGED = 1, 2, 3
RECORD = struct.Struct("<BxHIQQ4x")
CRC = struct.Struct("<I")
RECORD_SIZE = RECORD.size + CRC.size
PREFIX = "acks-"
FILE_BYTES = 1 << 20  # 32 768 records replay in some 30 ms
ROTATE_BYTES = FILE_BYTES // 2
_MOST_ATTEMPTS = 0xFFFF
_pack, _pack_crc, _crc_of = RECORD.pack, CRC.pack, google_crc32c.value


class JournalRecord(NamedTuple):
    """What the journal says of some blocks: ACKED or LEASED."""

    kind: int
    attempts: int
    block_count: int
    first: int
    bytes: int


def pack_acked(first: int, count: int, size: int) -> bytes:
    """The record of blocks that are done, `size` bytes together."""
    body = _pack(ACKED, 0, count, first, size)
    return body + _pack_crc(_crc_of(body))


def pack_leased(first: int, count: int, attempts: int) -> bytes:
    """The record of blocks that were handed out, all for the same time."""
    body = _pack(LEASED, attempts if attempts < _MOST_ATTEMPTS else _MOST_ATTEMPTS, count, first, 0)
    return body + _pack_crc(_crc_of(body))


class Journal:
    """Appends to one generation. Not thread-safe: the queue's lock guards it.

    The file is mapped, so that a record costs a copy of 32 bytes and no call: two calls a block were most of the
    price of handing it out and acking it.
    """

    def __init__(self, files: SpoolFiles, folder: str, generation: int) -> None:
        self.generation = generation
        self.offset = 0
        handle = files.open(journal_path(folder, generation), create=True)
        try:
            self._mapped = files.map(handle, FILE_BYTES)
        except OSError:
            with suppress(OSError):  # a full disk needs every byte back
                files.unlink(journal_path(folder, generation))
            raise
        finally:
            files.close(handle)

    def append(self, records: bytes) -> bool:
        """Hand the records to the kernel; False if there is no room for them."""
        start = self.offset
        end = start + len(records)
        if end > FILE_BYTES:
            return False
        self._mapped[start:end] = records
        self.offset = end
        return True

    def close(self) -> None:
        self._mapped.close()


def journal_path(folder: str, generation: int) -> str:
    return f"{folder}/{PREFIX}{generation:08x}"


def journal_generations(files: SpoolFiles, folder: str) -> list[int]:
    """The generations that lie in the folder, oldest first."""
    found = []
    for name in files.names(folder):
        if name.startswith(PREFIX):
            with suppress(ValueError):
                found.append(int(name[len(PREFIX) :], 16))
    return sorted(found)


def replay_journal(files: SpoolFiles, folder: str, generation: int, offset: int) -> Iterator[JournalRecord | None]:
    """The records behind `offset`; None for one that is damaged. A torn last record was never acknowledged."""
    name = journal_path(folder, generation)
    try:
        handle = files.open(name)
    except FileNotFoundError:
        return
    try:
        data = files.pread(handle, files.size_of(name), 0).rstrip(b"\0")  # the rest is reserved
    finally:
        files.close(handle)
    for at in range(offset, len(data), RECORD_SIZE):
        record = data[at : at + RECORD_SIZE].ljust(RECORD_SIZE, b"\0")
        if CRC.unpack_from(record, RECORD.size)[0] == google_crc32c.value(record[: RECORD.size]):
            kind, attempts, count, first, size = RECORD.unpack(record[: RECORD.size])
            if kind == EXCHANGED:
                yield JournalRecord(ACKED, 0, 1, first, count)
                yield JournalRecord(LEASED, attempts, 1, size, 0)
            else:
                yield JournalRecord(kind, attempts, count, first, size)
        elif at + RECORD_SIZE < len(data):
            yield None
