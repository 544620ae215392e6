"""A real file system whose power a test can cut: ext4 on an image behind a loop device.

What was not on the disk at the cut is gone, as the kernel tells it: no page of memory and no open part of the journal
is written any more (`EXT4_IOC_SHUTDOWN`, no log flush). The next mount replays the journal.
"""

import ctypes
import fcntl
import os
import struct
import subprocess
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from penstock.testing import wait_until

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
NO_LOG_FLUSH = 2
CLONE_NEWNS = 0x20000


class CutDisk:
    """An ext4 of its own at `folder`. Skips where the kernel lets none be mounted."""

    def __init__(self, image: Path, folder: Path, size: str = "512M", *, is_private: bool = False) -> None:
        """`is_private`: for this thread and processes that it starts alone; other threads do not see the disk."""
        self._image = image
        self.folder = folder
        self._is_mounted = False
        folder.mkdir()
        try:
            if is_private:
                _keep_mounts_to_ourselves()
            _run("truncate", "-s", size, str(image))
            _run("mkfs.ext4", "-q", "-E", "nodiscard", str(image))
            self._mount()
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip()
            pytest.skip(f"a power cut needs a loop device and root: {reason}")

    def cut(self) -> None:
        """Cut the power: from now on every write fails, and nothing more gets to the disk."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def come_back(self) -> None:
        """After a cut, once no process uses it: mount it again, which replays the journal."""
        self._unmount()
        self._mount()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unmount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        self._is_mounted = True

    def _unmount(self) -> None:
        if self._is_mounted:
            wait_until(self._is_let_go, 30.0)  # processes that were killed let go of their files a moment later
            self._is_mounted = False

    def _is_let_go(self) -> bool:
        return subprocess.run(["umount", str(self.folder)], capture_output=True).returncode == 0


@cache
def _keep_mounts_to_ourselves() -> None:
    """Any process that gets mounts of its own at this moment would keep a copy of ours, and the disk in use."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
