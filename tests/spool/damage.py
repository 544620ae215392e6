"""What the tests do to a queue's folder, and how they look into it."""

from collections.abc import Callable
from pathlib import Path

from penstock import FastQueue

Open = Callable[..., FastQueue]  # the fixture `open_queue`


def chunk_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if len(path.name) == 16 and path.is_file())


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def drain(queue: FastQueue) -> list[bytes]:
    blocks = []
    while (block := queue.pop()) is not None:
        blocks.append(block)
    return blocks


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"block %d " % i * 7 for i in range(start, start + count)]
