"""A clock that jumps under the service, and senders whose clocks are wrong: make soak PART=clocks ARGS="--seed 7"."""

from pathlib import Path
from random import Random

import pytest

from tests.campaigns.campaign import Campaign, Fault
from tests.campaigns.wrong_clock import WrongClock
from tests.service.running import Running

pytestmark = pytest.mark.server

SKEWED = {"behind": -600.0, "right": 0.0, "ahead": 300.0, "far ahead": 3600.0}  # seconds of each sender
FARTHEST = 3 * 3600  # seconds of a jump: points stay within `intake.max_future`


class Jumps:
    """What happens to the clock, and to the service with it."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._clock = WrongClock(service)

    def jump(self, rng: Random) -> None:
        self._clock.set(rng.randrange(-FARTHEST, FARTHEST))

    def jump_over_a_kill(self, rng: Random) -> None:
        self._service.kill()
        self.jump(rng)
        self._service.start()

    def kill(self, _: Random) -> None:
        self._service.kill()
        self._clock.set(self._clock.offset)
        self._service.start()

    def faults(self) -> dict[str, Fault]:
        return {"jump": self.jump, "jump over a kill": self.jump_over_a_kill, "kill": self.kill}


def run(folder: Path, seed: int, seconds: float) -> str:
    service = Running(folder)
    jumps = Jumps(service)
    with Campaign(service, seed, senders=SKEWED) as campaign:
        campaign.strike(jumps.faults(), seconds)
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
