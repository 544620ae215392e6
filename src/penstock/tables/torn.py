"""What a power cut has torn of a table: how it is known, and where it is set aside.

<folder>/minute/_torn/      no reader looks there; nothing is ever deleted
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.durable import make_folder, sync_to_disk

log = logging.getLogger(__name__)
TORN = "_torn"
_PARQUET_END = b"PAR1"

# Whether segments still hold what a writer's guard would lose: the writer, after this sequence, up to that one.
Covered = Callable[[str, int, int], bool]


def is_whole(path: Path, size: int | None = None) -> bool:
    """Whether a Parquet file is there with its end, and of that size."""
    try:
        with open(path, "rb") as file:
            found = file.seek(0, os.SEEK_END)
            file.seek(max(0, found - len(_PARQUET_END)))
            return size in (None, found) and file.read() == _PARQUET_END
    except FileNotFoundError:
        return False


def set_aside(table: Path, paths: Sequence[Path], reason: str) -> None:
    """Move what is torn to where no reader looks."""
    if not paths:
        return
    make_folder(table / TORN)
    for path in reversed(paths):  # newest first: after a crash in here, what is left still follows on each other
        log.warning(
            "A power cut has torn a table, and part of it is set aside: its points are added again from segments. "
            "table=%s file=%s kept_as=%s reason=%s",
            table.name, path.name, _free_name(table / TORN / path.name), reason,
        )  # fmt: skip
        path.rename(_free_name(table / TORN / path.name))
    sync_to_disk([*{path.parent for path in paths}, table / TORN])


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.name}.{number}")
    return free


def files_aside(table: Path) -> int:
    """How much of a table lies aside."""
    return sum(1 for _ in (table / TORN).iterdir()) if (table / TORN).is_dir() else 0
