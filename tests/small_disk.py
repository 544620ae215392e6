"""A real disk of a few megabytes under one folder, for the processes that a test starts."""

import os
import subprocess
from pathlib import Path

import pytest

# A disk of its own, in a mount namespace of its own: it goes when the last process there does.
MOUNT_AND_RUN = 'mount -t tmpfs -o size="$1" tmpfs "$0" && shift && exec "$@"'


def on_small_disk(folder: Path, size: str) -> list[str]:
    """What to put before a command so that `folder` is a disk of that size for it. Skips where none can be mounted."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *as_root, "--mount", "sh", "-c", MOUNT_AND_RUN, str(folder), size]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', '') or error}")
    return command
