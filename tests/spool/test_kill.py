"""`kill -9`, again and again, on a real process and a real disk, with an oracle that has heard what was promised."""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from penstock import FastQueue
from penstock.testing import wait_until
from tests.spool.kill_child import config_of, number_of

KILLS = int(os.environ.get("PENSTOCK_SOAK_KILLS", "200"))
SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "0")) or random.randrange(1, 1 << 31)


class Oracle:
    """What the killed processes said: pushed, being acked, acked."""

    def __init__(self) -> None:
        self.pushed: set[int] = set()
        self.acking: set[int] = set()
        self.acked: set[int] = set()
        self.attempts: dict[int, int] = {}

    def hear(self, line: str) -> None:
        kind, number, *rest = line.split()
        match kind:
            case "P":
                self.pushed.add(int(number))
            case "B":
                self.acking.add(int(number))
            case "A":
                self.acked.add(int(number))
            case "L":
                assert int(number) not in self.acked, f"{number} was acked and came again"
                assert int(rest[0]) > self.attempts.get(int(number), 0), f"attempt {rest[0]} of {number} came twice"
                self.attempts[int(number)] = int(rest[0])


def campaign(folder: Path, durability: str, kills: int, seed: int) -> None:
    chance, oracle, start = random.Random(seed), Oracle(), 0
    for round_number in range(kills):
        said = folder.with_name(f"said-{round_number}")
        with said.open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.spool.kill_child", folder, durability, str(start), str(chance.random())],
                stdout=log,
            )
        enough = chance.randint(1, 20_000)
        try:
            wait_until(partial(_has_said, said, enough, child), timeout=100)  # a busy disk takes its time for a sync
        finally:
            child.kill()
        assert child.wait() == -9
        whole, _, _ = said.read_text().rpartition("\n")  # the kill may have cut the last line
        for line in whole.splitlines():
            oracle.hear(line)
        start = max([start, *(number + 100 for number in oracle.pushed)])  # what was pushed and not said has no number

    with FastQueue(folder, config_of(durability)) as queue:
        delivered = []
        while leases := queue.lease(500):
            delivered += [number_of(lease.data) for lease in leases]
            queue.ack(leases)
        stats = queue.stats()
    assert len(oracle.acked) > kills, "the campaign did something"
    assert len(delivered) == len(set(delivered))
    assert delivered == sorted(delivered)
    assert not oracle.acked & set(delivered), "acked blocks came again"
    assert oracle.pushed - oracle.acked - oracle.acking <= set(delivered), "blocks were lost"
    assert stats.lost_blocks == 0


def _has_said(said: Path, enough: int, child: subprocess.Popen[bytes]) -> bool:
    return said.stat().st_size >= enough or child.poll() is not None


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_ten_kills_lose_nothing_and_double_nothing(tmp_path: Path, durability: str) -> None:
    campaign(tmp_path / "q", durability, kills=5, seed=7)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_two_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path, durability: str) -> None:
    campaign(tmp_path / "q", durability, kills=KILLS, seed=SEED)
