"""A disk that is really full, under a send queue with several workers and a destination over HTTP."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A disk of its own, in a mount namespace of its own: it goes when the process does, whatever becomes of that.
MOUNT_AND_RUN = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'


@pytest.fixture
def on_small_disk(tmp_path: Path) -> list[str]:
    """What to put before a command so that `tmp_path` is a disk of 4 MB for it."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *as_root, "--mount", "sh", "-c", MOUNT_AND_RUN, str(tmp_path)]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', '') or error}")
    return command


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_what_was_taken_arrives_though_the_disk_was_full(
    on_small_disk: list[str], tmp_path: Path, durability: str
) -> None:
    child = [sys.executable, "-m", "tests.export.full_disk_child", str(tmp_path), durability]
    ended = subprocess.run([*on_small_disk, *child], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
