"""A real file system of a few megabytes on a loop device, that can be full, refuse new files, or fail altogether."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

IN_OWN_MOUNTS = ["unshare", "--mount"]  # before a command: what it mounts goes when the last process there ends
_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN of Linux: everything fails with EIO from then on
_SYNC_FIRST = 0
_BALLAST = "ballast"


class FailingDisk:
    """An ext4 under one folder. Only root can mount one."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder = folder
        folder.mkdir()
        self._image = folder.with_suffix(".image")
        subprocess.run(["truncate", "-s", size, self._image], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._image], check=True, capture_output=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.folder], check=True, capture_output=True)

    def fill(self) -> None:
        """Until not one byte is free."""
        with open(self.folder / _BALLAST, "ab", buffering=0) as ballast:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        ballast.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        (self.folder / _BALLAST).unlink()

    def refuse_names(self) -> None:
        """No file can be made, renamed or deleted, in any folder: EPERM, for root as well."""
        subprocess.run(["chattr", "+i", *self._folders()], check=True, capture_output=True)

    def take_names(self) -> None:
        subprocess.run(["chattr", "-i", *self._folders()], check=True, capture_output=True)

    def _folders(self) -> list[str]:
        return [folder for folder, _, _ in os.walk(self.folder) if not folder.endswith("lost+found")]

    def fail(self) -> None:
        """What was written is kept; every further read and write is an EIO, until it is mounted anew."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _SYNC_FIRST.to_bytes(4, "little"))
        finally:
            os.close(descriptor)

    def replace(self) -> None:
        """Mount it anew, when no process has a file open there."""
        subprocess.run(["umount", self.folder], check=True, capture_output=True)
        self._mount()


if __name__ == "__main__":  # whether one can be mounted here
    FailingDisk(Path(sys.argv[1]) / "disk", "8M")
