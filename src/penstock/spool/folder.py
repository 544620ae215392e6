"""A queue's folder as a whole: its lock, and the id that tells its sequences from every other queue's."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import DiskFailed, DiskFull, QueueLocked
from penstock.spool.files import DISK_FULL, SpoolFiles, read_spool_file

LOCK_NAME = "fastqueue.lock"
ID_NAME = "fastqueue.id"
_ID_LENGTH = 32


def lock_spool_folder(files: SpoolFiles, folder: str) -> int:
    """Make the folder unless it is there, and lock it until the handle is closed; QueueLocked if it is locked."""
    files.make_folder(folder)
    return files.lock(f"{folder}/{LOCK_NAME}")


def is_spool_locked(files: SpoolFiles, folder: str) -> bool:
    """Whether a process has the queue open."""
    if LOCK_NAME not in files.names(folder):
        return False
    try:
        files.close(files.lock(f"{folder}/{LOCK_NAME}"))
    except QueueLocked:
        return True
    return False


@contextmanager
def name_spool_in_errors(folder: str) -> Iterator[None]:
    """Turn an OSError inside the block into a QueueError that names the folder."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in DISK_FULL else DiskFailed
        raise kind(f"cannot open a queue in {folder}: {error.strerror or error}") from error


def read_or_create_spool_id(files: SpoolFiles, folder: str) -> str:
    """The id in `folder`, created on first use: 32 hex digits that survive a power cut once they were handed out."""
    path = f"{folder}/{ID_NAME}"
    if ID_NAME in files.names(folder):
        known = read_spool_file(files, path).decode("ascii", "replace")
        if len(known) == _ID_LENGTH:
            return known
    fresh = uuid.uuid4().hex
    handle = files.open(path, create=True)  # a shorter id was torn by a crash before it was handed out
    try:
        files.pwritev(handle, [fresh.encode()], 0)
        files.sync(handle)
    finally:
        files.close(handle)
    files.sync_folder(folder)
    return fresh
