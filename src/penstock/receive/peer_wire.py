"""The messages between receiving processes, over Unix sockets in a private folder.

a handover   number u64, format u8, count u32, length u32; JSON of the bodies' senders; a length u32 for each body; the
             bodies
an answer    number u64, length u32; JSON of the bodies that were not simply taken: [[place, status, message, rejected,
             reasons, is_useless], …]. The first one of a connection has number 0: the greeting

Bodies are requests as a sender would write them, and are read with the same care.
"""

import asyncio
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format

BUFFER = 1 << 20
_LARGEST = 1 << 30  # bytes of one message: more is nonsense
_LONGEST_ADDRESS = 100  # bytes; the kernel takes 107
_HANDOVER = struct.Struct("<QBII")
_ANSWER = struct.Struct("<QI")
_FORMATS = list(Format)


class SocketAddress:
    """The address of a socket at that path, also of one that is longer than the kernel takes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = -1

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _LONGEST_ADDRESS:
            return str(self._path)
        self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def handover_message(number: int, kind: Format, bodies: Sequence[bytes], senders: Sequence[str] = ()) -> list[bytes]:
    """Returns the pieces of a handover, to be written one after the other."""
    names = json.dumps(list(senders)).encode()
    head = _HANDOVER.pack(number, _FORMATS.index(kind), len(bodies), len(names))
    return [head, names, struct.pack(f"<{len(bodies)}I", *map(len, bodies)), *bodies]


async def read_handover(reader: asyncio.StreamReader) -> tuple[int, Format, list[bytes], list[str]]:
    """Returns number, format, bodies and senders of the next; ValueError, IndexError or struct.error if it is none."""
    number, kind, count, length = _HANDOVER.unpack(await reader.readexactly(_HANDOVER.size))
    if 4 * count > _LARGEST or length > _LARGEST:
        raise ValueError(f"a message of {count} bodies, and {length} bytes of senders")
    senders = json.loads(await reader.readexactly(length))
    lengths = struct.unpack(f"<{count}I", await reader.readexactly(4 * count))
    if sum(lengths) > _LARGEST:
        raise ValueError(f"a message of {sum(lengths)} bytes")
    return number, _FORMATS[kind], _cut(await reader.readexactly(sum(lengths)), lengths), senders


def _cut(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    found, at = [], 0
    for length in lengths:
        found.append(data[at : at + length])
        at += length
    return found


def answer_message(number: int, answers: Mapping[int, DecodeAnswer]) -> bytes:
    """Returns the answer to a handover: of all bodies but those that were simply taken."""
    rows = [
        [place, answer.status.value, answer.message, answer.rejected, answer.reasons, answer.is_useless]
        for place, answer in answers.items()
    ]
    text = json.dumps(rows).encode()
    return _ANSWER.pack(number, len(text)) + text


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[int, DecodeAnswer]]:
    """Returns number and answers of the next one; ValueError if it is none."""
    number, length = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    rows = json.loads(await reader.readexactly(length))
    return number, {
        place: DecodeAnswer(DecodeStatus(status), message, rejected, tuple(reasons), is_useless)
        for place, status, message, rejected, reasons, is_useless in rows
    }


def write_to_peer(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    """Writes on the loop, unless the connection is gone."""
    if not writer.is_closing():
        writer.writelines(pieces)
