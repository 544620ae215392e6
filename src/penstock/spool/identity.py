"""A queue's name for life: what tells its sequences from those of every other queue."""

import uuid

from penstock.spool.files import Files, read_file

ID_NAME = "fastqueue.id"
_LENGTH = 32


def identity(files: Files, folder: str) -> str:
    """The id in `folder`, made on first asking: 32 hex digits that survive a power cut once they were handed out."""
    path = f"{folder}/{ID_NAME}"
    if ID_NAME in files.names(folder):
        known = read_file(files, path).decode("ascii", "replace")
        if len(known) == _LENGTH:
            return known
    fresh = uuid.uuid4().hex
    handle = files.open(path, create=True)  # a shorter one is the torn start of an id that nobody was told
    try:
        files.pwritev(handle, [fresh.encode()], 0)
        files.sync(handle)
    finally:
        files.close(handle)
    files.sync_folder(folder)
    return fresh
