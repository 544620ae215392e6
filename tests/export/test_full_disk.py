"""A disk that is really full, under a send queue with several workers and a destination over HTTP."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_disk import on_small_disk


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_what_was_taken_arrives_though_the_disk_was_full(tmp_path: Path, durability: str) -> None:
    child = [sys.executable, "-m", "tests.export.full_disk_child", str(tmp_path), durability]
    ended = subprocess.run([*on_small_disk(tmp_path, "4m"), *child], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
