"""The filesystem as an argument: the few calls that the queue makes, so that a test can make each of them fail."""

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import DiskFailed, DiskFull, QueueError, QueueLocked

Buffers = Sequence[bytes]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MappedFile(Protocol):
    """Bytes of a file, in memory; the kernel has them as soon as they are stored."""

    def __setitem__(self, where: slice, data: bytes, /) -> None: ...

    def close(self) -> None: ...


class SpoolFiles(Protocol):
    """What a queue asks of a filesystem. Every method raises OSError as the kernel would."""

    def make_folder(self, path: str) -> None:
        """Create it with mode 0700 unless it is there, and its parents; the names survive a power cut."""

    def names(self, folder: str) -> list[str]:
        """The names in it, in no order; empty if there is no such folder."""
        ...

    def size_of(self, path: str) -> int: ...

    def open(self, path: str, *, create: bool = False) -> int:
        """A handle to read and write, positioned by the caller."""
        ...

    def close(self, handle: int) -> None: ...

    def pread(self, handle: int, length: int, offset: int, /) -> bytes: ...

    def pwritev(self, handle: int, buffers: Buffers, offset: int, /) -> int:
        """Bytes written; fewer than given is not an error yet."""
        ...

    def map(self, handle: int, length: int, /) -> MappedFile:
        """Reserve `length` bytes on the disk and map them: what is stored there needs no call and cannot fail."""
        ...

    def truncate(self, handle: int, length: int, /) -> None: ...

    def sync(self, handle: int, /) -> None:
        """Return when what was written through any handle of the file is on the disk."""

    def sync_folder(self, path: str) -> None:
        """Return when the folder's names are on the disk."""

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def lock(self, path: str) -> int:
        """Hold the file for this process until the handle is closed; QueueLocked if another one does."""
        ...

    def free_bytes(self, path: str) -> int: ...

    def check_room(self, folder: str, length: int) -> None:
        """Raise what writing so many bytes to a file in the folder would raise. Nothing stays."""


class OsSpoolFiles:
    """The operating system's files."""

    # Bound straight to the C functions: on a hot path the call is all there is to pay.
    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    pwritev = staticmethod(os.pwritev)
    truncate = staticmethod(os.ftruncate)
    sync = staticmethod(os.fdatasync)
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    size_of = staticmethod(os.path.getsize)

    def make_folder(self, path: str) -> None:
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for folder in reversed(missing):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self.sync_folder(os.path.dirname(folder) or ".")

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    def open(self, path: str, *, create: bool = False) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)

    def sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def lock(self, path: str) -> int:
        handle = self.open(path, create=True)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            folder = os.path.dirname(path)
            raise QueueLocked(f"another process has the queue in {folder}, or this one opened it twice") from None
        return handle

    def map(self, handle: int, length: int, /) -> MappedFile:
        os.posix_fallocate(handle, 0, length)  # a hole in the file would turn a full disk into a SIGBUS
        return mmap.mmap(handle, length)

    def free_bytes(self, path: str) -> int:
        free = os.statvfs(path)
        return free.f_bavail * free.f_frsize

    def check_room(self, folder: str, length: int) -> None:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, length)


def write_all(files: SpoolFiles, handle: int, buffers: Buffers, offset: int) -> int:
    """Write every byte or raise; the number of bytes. Buffers are at most a few hundred (IOV_MAX is 1024)."""
    wanted = sum(map(len, buffers))
    written = files.pwritev(handle, buffers, offset)
    if written < wanted:  # a nearly full disk writes what fits; the next call says why it stopped
        rest = b"".join(buffers)
        while written < wanted:
            written += files.pwritev(handle, [rest[written:]], offset + written)
    return wanted


def read_spool_file(files: SpoolFiles, path: str) -> bytes:
    """The whole of a small file."""
    handle = files.open(path)
    try:
        return files.pread(handle, files.size_of(path), 0)
    finally:
        files.close(handle)


def disk_error(error: OSError) -> QueueError:
    """The kernel's error as DiskFull or DiskFailed."""
    if error.errno in DISK_FULL:
        return DiskFull(f"no room on the disk, what it holds is safe: {error}")
    return DiskFailed(f"the disk failed, what was accepted before is safe: {error}")
