"""A clock that jumps under the service, and senders whose clocks are wrong: make soak PART=clocks ARGS="--seed 7".

libfaketime sets the service's clock: a file says by how much. Times of files come from the kernel, whose clock stays;
so files that were written at another time are given that time before the next start reads it.
"""

import os
from pathlib import Path
from random import Random

import pytest

from penstock.errors import MissingRequirement
from tests.campaigns.campaign import Campaign, Fault
from tests.conftest import missing
from tests.servers import provide
from tests.service.running import Running

pytestmark = pytest.mark.server

SKEWED = {"behind": -600.0, "right": 0.0, "ahead": 300.0, "far ahead": 3600.0}  # seconds of each sender
FARTHEST = 3 * 3600  # seconds of a jump: points stay within `intake.max_future`


def libfaketime() -> str:
    try:
        program = provide("faketime", "faketime")
    except MissingRequirement as error:
        missing(error)
    found = sorted(Path(program).parent.parent.glob("lib/**/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip(f"{program} has no libfaketimeMT.so.1 beside it")
    return str(found[0])


class WrongClock:
    """The clock of one service."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._file = service.folder / "clock"
        self._offset = 0
        self._stamped: set[Path] = set()
        self._set(0)
        service.before = [
            "env",
            f"LD_PRELOAD={libfaketime()}",
            f"FAKETIME_TIMESTAMP_FILE={self._file}",
            "FAKETIME_CACHE_DURATION=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
        ]

    def _set(self, offset: int) -> None:
        self._stamp_files()
        self._offset = offset
        self._file.with_suffix(".new").write_text(f"{offset:+d}")
        self._file.with_suffix(".new").replace(self._file)

    def _stamp_files(self) -> None:
        for path in set((self._service.folder / "segments").glob("*.arrow")) - self._stamped:
            moment = path.stat().st_mtime + self._offset
            os.utime(path, (moment, moment))
            self._stamped.add(path)

    def jump(self, rng: Random) -> None:
        self._set(rng.randrange(-FARTHEST, FARTHEST))

    def jump_and_kill(self, rng: Random) -> None:
        self._service.kill()
        self._set(rng.randrange(-FARTHEST, FARTHEST))
        self._service.start()

    def kill(self, rng: Random) -> None:
        self._service.kill()
        self._set(self._offset)
        self._service.start()

    def faults(self) -> dict[str, Fault]:
        return {"jump": self.jump, "jump over a kill": self.jump_and_kill, "kill": self.kill}


def run(folder: Path, seed: int, seconds: float) -> str:
    service = Running(folder)
    clock = WrongClock(service)
    with Campaign(service, seed, senders=SKEWED) as campaign:
        campaign.strike(clock.faults(), seconds)
        campaign.settle()
        return campaign.report("clocks")


@pytest.mark.timeout(300)
def test_a_clock_that_jumps_once_and_senders_with_wrong_ones_lose_and_repeat_no_point(
    tmp_path: Path, seed: int
) -> None:
    run(tmp_path, seed, 0.0)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_clock_that_jumps_and_senders_with_wrong_ones_lose_and_repeat_no_point(
    tmp_path: Path, seed: int, seconds: float
) -> None:
    print(run(tmp_path, seed, seconds))  # noqa: T201 - the campaign's report
