"""Frames: how blocks lie in a chunk file.

Everything is little-endian. Every frame begins with the 8-byte header of the seed:

    bits 0-61   length of what follows
    bit 62      0: a frame of the seed: one block follows, nothing checks it
                1: a checked frame, as below
    bit 63      the body is compressed with snappy

A checked frame holds one or many blocks; its header is 56 bytes, the seed's 8 among them:

     0  u64  the seed's header
     8  4s   "PSF1", to find the next frame behind damaged bytes
    12  u8   codec of the body: 0 none, 1 snappy, 2 lz4 block, 3 zstd
    13  u8   flags: 1 the body begins with the lengths, 2 the times follow them
    14  u16  holes among the blocks
    16  u64  sequence of the first block
    24  u64  where the frame before ended: the sequence after its last block
    32  f64  when the first block was pushed, seconds since the epoch
    40  u32  blocks, holes included; they have consecutive sequences
    44  u32  bytes of all blocks together
    48  u32  CRC32C of the body as it is stored
    52  u32  CRC32C of the 52 bytes before
    56       the body, compressed as a whole:
             u32 length of each block (0xFFFFFFFF: a hole, acked before it was written)
             u32 milliseconds from the first block's push to this one's, for each block
             the blocks, one after another
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import cramjam
import google_crc32c

from penstock.spool.config import Compression

CHECKED = 1 << 62
SNAPPY = 1 << 63
LENGTH_MASK = CHECKED - 1
MAGIC = b"PSF1"
MAGIC_AT = 8
_FOLLOWS_AT = 24
SEED_HEADER = struct.Struct("<Q")
HEADER = struct.Struct("<Q4sBBHQQdIII")
CRC = struct.Struct("<I")
CHECKED_HEADER = struct.Struct(HEADER.format + "I")
HEADER_SIZE = HEADER.size + CRC.size
HOLE = 0xFFFFFFFF
LENGTHS, TIMES = 1, 2
MOST_HOLES = 0xFFFF

CODECS: dict[Compression, int] = {"none": 0, "snappy": 1, "lz4": 2, "zstd": 3}
_NONE, _SNAPPY, _LZ4, _ZSTD = range(4)
_ZSTD_LEVEL = 1  # a queue's data lives for seconds: the fastest level already halves what snappy leaves
_SNAPPY_RATIO = 32  # snappy's best is 64 bytes from 3; a damaged length must not allocate gigabytes


class DamagedFrame(Exception):
    """Bytes that are not the frame that they should be."""


class FrameHeader(NamedTuple):
    """What can be known of a frame without its body."""

    size: int  # header and body together
    codec: int
    flags: int
    holes: int
    first: int
    follows: int
    enqueued_at: float
    block_count: int
    payload_bytes: int
    body_crc: int
    checked: bool

    @property
    def end(self) -> int:
        """The sequence after the last block. A frame of the seed takes as many sequences as it has bytes."""
        return self.first + (self.block_count if self.checked else self.size)

    @property
    def header_size(self) -> int:
        return HEADER_SIZE if self.checked else SEED_HEADER.size


class Frame(NamedTuple):
    """A frame that was read. `blocks` has None for a hole."""

    offset: int
    header: FrameHeader
    blocks: list[bytes | None]
    times: list[float] | None


def encode_frame(
    blocks: Sequence[bytes | None],
    first: int,
    follows: int,
    enqueued_at: float,
    codec: int,
    times: Sequence[float] | None = None,
) -> tuple[bytes, bytes]:
    """The frame of some blocks: its header and its body."""
    count = len(blocks)
    if count == 1 and blocks[0] is not None:
        return encode_one_block_frame(blocks[0], first, follows, enqueued_at, codec)
    flags = LENGTHS
    lengths = [HOLE if block is None else len(block) for block in blocks]
    whole = [block for block in blocks if block is not None]
    holes = count - len(whole)
    payload_bytes = sum(map(len, whole))
    tables = struct.pack(f"<{count}I", *lengths)
    if times is not None:
        flags |= TIMES
        tables += struct.pack(f"<{count}I", *[_milliseconds(time - enqueued_at) for time in times])
    raw = b"".join((tables, *whole))
    body = raw if codec == _NONE else _compress(raw, codec)
    if len(body) >= len(raw):
        codec, body = _NONE, raw  # incompressible: spare the reader the work
    return _header(body, codec, flags, holes, first, follows, enqueued_at, count, payload_bytes), body


def encode_one_block_frame(block: bytes, first: int, follows: int, at: float, codec: int) -> tuple[bytes, bytes]:
    """The frame of a single block: its header and its body."""
    body = block if codec == _NONE else _compress(block, codec)
    if len(body) >= len(block):
        codec, body = _NONE, block  # incompressible: spare the reader the work
    return _header(body, codec, 0, 0, first, follows, at, 1, len(block)), body


def _milliseconds(seconds: float) -> int:
    return min(max(0, round(seconds * 1000)), 0xFFFFFFFF)  # a clock that was set in between must not stop a spill


def _header(
    body: bytes, codec: int, flags: int, holes: int, first: int, follows: int, at: float, count: int, payload_bytes: int
) -> bytes:
    length = HEADER_SIZE - SEED_HEADER.size + len(body) | CHECKED | (SNAPPY if codec == _SNAPPY else 0)
    crc = google_crc32c.value(body)
    header = HEADER.pack(length, MAGIC, codec, flags, holes, first, follows, at, count, payload_bytes, crc)
    return header + CRC.pack(google_crc32c.value(header))


def encode_frame_of_holes(size: int, first: int, count: int) -> bytes | None:
    """A frame of exactly `size` bytes that holds nothing but holes; None if that is too small for them."""
    lengths = struct.pack(f"<{count}I", *[HOLE] * count)
    if not 0 < count <= MOST_HOLES or HEADER_SIZE + len(lengths) > size:
        return None
    body = lengths + bytes(size - HEADER_SIZE - len(lengths))
    return _header(body, _NONE, LENGTHS, count, first, first, 0.0, count, 0) + body


def parse_frame_header(data: bytes, at: int, offset: int, *, checked: bool) -> FrameHeader:
    """The header at `data[at:]`, which lies at `offset` of the log; DamagedFrame if it is none.

    `checked` says which of the two formats the chunk has; a frame of the seed has its offset as its sequence.
    """
    if not checked:
        if len(data) - at < SEED_HEADER.size:
            raise DamagedFrame("cut header")
        (prefix,) = SEED_HEADER.unpack_from(data, at)
        length = prefix & LENGTH_MASK
        if prefix & CHECKED or not length:
            raise DamagedFrame("not a frame of the seed")
        codec = _SNAPPY if prefix & SNAPPY else _NONE
        return FrameHeader(SEED_HEADER.size + length, codec, 0, 0, offset, 0, 0.0, 1, length, 0, False)
    if len(data) - at < HEADER_SIZE:
        raise DamagedFrame("cut header")
    prefix, magic, *fields, header_crc = CHECKED_HEADER.unpack_from(data, at)
    if magic != MAGIC or header_crc != google_crc32c.value(data[at : at + HEADER.size]):
        raise DamagedFrame("damaged header")
    return FrameHeader._make((SEED_HEADER.size + (prefix & LENGTH_MASK), *fields, True))


def frame_begins_behind(data: bytes, log_end: int) -> bool:
    """Whether `data` is how the frame behind the blocks before `log_end` begins, as much of its header as there is."""
    follows = data[_FOLLOWS_AT : _FOLLOWS_AT + SEED_HEADER.size]
    return data[MAGIC_AT : MAGIC_AT + len(MAGIC)] == MAGIC and SEED_HEADER.pack(log_end).startswith(follows)


def decode_frame(offset: int, header: FrameHeader, body: bytes) -> Frame:
    """The blocks of a frame; DamagedFrame if the body is not what was written."""
    if header.checked and google_crc32c.value(body) != header.body_crc:
        raise DamagedFrame("damaged body")
    if len(body) != header.size - header.header_size:
        raise DamagedFrame("cut body")
    count = header.block_count
    lengths_size = 4 * count if header.flags & LENGTHS else 0
    start = lengths_size * 2 if header.flags & TIMES else lengths_size
    raw = decompress_frame(body, header.codec, header.payload_bytes + start if header.checked else None)
    if not header.flags & LENGTHS:
        return Frame(offset, header, [raw], None)
    lengths = struct.unpack_from(f"<{count}I", raw)
    times = None
    if header.flags & TIMES:
        times = [header.enqueued_at + ms / 1000 for ms in struct.unpack_from(f"<{count}I", raw, lengths_size)]
    if header.holes:
        blocks: list[bytes | None] = []
        for length in lengths:
            if length == HOLE:
                blocks.append(None)
            else:
                blocks.append(raw[start : start + length])
                start += length
        return Frame(offset, header, blocks, times)
    ends = list(accumulate(lengths, initial=start))
    return Frame(offset, header, [raw[a:b] for a, b in pairwise(ends)], times)


def _compress(raw: bytes, codec: int) -> bytes:
    if codec == _SNAPPY:
        return bytes(cramjam.snappy.compress_raw(raw))
    if codec == _LZ4:
        return bytes(cramjam.lz4.compress_block(raw, store_size=False))
    return bytes(cramjam.zstd.compress(raw, _ZSTD_LEVEL))


def decompress_frame(body: bytes, codec: int, length: int | None) -> bytes:
    """The body as it was before `encode_frame` compressed it; DamagedFrame if it is not `length` bytes.

    The length is None for a frame of the seed, which has no other codec than snappy.
    """
    if codec == _NONE:
        return body
    try:
        if length is None:
            length = cramjam.snappy.decompress_raw_len(body)
            if length > _SNAPPY_RATIO * len(body):
                raise DamagedFrame("damaged compressed body")
        raw = bytearray(length)  # large buffers of cramjam's own come fresh from the kernel, at three times the price
        if codec == _SNAPPY:
            written = cramjam.snappy.decompress_raw_into(body, raw)
        elif codec == _LZ4:
            written = cramjam.lz4.decompress_block_into(body, raw, output_len=length)
        elif codec == _ZSTD:
            written = cramjam.zstd.decompress_into(body, raw)
        else:
            raise DamagedFrame(f"unknown codec {codec}")
    except cramjam.DecompressionError as error:
        raise DamagedFrame("damaged compressed body") from error
    if written != length:
        raise DamagedFrame("damaged compressed body")
    return bytes(raw)
