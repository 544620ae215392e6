"""Full and failing disks: make soak PART=disks ARGS="--seed 7 --seconds 600"."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.campaigns.failing_disk import IN_OWN_MOUNTS

pytestmark = pytest.mark.server


def run(folder: Path, seed: int, seconds: float, spark: str) -> str:
    with tempfile.TemporaryDirectory() as tried:
        try_one = [sys.executable, "-m", "tests.campaigns.failing_disk", tried]
        ran = subprocess.run([*IN_OWN_MOUNTS, *try_one], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"no loop device can be mounted here: {ran.stderr.strip().splitlines()[-1]}")
    child = [sys.executable, "-m", "tests.campaigns.disks", str(folder), str(seed), str(seconds), spark]
    ended = subprocess.run([*IN_OWN_MOUNTS, *child], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    return ended.stdout


@pytest.mark.timeout(300)
def test_a_disk_of_queue_or_segments_that_is_full_or_fails_costs_no_point(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 0.0, "without")


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(0)
def test_any_disk_that_is_full_or_fails_costs_no_point(tmp_path: Path, seed: int, seconds: float) -> None:
    print(run(tmp_path, seed, seconds, "with"))  # noqa: T201 - the campaign's report
