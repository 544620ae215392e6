"""Compressed bodies, and those that only pretend."""

import gzip
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable

import cramjam
import pytest

from penstock.receive.bodies import Encoding, TooLarge, decompress_body

TEXT = b"what comes in " * 1000
COMPRESSED = [
    (Encoding.IDENTITY, TEXT),
    (Encoding.GZIP, gzip.compress(TEXT, mtime=0)),
    (Encoding.GZIP, gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:])),
    (Encoding.GZIP, gzip.compress(b"") * 5000 + gzip.compress(TEXT)),
    (Encoding.DEFLATE, zlib.compress(TEXT)),
    (Encoding.DEFLATE, zlib.compress(TEXT, wbits=-15)),
    (Encoding.ZSTD, bytes(cramjam.zstd.compress(TEXT))),
    (Encoding.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT))),
    (Encoding.SNAPPY, bytes(cramjam.snappy.compress(TEXT))),
]


@pytest.mark.parametrize(("encoding", "body"), COMPRESSED, ids=range(len(COMPRESSED)))
def test_every_encoding_is_read(encoding: Encoding, body: bytes) -> None:
    assert decompress_body(body, encoding, len(TEXT)) == TEXT


@pytest.mark.parametrize(("encoding", "body"), COMPRESSED, ids=range(len(COMPRESSED)))
def test_one_byte_too_many_is_too_large(encoding: Encoding, body: bytes) -> None:
    with pytest.raises(TooLarge, match=f"more than {len(TEXT) - 1} bytes"):
        decompress_body(body, encoding, len(TEXT) - 1)


@pytest.mark.parametrize("encoding", [encoding for encoding in Encoding if encoding is not Encoding.IDENTITY])
@pytest.mark.parametrize(
    "body",
    [b"nonsense", b"\xff" * 100, gzip.compress(TEXT, mtime=0)[:-20], zlib.compress(TEXT)[:50]],
    ids=["words", "ones", "half a gzip", "half a zlib"],
)
def test_what_is_not_compressed_so_is_refused(encoding: Encoding, body: bytes) -> None:
    with pytest.raises(ValueError, match="the body"):
        decompress_body(body, encoding, 10_000)


@pytest.mark.parametrize(
    ("encoding", "made"),
    [
        (Encoding.GZIP, lambda: gzip.compress(bytes(200_000_000), 1)),
        (Encoding.ZSTD, lambda: bytes(cramjam.zstd.compress(bytes(200_000_000)))),
        (Encoding.SNAPPY, lambda: b"\x80\x84\xaf\x5f" + b"\x00"),  # says that it is 200 MB
    ],
    ids=["gzip", "zstd", "snappy"],
)
def test_a_bomb_does_not_go_off(encoding: Encoding, made: Callable[[], bytes]) -> None:
    bomb = made()
    tracemalloc.start()
    with pytest.raises(TooLarge):
        decompress_body(bomb, encoding, 1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_bomb_of_empty_members_is_given_up() -> None:
    bomb = gzip.compress(b"") * (1 << 20)
    before = time.thread_time()
    with pytest.raises(ValueError, match="more than 10000 members"):
        decompress_body(bomb, Encoding.GZIP, 1_000_000)
    assert time.thread_time() - before < 2.0  # it had taken minutes


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_a_body_of_any_length_is_read_whole(size: int) -> None:
    noise = random.Random(size).randbytes(size)
    for body in (gzip.compress(noise, 0), gzip.compress(noise) + gzip.compress(TEXT), gzip.compress(noise) * 3):
        assert decompress_body(body, Encoding.GZIP, 1_000_000) == gzip.decompress(body)
        with pytest.raises(ValueError, match="ends too early"):
            decompress_body(body[:-1], Encoding.GZIP, 1_000_000)
