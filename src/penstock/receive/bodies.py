"""Decompresses bodies up to a bound: a bomb is given up where it exceeds it."""

import zlib
from enum import Enum

import cramjam
import pyarrow as pa

from penstock.protobuf import read_varint

_STEP = 1 << 20
_WINDOW = 1 << 16  # bytes given to zlib at a time: it copies what it leaves, which after each of many members is much
_MAX_MEMBERS = 10_000  # of one gzip; each costs microseconds, however empty it is
_ANY_HEADER = 47  # zlib's word for: gzip or zlib, find out
_NO_HEADER = -15
_FRAMED_SNAPPY = b"\xff\x06\x00\x00sNaPpY"


class TooLarge(ValueError):
    """More bytes than a body may have once decompressed."""


class Encoding(Enum):
    """How a body is compressed, by its name in `Content-Encoding`."""

    IDENTITY = "identity"
    GZIP = "gzip"
    DEFLATE = "deflate"
    ZSTD = "zstd"
    SNAPPY = "snappy"  # one block, or framed


def decompress_body(body: bytes, encoding: Encoding, most: int) -> bytes:
    """Returns the body as it was; TooLarge beyond `most` bytes, ValueError if it is not of that encoding."""
    try:
        match encoding:
            case Encoding.IDENTITY:
                result = body
            case Encoding.GZIP:
                result = _inflate(body, _ANY_HEADER, most)
            case Encoding.DEFLATE:
                # The standard means zlib's format, some senders the bare one.
                is_zlib = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
                result = _inflate(body, _ANY_HEADER if is_zlib else _NO_HEADER, most)
            case Encoding.ZSTD:
                result = _decompress_stream(body, "zstd", most)
            case Encoding.SNAPPY:
                result = _decompress_snappy(body, most)
    except TooLarge:
        raise
    except (zlib.error, OSError, IndexError, ValueError, cramjam.DecompressionError) as error:
        raise ValueError(f"the body is not {encoding.value}: {error}") from None
    if len(result) > most:
        raise TooLarge(f"the body has more than {most} bytes")
    return result


def _inflate(body: bytes, header: int, most: int) -> bytes:
    pieces = []
    left = most + 1
    at = members = 0
    while at < len(body) and left > 0:  # gzip may be several, one after the other
        members += 1
        if members > _MAX_MEMBERS:
            raise zlib.error(f"it has more than {_MAX_MEMBERS} members")
        inflater = zlib.decompressobj(header)
        while not inflater.eof and left > 0:
            window = inflater.unconsumed_tail or body[at : (at := at + _WINDOW)]
            if not window:
                raise zlib.error("it ends too early")
            piece = inflater.decompress(window, left)
            pieces.append(piece)
            left -= len(piece)
        at = min(at, len(body)) - len(inflater.unused_data)
    return b"".join(pieces)


def _decompress_stream(body: bytes, codec: str, most: int) -> bytes:
    pieces = []
    size = 0
    with pa.input_stream(pa.BufferReader(body), compression=codec) as stream:
        while size <= most and (piece := stream.read(_STEP)):
            pieces.append(piece)
            size += len(piece)
    return b"".join(pieces)


def _decompress_snappy(body: bytes, most: int) -> bytes:
    if not body.startswith(_FRAMED_SNAPPY):
        if read_varint(body, 0)[0] > most:
            raise TooLarge(f"the body has more than {most} bytes")
        return bytes(cramjam.snappy.decompress_raw(body))
    size = at = 0
    while at < len(body):  # a block says how long it will be: add that up before anything is decompressed
        kind, length = body[at], int.from_bytes(body[at + 1 : at + 4], "little")
        size += read_varint(body, at + 8)[0] if kind == 0 else length if kind == 1 else 0
        at += 4 + length
        if size > most:
            raise TooLarge(f"the body has more than {most} bytes")
    return bytes(cramjam.snappy.decompress(body))
