"""`kill -9` while workers send, again and again, with an oracle at the destination: what each durability promises."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from penstock.testing import wait_until
from tests.export.kill_child import IN_MEMORY, WORKERS, number_of, sender_of
from tests.export.misbehaving import Misbehaving, answer

KILLS = int(os.environ.get("PENSTOCK_SOAK_KILLS", "200"))
SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "0")) or random.randrange(1, 1 << 31)


class Gathering:
    """A destination that answers when several wait for it, or after some milliseconds: so several are under way."""

    def __init__(self) -> None:
        self.waiting = 0
        self._lock = threading.Lock()
        self._enough = threading.Condition(self._lock)

    def __call__(self, connection: socket.socket) -> bool:
        with self._lock:
            self.waiting += 1
            self._enough.notify_all()
            self._enough.wait_for(lambda: self.waiting >= WORKERS, 0.005)
            self.waiting -= 1
        return answer(200)(connection)


class Life:
    """What one process said and what came of it, until it was killed."""

    def __init__(self, numbers: range, under_way: int, pushed: list[int]) -> None:
        self.numbers = numbers  # that it could have pushed
        self.under_way = under_way
        self.pushed = pushed
        self.arrived: list[int] = []


def live(folder: Path, server: Misbehaving, durability: str, first: int, chance: random.Random) -> Life:
    before, said = len(server.requests), folder.with_name(f"said-{first}")
    command = [str(folder), server.url, durability, str(first)]
    with said.open("wb") as log:
        child = subprocess.Popen([sys.executable, "-m", "tests.export.kill_child", *command], stdout=log)
    enough = chance.choice([chance.randint(0, 10), chance.randint(0, 1000)])
    try:
        wait_until(lambda: said.stat().st_size and len(server.requests) >= before + enough)
        gathering = server.usually
        assert isinstance(gathering, Gathering)
        under_way = gathering.waiting
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    whole, _, _ = said.read_text().rpartition("\n")  # the kill may have cut the last line
    pushed = [int(line) for line in whole.split()]
    numbers = range(first, max(pushed, default=first) + 100)  # what was pushed and not said has a number, too
    return Life(numbers, under_way, pushed)


def campaign(folder: Path, durability: str, kills: int, seed: int) -> None:
    chance, first, lives = random.Random(seed), 0, list[Life]()
    server = Misbehaving(usually=Gathering())
    with server.running():
        for _ in range(kills):
            lives.append(live(folder, server, durability, first, chance))
            first = lives[-1].numbers.stop
        lives.append(Life(range(first, first), 0, []))
        with sender_of(str(folder), server.url, durability, first) as sender:
            assert sender.flush(60)
            assert sender.stats().queue.lost_blocks == 0
    of_life = {str(life.numbers.start): life for life in lives}
    for request in server.requests:
        of_life[request.headers["x-life"]].arrived.append(number_of(request.body))
    times = Counter(number for life in lives for number in life.arrived)
    lost = {number for life in lives for number in life.pushed} - set(times)
    twice = times.total() - len(times)
    print(  # noqa: T201 - the campaign's report
        f"\n{durability}: {kills} kills, seed {seed}: {len(times)} batches, {len(lost)} lost, {twice} sent again; "
        f"under way at a kill {sum(life.under_way for life in lives) / kills:.1f}, more than one in "
        f"{sum(life.under_way > 1 for life in lives)} of them"
    )
    assert all(len(set(life.arrived)) == len(life.arrived) for life in lives)
    if durability == "memory":
        check_memory(lives, lost)
    else:
        assert not lost
        assert twice <= kills * WORKERS


def check_memory(lives: list[Life], lost: set[int]) -> None:
    """What was in memory is gone, and that is the youngest: nothing that had been spilled."""
    for index, life in enumerate(lives):
        gone = sorted(lost.intersection(life.numbers))
        after = [number for following in lives[index + 1 :] for number in following.arrived]
        from_disk = [number for number in after if number in life.numbers]
        assert len(gone) <= IN_MEMORY + WORKERS
        assert not gone or max(from_disk, default=-1) < gone[0]


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_killed_sender_loses_and_repeats_no_more_than_its_durability_says(tmp_path: Path, durability: str) -> None:
    campaign(tmp_path / "queue", durability, kills=3, seed=7)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_so_does_one_that_is_killed_hundreds_of_times(tmp_path: Path, durability: str) -> None:
    campaign(tmp_path / "queue", durability, kills=KILLS, seed=SEED)
