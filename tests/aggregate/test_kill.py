"""`kill -9` under load: what a sender was told to be safe is in the durable queue, whole and once."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from penstock import FastQueue
from penstock.model.segment import decode_partials_block
from penstock.testing import wait_until
from tests.aggregate.kill_child import METRICS, POINTS, config_of

APART = 1_000_000  # numbers of one life never reach those of the next


def campaign(folder: Path, durability: str, kills: int) -> None:
    promised: set[int] = set()
    for life in range(kills):
        said = folder.with_name(f"said-{life}")
        with said.open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.aggregate.kill_child", folder, durability, str(life * APART)], stdout=log
            )
        try:
            wait_until(partial(_has_said, said, 200 + 150 * (life % 7), child), timeout=100)
        finally:
            child.kill()
        assert child.wait() == -9
        whole, _, _ = said.read_text().rpartition("\n")  # the kill may have cut the last line
        promised |= {int(line.split()[1]) for line in whole.splitlines()}

    found: dict[int, dict[str, int]] = {}
    with FastQueue(folder, config_of(durability)) as queue:
        while leases := queue.lease(500):
            for lease in leases:
                for row in decode_partials_block(lease.data).to_pylist():
                    number = int(row["entity"].split('"')[3])
                    counts = found.setdefault(number, dict.fromkeys(METRICS, 0))
                    counts[row["metric"]] += row["count"]
            queue.ack(leases)
    assert len(promised) > 10 * kills, "the campaign did something"
    assert promised <= found.keys(), "a promise was not kept"
    assert all(counts == dict.fromkeys(METRICS, POINTS) for counts in found.values()), "a request was taken in part"


def _has_said(said: Path, enough: int, child: subprocess.Popen[bytes]) -> bool:
    return said.stat().st_size >= enough or child.poll() is not None


def test_two_kills_break_no_promise(tmp_path: Path) -> None:
    campaign(tmp_path / "q", "disk", kills=2)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_fifty_kills_break_no_promise(tmp_path: Path, durability: str) -> None:
    campaign(tmp_path / "q", durability, kills=50)
