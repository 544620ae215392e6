"""What survives a power cut: files and names that are on the disk when a call returns."""

import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_AT_ONCE = 8  # syncs that wait together: a journal writes them with one commit
# What a mounted object store says of a folder: it has none, and keeps its names by itself.
_UNKNOWN_THERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def sync_to_disk(paths: Iterable[Path | str]) -> None:
    """Return when these files and folders, as they are now, survive a power cut. Of a folder that is its names."""
    wanted = list(dict.fromkeys(map(str, paths)))
    if len(wanted) < 2:
        for path in wanted:
            _sync(path)
        return
    with ThreadPoolExecutor(min(len(wanted), _AT_ONCE), "penstock-sync") as pool:
        list(pool.map(_sync, wanted))


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNKNOWN_THERE or not os.path.isdir(path):
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents; their names survive a power cut. `mode` is that of the folder itself."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    sync_to_disk([folder.parent])


def write_text(path: Path, text: str) -> None:
    """Put `text` into a file: after a power cut it has all of it, or what it had before."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text)
    sync_to_disk([scratch])
    scratch.rename(path)
    sync_to_disk([path.parent])
