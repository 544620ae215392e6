"""The whole service with a full disk and a destination that is down: a success means what the durability says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_disk import on_small_disk


@pytest.mark.parametrize(
    ("durability", "end"), [("disk", "kill"), ("fsync", "kill"), ("disk", "stop"), ("memory", "stop")]
)
def test_a_success_is_as_safe_as_the_queue_though_the_disk_is_full(tmp_path: Path, durability: str, end: str) -> None:
    disk = tmp_path / "data"
    disk.mkdir()
    child = [sys.executable, "-m", "tests.service.full_disk_child", str(tmp_path), durability, end]
    ended = subprocess.run([*on_small_disk(disk, "16m"), *child], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
